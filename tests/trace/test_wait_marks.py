"""The host's waits as a timeline's marks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.wait_marks import wait_marks
from tests.trace.hand_made import US, HandMade, Marks

FRAME = "torch/cuda/streams.py(5): synchronize"


def test_a_mark_is_as_long_as_the_caller_saw_and_says_where() -> None:
    made = HandMade().frame(0, 100, "user/app.py(3): run").frame(10, 50, FRAME).call(20, 5, "cudaEventSynchronize", 1)
    trace = made.call(70, 5, "cudaStreamWaitEvent", 2).build()
    (mark,) = wait_marks(trace).to_dict("records")
    assert (mark["kind"], mark["end_ns"] - mark["start_ns"]) == ("sync", 50 * US)
    assert mark["label"] == "cudaEventSynchronize at user/app.py:3"
    assert trace.lanes[mark["lane"]].thread == "10"


def test_a_mark_of_a_recording_names_the_phase() -> None:
    trace = Marks().mark(50, "synchronize", "barrier", waited=20, phase="barrier_wait").build()
    (mark,) = wait_marks(trace).to_dict("records")
    assert mark["label"] == "barrier: barrier (barrier_wait)"
    assert mark["end_ns"] - mark["start_ns"] == 20 * US


def test_without_waits_and_with_something_else() -> None:
    empty = HandMade().build().select(np.empty(0, np.int64))
    assert list(wait_marks(empty).columns) == ["start_ns", "end_ns", "kind", "label", "lane"]
    assert wait_marks(empty).attrs["cannot_say"] == syncs(empty).attrs["cannot_say"]
    with pytest.raises(TypeError, match=r"wait_marks\(\) takes a Trace, got str; Trace.load\(path\) reads a file"):
        wait_marks("a.json")  # type: ignore[arg-type]


def test_marks_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import mrv2lab.trace.wait_marks, mrv2lab; mrv2lab.overlay"
    subprocess.run([sys.executable, "-c", code], check=True)
