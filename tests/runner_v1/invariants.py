"""What must hold of V1's state between two steps, whatever the schedule."""

from __future__ import annotations

import numpy as np

from mrv2lab.engine.engine import Engine
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runner_v1.sampling_rows import ALLOWED


def check_sampling(batch: InputBatch, row: int, state: CachedRequestState) -> None:
    """What ``row`` asks of the sampler is what its request asks."""
    rows, params = batch.sampling, state.sampling
    stops = rows.min_tokens.get(row)
    assert (stops is None) == (not params.min_tokens or not state.stop_token_ids)
    assert stops is None or (stops.count, stops.stop_token_ids) == (params.min_tokens, state.stop_token_ids)
    assert rows.bad_words.get(row, ()) == params.bad_words
    assert rows.logit_bias.get(row, {}) == params.logit_bias
    assert rows.processors.get(row, ()) == state.processors
    assert rows.num_logprobs.get(row) == params.logprobs
    for name, table in rows.tables.items():
        if name == ALLOWED:
            allowed = params.allowed_token_ids
            assert table.np[row].sum() == (0 if allowed is None else batch.vocab_size - len(allowed))
        elif name != "top_k" or params.top_k:
            assert table.np[row] == np.float32(getattr(params, name)), f"{state.req_id}: {name} is somebody else's"


def check_invariants(engine: Engine) -> None:
    """Raises ``AssertionError`` naming the invariant. Synchronises."""
    runner, read = engine.worker.runner, engine.rt.read
    batch, scheduler = runner.input_batch, engine.scheduler
    schedule = engine.core.last_schedule
    engine.rt.synchronize()

    # Rows are dense, and are exactly those of the latest schedule.
    assert batch.req_id_to_index == {req_id: row for row, req_id in enumerate(batch.req_ids)}
    assert set(batch.req_ids) == set(schedule.num_scheduled_tokens if schedule is not None else ())
    assert batch.req_output_token_ids == [runner.requests[req_id].output_token_ids for req_id in batch.req_ids]

    for row, req_id in enumerate(batch.req_ids):
        state = runner.requests[req_id]
        length = int(batch.num_tokens_no_spec[row])
        tokens = batch.token_ids_cpu[row, :length].tolist()
        assert tokens == state.prompt_token_ids + state.output_token_ids, f"{req_id}: row and state differ"
        output = engine.requests[req_id]
        known = output.prompt_token_ids + output.token_ids
        for mine, true in zip(tokens, known, strict=False):
            assert mine in (true, -1), f"{req_id}: row {row} holds {tokens}, but the tokens are {known}"
        # A placeholder stands behind the prompt, and only under async scheduling.
        assert -1 not in tokens[: state.num_prompt_tokens]
        assert runner.async_scheduling or -1 not in tokens
        drew = state.generator is not None
        assert drew == (row in batch.generators), f"{req_id}: the generator of row {row} is somebody else's"
        assert not drew or batch.generators[row] is state.generator
        request = scheduler.requests.get(req_id)
        if request is not None and request in scheduler.running:
            (blocks,) = scheduler.kv.block_ids(request)
            assert state.block_ids == [blocks], f"{req_id}: blocks {state.block_ids}, the scheduler's {blocks}"
            count = int(batch.block_table[0].num_blocks_per_row[row])
            assert batch.block_table[0].np[row, :count].tolist() == blocks
        check_sampling(batch, row, state)
    assert batch.greedy_reqs | batch.random_reqs == set(batch.req_ids)
    assert (batch.sampling_metadata is not None) == batch.sampling.used

    if schedule is not None and schedule.total_num_scheduled_tokens:
        t, r = schedule.total_num_scheduled_tokens, len(schedule.num_scheduled_tokens)
        slots = read(runner.inputs.slot_mappings)
        assert bool((slots[:, t:] == -1).all()), f"a slot behind the batch's {t} tokens is stale"
        assert bool((slots[:, :t] >= engine.config.cache.block_size).all()), "a token's slot lies in the null block"
        assert len(set(slots[0, :t].tolist())) == t, "two tokens share a slot"
        assert not read(runner.inputs.seq_lens)[r:].any(), "seq_lens behind the batch are not zero"
        starts = read(runner.inputs.query_start_loc.gpu)
        assert bool((starts[r:] == t).all()), "query_start_loc does not repeat the number of tokens"
        assert bool((read(runner.inputs.input_ids.gpu)[:t] >= 0).all()), "a hole was not filled"
