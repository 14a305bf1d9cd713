from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.trace import launch_queue
from mrv2lab.trace.launch_queue import queue_depth, run_ahead
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace


def queue() -> Trace:
    small = SmallTrace()
    small.step(0, 20)
    small.launch((0, 2), (10, 20), "a")
    graph = small.call(4, 6, "cudaGraphLaunch")
    small.work(20, 25, "g1", correlation=graph)
    small.work(25, 30, "g2", correlation=graph, stream=20)
    small.launch((10, 12), (30, 35), "b")  # launched at the moment when a begins
    small.launch((30, 31), (40, 45), "c", stream=20)
    small.work(50, 55, "orphan", correlation=99)
    small.call(60, 62)
    small.launch((70, 80), (69, 75), "before its call")
    return small.build()


def check_depth() -> None:
    frame = queue_depth(queue())
    assert frame[["time_ns", "stream", "depth"]].values.tolist() == [
        [0, 7, 1],
        [4, 7, 2],
        [10, 7, 1],
        [10, 7, 2],
        [20, 7, 1],
        [30, 7, 0],
        [30, 20, 1],
        [40, 20, 0],
    ]
    assert {key: value for key, value in frame.attrs.items() if key != "cannot_say"} == {
        "max_depth": 2,
        "launches": 4,
        "orphans": 1,
        "without_work": 1,
        "not_queued": 1,
    }
    assert len(frame.attrs["cannot_say"]) == 3


def test_depth() -> None:
    check_depth()


def test_a_graph_that_counts_every_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(trace: Trace, known: launch_queue.Links) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        work = np.flatnonzero(known.launch >= 0)
        return known.launch[work], work, known.work[known.launch[work]]

    monkeypatch.setattr(launch_queue, "_first_work", every)
    with pytest.raises(AssertionError):
        check_depth()


def test_run_ahead() -> None:
    frame = run_ahead(queue())
    columns = [
        "api",
        "work",
        "pieces",
        "stream",
        "launch_ns",
        "work_ns",
        "ahead_ns",
        "step",
        "launch_in_step_ns",
        "work_in_step_ns",
    ]
    assert frame[columns].values.tolist() == [
        ["cudaLaunchKernel", "a", 1, 7, 0, 10, 10, 0, 0, 10],
        ["cudaGraphLaunch", "g1", 2, 7, 4, 20, 16, 0, 4, 20],
        ["cudaLaunchKernel", "b", 1, 7, 10, 30, 20, 0, 10, 30],
        ["cudaLaunchKernel", "c", 1, 20, 30, 40, 10, -1, -1, -1],
        ["cudaLaunchKernel", "before its call", 1, 7, 70, 69, -1, -1, -1, -1],
    ]


def test_steps_are_counted_from_their_own_start() -> None:
    small = SmallTrace()
    small.host(0, 1, "first")
    small.step(100, 200)
    small.launch((110, 112), (250, 260))
    assert run_ahead(small.build())[["launch_in_step_ns", "work_in_step_ns"]].values.tolist() == [[10, 150]]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-2, 20), st.integers(0, 1)), max_size=15))
def test_depth_against_counting(launches: list[tuple[int, int, int]]) -> None:
    small = SmallTrace()
    small.host(0, 1, "first")
    for start, later, stream in launches:
        small.launch((start, start + 1), (max(start + later, 0), max(start + later, 0) + 1), stream=stream)
    frame = queue_depth(small.build())
    for moment in range(42):
        for stream in (0, 1):
            waiting = sum(start <= moment < start + later for start, later, one in launches if one == stream)
            now = frame[(frame["time_ns"] <= moment) & (frame["stream"] == stream)]["depth"]
            assert (int(now.iloc[-1]) if len(now) else 0) == waiting
    assert (frame["depth"] >= 0).all()


def test_nothing_to_queue() -> None:
    small = SmallTrace()
    small.host(0, 1, "op", "op")
    for frame in (queue_depth(small.build()), run_ahead(small.build())):
        assert len(frame) == 0
        assert frame.attrs["cannot_say"][0].startswith("no GPU activity recorded")
    assert queue_depth(small.build()).attrs["max_depth"] == 0
    assert queue_depth(SmallTrace().build()).attrs["without_work"] == 0
