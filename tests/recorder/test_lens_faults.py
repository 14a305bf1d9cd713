"""The kernel lens on kernels with bugs, and what it leaves behind: nothing."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from typing import Any

import numpy as np
import pytest

from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.recorder.lens import trace_op
from mrv2lab.recording.lens import LensError, LensRun, first_difference
from tests.ops.backends import mutant
from tests.recorder.op_args import case, positions, stored

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


# -- a kernel with a bug ----------------------------------------------------------------------------------------------
@needs_triton
def test_a_store_off_by_one(tmp_path) -> None:
    wrong = mutant(
        pos_seq_lens, "tl.store(seq_lens + i, done + length)", "tl.store(seq_lens + i + 1, done + length)", tmp_path
    )
    run = trace_op(wrong, positions())
    assert not run.agrees
    assert (run.difference.buffer, run.difference.index) == ("seq_lens", (0,))
    assert (run.difference.expected, run.difference.got, run.difference.count) == (10, -7, 2)
    assert run.verdict == ("kernel and spec differ: seq_lens[0] is -7 by the kernel and 10 by the spec; 2 cells differ")


@needs_triton
def test_a_store_outside_is_dropped_and_named(tmp_path) -> None:
    """Memory around the arguments is never touched, whatever a kernel does."""
    wrong = mutant(
        pos_seq_lens, "tl.store(seq_lens + i, done + length)", "tl.store(seq_lens + i - 1, done + length)", tmp_path
    )
    run = trace_op(wrong, positions())
    (text,) = run.programs[0].outside
    assert text.startswith("program (0, 0, 0) stores to seq_lens[-1], outside its 3 elements (line 4")
    assert run.programs[1].outside == ()
    assert not run.agrees
    assert "the kernel leaves its arguments: program (0, 0, 0) stores to seq_lens[-1]" in run.verdict
    assert stored(run)["seq_lens"] == {0, 2}


@needs_triton
def test_a_stray_store_into_an_input_is_a_difference(tmp_path) -> None:
    wrong = mutant(
        pos_seq_lens,
        "tl.store(seq_lens + i, done + length)",
        "tl.store(seq_lens + i, done + length)\n    tl.store(num_computed_tokens + 1, 42)",
        tmp_path,
    )
    run = trace_op(wrong, positions())
    assert str(run.difference) == "num_computed_tokens[1] is 42 by the kernel and 0 by the spec"


def test_differences_are_found_bit_for_bit() -> None:
    nan = np.array([np.nan, 0.0], np.float32)
    assert first_difference({"x": nan}, {"x": nan.copy()}) is None
    assert first_difference({"x": nan}, {"x": np.array([np.nan, -0.0], np.float32)}).index == (1,)
    two = {"a": np.zeros((2, 3), np.int32)}, {"a": np.array([[0, 0, 0], [0, 5, 6]], np.int32)}
    assert first_difference(*two).index == (1, 1)
    assert first_difference(*two, where={"a": np.array([0, 5])}).index == (1, 2)
    assert first_difference(*two, where={}) is None


# -- atomics ----------------------------------------------------------------------------------------------------------
COUNT = """
from __future__ import annotations

from mrv2lab.ops._op import jit, op

tl = None


def count_spec(bins, seen, tokens):
    for token in tokens:
        bins[token] += 1
    seen[0] = 1


@jit
def count_kernel(bins, seen, tokens, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + i, mask=i < n, other=0)
    tl.atomic_add(bins + token, 1, mask=i < n)
    tl.atomic_cas(seen, 0, 1)


@op(spec=count_spec, kernel=count_kernel, writes=("bins", "seen"))
def count(kernel, bins, seen, tokens):
    kernel[(-(-tokens.shape[0] // 4),)](bins, seen, tokens, tokens.shape[0], BLOCK=4)
"""


@needs_triton
def test_an_atomic_is_a_load_and_a_store(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No op has one yet; histograms will."""
    (tmp_path / "op_that_counts.py").write_text(COUNT)
    monkeypatch.syspath_prepend(str(tmp_path))
    count = importlib.import_module("op_that_counts").count
    tokens = np.array([2, 0, 2, 2, 1], np.int32)
    run = trace_op(count, {"bins": np.zeros(3, np.int32), "seen": np.zeros(1, np.int32), "tokens": tokens})
    assert run.agrees, run.verdict
    assert run.after["bins"].tolist() == [1, 1, 3]
    first, second = run.programs
    assert [(a.kind, a.buffer, a.index.tolist()) for a in first.accesses[1:]] == [
        ("load", "bins", [2, 0, 2, 2]),
        ("store", "bins", [2, 0, 2, 2]),
        ("load", "seen", [0]),
        ("store", "seen", [0]),
    ]
    assert second.stores[0].index.tolist() == [1]
    assert (second.stores[0].before.tolist(), second.stores[0].values.tolist()) == ([0], [1])


# -- nothing leaks ----------------------------------------------------------------------------------------------------
@pytest.fixture
def _same_triton() -> Any:
    """The interpreter and Triton's language are afterwards what they were."""
    import triton.language as tl
    from triton.runtime import interpreter

    trace_op("pos_seq_lens", positions())  # Triton loads some of itself on first use
    places = (tl, tl.core, tl.math, tl.standard, tl.tensor, interpreter, interpreter.InterpreterBuilder)
    before = [dict(vars(place)) for place in places]
    builder = dict(vars(interpreter.interpreter_builder))
    yield
    for place, names in zip(places, before, strict=True):
        assert [name for name, value in names.items() if vars(place)[name] is not value] == []
    assert vars(interpreter.interpreter_builder) == builder


@needs_triton
@pytest.mark.usefixtures("_same_triton")
def test_a_lens_leaves_the_interpreter_as_it_was() -> None:
    trace_op("gather_block_tables", case("gather_block_tables", 0).args)
    trace_op("pos_seq_lens", positions(), max_programs=1)


@needs_triton
@pytest.mark.usefixtures("_same_triton")
def test_so_does_a_kernel_that_raises(tmp_path) -> None:
    wrong = mutant(pos_seq_lens, "tl.store(seq_lens + i, done + length)", "tl.store(seq_lens + nothing, 1)", tmp_path)
    with pytest.raises(LensError, match=r"the kernel raised in program \(0, 0, 0\): NameError: name 'nothing'"):
        trace_op(wrong, positions())
    assert trace_op("pos_seq_lens", positions()).agrees


@needs_triton
@pytest.mark.usefixtures("_same_triton")
def test_so_does_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mrv2lab.recorder.lens_trace.Watch._log", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trace_op("pos_seq_lens", positions())
    assert trace_op("pos_seq_lens", positions()).agrees


@needs_triton
@pytest.mark.usefixtures("_same_triton")
def test_several_at_once() -> None:
    runs: list[LensRun] = []
    threads = [threading.Thread(target=lambda: runs.append(trace_op("pos_seq_lens", positions()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.agrees for run in runs] == [True] * 4
    assert [sum(len(program.accesses) for program in run.programs) for run in runs] == [13] * 4
