"""A step taken apart: its writes and its op calls are the step."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.observer import PHASES
from mrv2lab.recording.replay import Replay, hash_tables
from tests.recording.rewind import complete, way
from tests.recording.runs import ASYNC, SYNC, Run, random_run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {"sync": random_run(120, SYNC), "async": random_run(200, ASYNC)}


def test_trace_is_seek_with_notes(runs: dict[str, Run]) -> None:
    """Undoing a step's writes gives the rows before it; and a trace leaves the state that ``seek`` does."""
    run = runs["sync"]
    replay = Replay(run)
    for index in way(complete(run)[1:], "random")[:60]:
        trace = replay.trace(index)
        assert replay.state_hash() == hash_tables(run.live[index])
        assert (trace.owners_before, trace.owners_after) == (run.owners[index - 1], run.owners[index])
        undone = {name: table.copy() for name, table in replay.tables.items()}
        for write in reversed(trace.writes):
            table = undone[write.table]
            row = table[:, write.row] if write.table in ("num_blocks", "next_prefill_tokens") else table[write.row, ...]
            cells = row.reshape(-1)[write.column : write.column + len(write.before)]
            assert cells.tolist() == write.after.tolist()
            cells[...] = write.before
        for name in {write.table for write in trace.writes}:
            assert np.array_equal(undone[name], run.live[index - 1][name]), name
        phases = [write.phase for write in trace.writes]
        assert phases == sorted(phases, key=PHASES.index)


def test_who_writes_what(runs: dict[str, Run]) -> None:
    """Each table has its writers: the map of the runner, from the writes that were seen."""
    run = runs["async"]
    replay = Replay(run)
    seen = {(w.phase, w.table, w.writer, w.by) for i in complete(run) for w in replay.trace(i).writes}
    published = "prompt_len prefill_len num_blocks temperature seeds".split()
    staged = "all_token_ids total_len num_computed_tokens block_table.0".split()
    computed = "all_token_ids total_len num_computed_tokens last_sampled_tokens".split()
    assert seen == {
        *(("apply_writes", table, "cpu", "publish") for table in published),
        *(("apply_writes", table, "cpu", "fused_apply_write") for table in staged),
        ("prepare_inputs", "next_prefill_tokens", "gpu", "prefill_inputs"),
        *(("postprocess", table, "gpu", "post_update") for table in computed),
    }


def test_op_calls_are_the_step(runs: dict[str, Run]) -> None:
    """The copies, run by their specs, leave what the device had."""
    run = runs["async"]
    replay = Replay(run)
    index = next(i for i, r in enumerate(run.steps) if i > 50 and r.has_prefill and any(n.resumed for n in r.new))
    calls = replay.op_calls(index)
    assert replay.state_hash() == hash_tables(run.live[index])
    assert [(call.phase, call.name) for call in calls] == [
        *[("apply_writes", "fused_apply_write")] * 2,
        ("prepare_inputs", "prefill_inputs"),
        ("prepare_inputs", "pos_seq_lens"),
        ("prepare_inputs", "combine_tokens"),
        ("gather", "gather_block_tables"),
        ("gather", "slot_mapping"),
        ("sample", "num_sampled_and_rejected"),
        ("postprocess", "post_update"),
    ]
    for call in calls:
        assert tuple(call.args) == call.op.params
        call.run()
        for position in call.op.write_index:
            param = call.op.params[position]
            names, values = call.tables.get(param), call.args[param]
            tables = zip(names, values, strict=True) if isinstance(names, tuple) else [(names, values)]
            # What no later op of the step writes again stands in the end.
            for name, table in tables:
                if name in ("positions", "seq_lens", "logits_indices", "slot_mappings", "block_table.0"):
                    assert np.array_equal(table.reshape(run.live[index][name].shape), run.live[index][name]), name


def test_pointers_of_op_calls_are_those_of_the_copies(runs: dict[str, Run]) -> None:
    replay = Replay(runs["sync"])
    call = next(call for call in replay.op_calls(5) if call.name == "gather_block_tables")
    assert call.args["table_ptrs"].tolist() == [table.ctypes.data for table in call.args["tables"]]
    assert call.args["input_ptrs"].tolist() == [table.ctypes.data for table in call.args["input_tables"]]
    assert not np.shares_memory(call.args["tables"][0], replay.tables["block_table.0"])
