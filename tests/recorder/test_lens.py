"""The kernel lens: what spec and kernel of each op do, program by program, on copies, leaving no trace behind."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.recorder import lens as lens_module
from mrv2lab.recorder.lens import all_ops, find_op, lens, open_lens, trace_op
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.lens import LensError, LensRun
from mrv2lab.recording.replay import Replay
from mrv2lab.recording.replay_program import OpCall
from tests.ops.backends import mutant
from tests.recorder.op_args import INTEGER_OPS, Case, case, positions, stored, touched
from tests.recorder.runs import busy_engine, work

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def changed_by_spec(run: LensRun) -> dict[str, set[int]]:
    """Cells that differ after the spec from before it: outputs are poisoned, so these are all that it wrote, but for
    cells that it rewrote with what they held."""
    cells = {
        name: set(np.flatnonzero(run.expected[name].reshape(-1) != run.inputs[name].reshape(-1)).tolist())
        for name in run.writes
    }
    return {name: indices for name, indices in cells.items() if indices}


# -- the integer ops --------------------------------------------------------------------------------------------------
@needs_triton
@pytest.mark.parametrize("name", INTEGER_OPS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stores_are_the_cells_that_the_spec_writes(name: str, seed: int) -> None:
    given: Case = case(name, seed)
    run = trace_op(name, given.args)
    assert run.agrees, run.verdict
    assert run.verdict == "kernel = spec: bit for bit"
    stores, changed = stored(run), changed_by_spec(run)
    assert set(stores) <= set(run.writes)
    for buffer in run.writes:
        extra = stores.get(buffer, set()) - changed.get(buffer, set())
        assert changed.get(buffer, set()) <= stores.get(buffer, set())
        # Stored, but what was there already: only where the op corrects in place.
        assert extra <= given.rewritten.get(buffer, set()), (buffer, extra)


@needs_triton
@pytest.mark.parametrize("name", INTEGER_OPS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loads_lie_where_the_op_says(name: str, seed: int) -> None:
    given = case(name, seed)
    loads = touched(trace_op(name, given.args), "load")
    for buffer, indices in loads.items():
        assert buffer in given.may_load, f"{name} loads from {buffer}"
        assert indices <= given.may_load[buffer], (buffer, indices - given.may_load[buffer])


@needs_triton
def test_a_load_of_what_nobody_knows_is_seen(tmp_path) -> None:
    """A mutant reads behind the known tokens of a row: the same result, but for luck, from a stale tail."""
    wrong = mutant(find_op("prefill_inputs"), "mask=wanted & (position < known)", "mask=wanted", tmp_path)
    given = case("prefill_inputs", 1)
    loads = touched(trace_op(wrong, given.args), "load")
    assert loads["all_token_ids"] - given.may_load["all_token_ids"]


@needs_triton
def test_every_integer_op_has_a_case() -> None:
    integer = {name for name, op in all_ops().items() if op.numpy}
    assert integer == set(INTEGER_OPS), "tests/recorder/op_args.py has one function for each"


# -- rows that teach --------------------------------------------------------------------------------------------------
@needs_triton
def test_a_program_in_full() -> None:
    run = trace_op("pos_seq_lens", positions(), phase="prepare_inputs")
    assert run.phase == "prepare_inputs"
    assert run.grid == (3, 1, 1)
    assert [program.pid for program in run.programs] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    said = [
        (access.kind, access.buffer, access.index.tolist(), access.values.tolist())
        for access in run.programs[0].accesses
    ]
    assert said == [
        ("load", "idx_mapping", [0], [2]),
        ("load", "num_computed_tokens", [2], [7]),
        ("load", "query_start_loc", [0], [0]),
        ("load", "query_start_loc", [1], [3]),
        ("store", "seq_lens", [0], [10]),
        ("store", "positions", [0, 1, 2], [7, 8, 9]),
    ]
    assert [access.before.tolist() for access in run.programs[0].stores] == [[-7], [-7, -7, -7]]
    assert run.after["positions"].tolist() == run.expected["positions"].tolist() == [7, 8, 9, 5, -7, -7]
    assert run.after["seq_lens"].tolist() == [10, 6, 0]


@needs_triton
def test_an_access_knows_its_line() -> None:
    run = trace_op("pos_seq_lens", positions())
    lines = run.kernel.text.split("\n")
    for program in run.programs:
        for access in program.accesses:
            assert f"tl.{access.kind}({access.buffer}" in lines[access.line - run.kernel.line]


@needs_triton
def test_masked_lanes_are_not_accesses() -> None:
    """Blocks have 1,024 lanes, of which the mask lets one through."""
    run = trace_op("pos_seq_lens", positions())
    assert [access.index.size for access in run.programs[1].accesses] == [1] * 6


@needs_triton
def test_pointer_tables_are_made_for_the_copies() -> None:
    given = case("gather_block_tables", 0).args
    for absent in (given, {name: value for name, value in given.items() if not name.endswith(("_ptrs", "_strides"))}):
        run = trace_op("gather_block_tables", absent)
        assert run.agrees
        assert run.pointers["table_ptrs"] == ("tables[0]", "tables[1]")
        assert run.pointers["input_ptrs"] == ("input_tables[0]", "input_tables[1]")
        loads = [access for access in run.programs[1].loads if access.buffer == "table_ptrs"]
        assert [access.values.tolist() for access in loads] == [[1]]


def test_sources_are_those_of_the_file() -> None:
    run = trace_op("pos_seq_lens", positions())
    assert run.spec.file == "mrv2lab/ops/pos_seq_lens.py"
    assert run.spec.text.startswith("# idx_mapping         [r] int32, < 0 = ")
    assert "\ndef pos_seq_lens_spec(" in run.spec.text
    assert run.kernel.text.startswith("@jit\ndef pos_seq_lens_kernel(")
    assert run.launcher.text.startswith("@op(spec=pos_seq_lens_spec")
    with open(sys.modules[pos_seq_lens.spec.__module__].__file__) as file:
        assert file.read().split("\n")[run.kernel.line - 1] == "@jit"


def test_the_arguments_are_left_alone() -> None:
    given = positions()
    trace_op("pos_seq_lens", given)
    assert given["positions"].tolist() == [-7] * 6
    assert given["seq_lens"].tolist() == [-7] * 3


# -- floating point ---------------------------------------------------------------------------------------------------
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_of_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 3.0], [2.0, 1.0, 0.0, -1.0]], dtype=dtype)
    run = trace_op(
        "argmax_blocks",
        {
            "local_max": torch.zeros(2, 1),
            "local_arg": torch.zeros(2, 1, dtype=torch.int32),
            "logits": logits,
            "expanded_idx_mapping": torch.tensor([4, 1], dtype=torch.int32),
        },
    )
    assert run.agrees
    assert run.after["local_arg"].tolist() == [[1], [0]]
    assert run.programs[0].loads[1].values.tolist() == [0.5, 3.0, -1.0, 3.0]


@needs_triton
def test_one_array_given_twice_stays_one() -> None:
    x = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    run = trace_op("rms_norm", {"out": x, "x": x, "weight": torch.ones(4), "eps": 1e-5})
    assert run.notes == ("x and out are one array.",)
    assert {access.buffer for access in run.programs[0].accesses} == {"out", "weight"}
    assert not run.difference or run.difference.largest < 1e-5


# -- sizes ------------------------------------------------------------------------------------------------------------
@needs_triton
def test_a_large_launch_is_cut_and_says_so() -> None:
    r = 100
    given = positions(
        idx_mapping=np.arange(r, dtype=np.int32),
        query_start_loc=np.arange(r + 1, dtype=np.int32),
        num_computed_tokens=np.arange(r, dtype=np.int32),
        positions=np.full(r, -7, np.int64),
        seq_lens=np.full(r, -7, np.int32),
        num_reqs=r,
    )
    run = trace_op("pos_seq_lens", given, max_programs=3)
    assert run.num_programs == 101
    assert len(run.programs) == 3
    assert run.notes == ("This call launches 101 programs; the first 3 were interpreted (a lens takes 3).",)
    assert run.agrees
    assert run.verdict == "kernel = spec: bit for bit, in every cell that these 3 programs stored"


@needs_triton
def test_a_call_with_nothing_to_do() -> None:
    given = case("post_update", 0).args | {"num_reqs": 0}
    run = trace_op("post_update", given)
    assert run.agrees
    assert run.programs == ()
    assert run.notes == ("This call has nothing to do and launches no program.",)


def test_a_large_argument_is_refused() -> None:
    with pytest.raises(LensError, match="argument positions of pos_seq_lens has 4,194,305 elements"):
        trace_op("pos_seq_lens", positions(positions=np.zeros((1 << 22) + 1, np.int64)))


# -- bad input --------------------------------------------------------------------------------------------------------
def test_arguments_that_do_not_fit() -> None:
    given = positions()
    with pytest.raises(LensError, match="op pos_seq_lens has no argument rows; it takes idx_mapping, "):
        trace_op("pos_seq_lens", given | {"rows": 1})
    del given["seq_lens"]
    with pytest.raises(LensError, match="op pos_seq_lens needs the argument seq_lens"):
        trace_op("pos_seq_lens", given)
    with pytest.raises(LensError, match="the spec of pos_seq_lens refuses these arguments: IndexError"):
        trace_op("pos_seq_lens", positions(idx_mapping=np.array([2, 99], np.int32)))
    with pytest.raises(LensError, match="there is no op 'no_such'; there are add_rms_norm, "):
        find_op("no_such")


def test_without_triton_there_is_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for _ in range(2):
        run = trace_op("pos_seq_lens", positions())
        assert run.missing == "Triton is not installed, so there is no interpreter: `pip install triton` (Linux)."
        assert run.verdict == f"Spec only. {run.missing}"
        assert not run.agrees
        assert run.expected["seq_lens"].tolist() == [10, 6, 0]


@needs_triton
def test_an_interpreter_without_the_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens_module, "missing_hooks", lambda: ["create_masked_load"])
    run = trace_op("pos_seq_lens", positions())
    assert "has no create_masked_load, which the lens listens to" in run.missing


# -- a recorded step --------------------------------------------------------------------------------------------------
class Steps:
    """A replay of two steps."""

    def __len__(self) -> int:
        return 2

    def op_calls(self, index: int) -> list[OpCall]:
        update = case("post_update", index).args
        return [
            OpCall("prepare_inputs", find_op("pos_seq_lens"), positions()),
            OpCall("postprocess", find_op("post_update"), update),
        ]


class Explorer:
    """What a lens wants of a StepExplorer."""

    def __init__(self, *sources: Any, index: int = 0) -> None:
        self.sources = sources
        self.index = index


@needs_triton
def test_lens_of_a_step() -> None:
    assert lens(Steps().op_calls(0)[0]).phase == "prepare_inputs"
    assert lens(Steps(), 0).op == "pos_seq_lens"
    run = lens(Steps(), -1, "post_update")
    assert (run.op, run.phase, run.agrees) == ("post_update", "postprocess", True)
    assert lens(Steps(), -1, 1).op == "post_update"
    with pytest.raises(LensError, match="step 1 has no op 'rotary'; its ops: pos_seq_lens, post_update"):
        lens(Steps(), 1, "rotary")
    with pytest.raises(LensError, match="there is no step 2; this recording has 2 to look into, from 0"):
        lens(Steps(), 2)


@needs_triton
def test_open_lens_offers_every_op_of_the_step() -> None:
    widget = open_lens(Steps(), 1, "post_update")
    assert widget.call == 1
    assert widget.run.op == "post_update"
    widget.call = 0
    assert widget.run.op == "pos_seq_lens"
    with pytest.raises(LensError, match="step 0 has no op 'rotary'"):
        open_lens(Steps(), 0, "rotary")
    assert open_lens(Steps().op_calls(0)[1]).run.op == "post_update"
    assert open_lens(Explorer(Steps(), index=1), op=1).run.op == "post_update"
    with pytest.raises(LensError, match="this step explorer is closed"):
        open_lens(Explorer())


@pytest.mark.parametrize("source", ["run.mrv2rec", 5, None])
def test_what_is_no_recording_is_refused(source: Any) -> None:
    with pytest.raises(LensError, match=f"a {type(source).__name__} is no recording to look into"):
        lens(source)


@pytest.mark.parametrize("index", ["0", 1.5, 2, -3])
def test_a_step_that_cannot_be_is_refused(index: Any) -> None:
    with pytest.raises(LensError, match=f"there is no step {index!r}"):
        lens(Steps(), index)


@pytest.mark.parametrize("op", [None, 0.0, 2, -1])
def test_an_op_that_cannot_be_is_refused(op: Any) -> None:
    with pytest.raises(LensError, match=f"step 0 has no op {op}"):
        lens(Steps(), 0, op)


@needs_triton
def test_numbers_of_numpy_are_numbers() -> None:
    assert lens(Steps(), np.int64(1), np.int32(1)).op == "post_update"


@needs_triton
def test_every_op_of_every_recorded_step_agrees() -> None:
    """A run with chunked prefills, preemptions and aborts; a real recording is not poisoned, but it is real."""
    with busy_engine() as engine, Recorder(engine) as recorder:
        work(engine, steps=12)
    replay = Replay(recorder.recording)
    seen = set()
    for index in range(len(replay)):
        for call in replay.op_calls(index):
            run = lens(call)
            assert run.agrees, (index, run.verdict)
            seen.add(run.op)
    assert {"fused_apply_write", "prefill_inputs", "pos_seq_lens", "combine_tokens", "gather_block_tables"} <= seen
    assert {"slot_mapping", "num_sampled_and_rejected", "post_update"} <= seen
    assert lens(recorder.recording, -1, "post_update").agrees
