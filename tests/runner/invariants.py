"""The master invariants of the runner's state (reference: mrv2.md 1.0), read from the device between two steps."""

from __future__ import annotations

from mrv2lab.engine.engine import Engine


def check_invariants(engine: Engine) -> None:
    """Raises ``AssertionError`` naming the invariant. Synchronises."""
    runner, read = engine.worker.runner, engine.rt.read
    state = runner.req_states
    total, computed = read(state.total_len.gpu).tolist(), read(state.num_computed_tokens.gpu).tolist()
    last, tokens = read(state.last_sampled_tokens).tolist(), read(state.all_token_ids.gpu)

    # 4. Each active request owns one row; free and active rows are all rows, and disjoint.
    active = state.req_id_to_index
    assert sorted([*state.free_indices, *active.values()]) == list(range(state.max_num_reqs)), "4: rows leaked"
    assert state.index_to_req_id == {row: req_id for req_id, row in active.items()}, "4: the two maps differ"

    for req_id, row in active.items():
        prompt_len, prefill_len = int(state.prompt_len.np[row]), int(state.prefill_len.np[row])
        assert prompt_len <= prefill_len <= total[row], f"{req_id}: {prompt_len} <= {prefill_len} <= {total[row]}"
        if total[row] > prefill_len:
            # 1. A decoding request.
            assert computed[row] == total[row] - 1, f"1: {req_id} has computed {computed[row]} of {total[row]}"
            assert last[row] == tokens[row, total[row] - 1], f"1: the last token of {req_id} is another"
        else:
            # 2. A request in prefill.
            assert total[row] == prefill_len and computed[row] <= prefill_len, f"2: {req_id}"
        # 3. The host's mirror is an upper bound.
        assert state.num_computed_tokens_np[row] >= computed[row], (
            f"3: {req_id}: the host says {state.num_computed_tokens_np[row]}, the device {computed[row]}"
        )
        # What the device appended is what the engine was told, as far as it was told.
        output = engine.requests[req_id]
        known = (output.prompt_token_ids + output.token_ids)[: total[row]]
        assert tokens[row, : len(known)].tolist() == known, f"{req_id}: tokens of row {row} differ"

    schedule = engine.core.last_schedule
    if schedule is not None and schedule.total_num_scheduled_tokens:
        # mrv2.md 1.2 and 4.3: what lies behind the batch.
        t, r = schedule.total_num_scheduled_tokens, len(schedule.num_scheduled_tokens)
        slots = read(runner.block_tables.slot_mappings)
        assert bool((slots[:, t:] == -1).all()), f"a slot behind the batch's {t} tokens is stale"
        assert bool((slots[:, :t] >= engine.config.cache.block_size).all()), "a token's slot lies in the null block"
        assert len(set(slots[0, :t].tolist())) == t, "two tokens share a slot"
        assert not read(runner.buffers.seq_lens)[r:].any(), "seq_lens behind the batch are not zero"
        for table in runner.block_tables.input_tables:
            assert not read(table)[r:].any(), "block-table rows behind the batch are not the null block"


def waits_of_a_step(names: list[str], policy: str) -> list[str]:
    """Which of a step's waits should not be there: all but the output's and, under ``barrier``, the barrier's."""
    allowed = {"prepare_inputs"} if policy == "barrier" else set()
    return [
        name for name in names if not (name.startswith("sampled.") and name.endswith(".copied")) and name not in allowed
    ]
