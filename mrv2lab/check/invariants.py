"""The master invariants of MRV2's state, read from the device between two steps: what must hold whatever the schedule.

For lessons and tests: reading synchronises. The numbers are those of the list in ``check_invariants``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.engine.engine import Engine


class InvariantBroken(AssertionError):
    """The runner's state contradicts itself, or what the engine was told. The message names the invariant."""


def check_invariants(engine: Engine) -> None:
    """Raises :class:`InvariantBroken`. Synchronises. For MRV2 only: ``ValueError`` for another runner.

    1. A decoding request has computed all of its tokens but the last, and its last token is its row's last.
    2. A request in prefill knows ``prefill_len`` tokens and has computed no more.
    3. The host's count of computed tokens is never below the device's.
    4. Each live request owns one row; free and owned rows are all rows, and disjoint.
    5. A row holds the tokens that the engine was told.
    6. Behind the batch nothing is stale: slots -1, lengths 0, the null block; each token has its own slot.
    """
    kind = engine.config.runner.runner
    if kind != "mrv2":
        raise ValueError(
            f"these are invariants of MRV2's rows, and this engine's runner is {kind!r}; use runner='mrv2'"
        )
    runner, read = engine.worker.runner, engine.rt.read
    state: Any = runner.req_states
    total, computed = read(state.total_len.gpu).tolist(), read(state.num_computed_tokens.gpu).tolist()
    last, tokens = read(state.last_sampled_tokens).tolist(), read(state.all_token_ids.gpu)

    active = state.req_id_to_index
    _hold(sorted([*state.free_indices, *active.values()]) == list(range(state.max_num_reqs)), "4: rows leaked")
    _hold(state.index_to_req_id == {row: req_id for req_id, row in active.items()}, "4: the two maps differ")

    for req_id, row in active.items():
        prompt_len, prefill_len = int(state.prompt_len.np[row]), int(state.prefill_len.np[row])
        _hold(prompt_len <= prefill_len <= total[row], f"{req_id}: {prompt_len} <= {prefill_len} <= {total[row]}")
        if total[row] > prefill_len:
            _hold(computed[row] == total[row] - 1, f"1: {req_id} has computed {computed[row]} of {total[row]}")
            _hold(last[row] == tokens[row, total[row] - 1], f"1: the last token of {req_id} is another")
        else:
            _hold(total[row] == prefill_len and computed[row] <= prefill_len, f"2: {req_id}")
        mirror = state.num_computed_tokens_np[row]
        _hold(mirror >= computed[row], f"3: {req_id}: the host says {mirror}, the device {computed[row]}")
        # As far as the engine was told.
        output = engine.requests[req_id]
        known = (output.prompt_token_ids + output.token_ids)[: total[row]]
        _hold(tokens[row, : len(known)].tolist() == known, f"5: {req_id}: tokens of row {row} differ")

    schedule = engine.core.last_schedule
    if schedule is not None and schedule.total_num_scheduled_tokens:
        t, r = schedule.total_num_scheduled_tokens, len(schedule.num_scheduled_tokens)
        slots = read(runner.block_tables.slot_mappings)
        _hold(bool((slots[:, t:] == -1).all()), f"6: a slot behind the batch's {t} tokens is stale")
        in_blocks = bool((slots[:, :t] >= engine.config.cache.block_size).all())
        _hold(in_blocks, "6: a token's slot lies in the null block")
        _hold(len(set(slots[0, :t].tolist())) == t, "6: two tokens share a slot")
        _hold(not read(runner.buffers.seq_lens)[r:].any(), "6: seq_lens behind the batch are not zero")
        for table in runner.block_tables.input_tables:
            _hold(not read(table)[r:].any(), "6: block-table rows behind the batch are not the null block")


def _hold(truth: bool, message: str) -> None:
    if not truth:
        raise InvariantBroken(message)
