"""One hand-made trace for each rule by which the path leads backwards; microseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2lab.trace import critical_path as module
from mrv2lab.trace.critical_path import critical_path
from mrv2lab.trace.path_graph import PathGraph
from mrv2lab.trace.path_names import HostNames
from mrv2lab.trace.trace import Lane, Trace, TraceError
from tests.trace.hand_made import US, HandMade, Marks

Path = list[tuple[str, str, float, float]]
BETWEEN = "between two pieces of work"
QUEUED = "launched, not begun"


def path(trace: Trace, step: int | str | None = None) -> Path:
    table = critical_path(trace, step)
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    assert (start[1:] == end[:-1]).all(), "without gaps and overlaps"
    assert (table["duration_ns"] == end - start).all() and (end > start).all()
    assert table["duration_ns"].sum() == (end[-1] - start[0] if len(table) else 0)
    return [(row.resource, row.name, row.start_ns / US, row.end_ns / US) for row in table.itertuples(name="Row")]


def test_work_behind_work_on_its_stream() -> None:
    made = HandMade().call(5, 5, "launch", 1).call(12, 5, "launch", 2)
    assert path(made.kernel(20, 30, "a", 1).kernel(52, 8, "b", 2).build()) == [
        ("host", "host", 0, 5),
        ("launch", "launch", 5, 10),
        ("queue", QUEUED, 10, 20),
        ("device", "a", 20, 50),
        ("queue", BETWEEN, 50, 52),
        ("device", "b", 52, 60),
    ]


def test_work_whose_launch_came_late() -> None:
    made = HandMade().call(5, 5, "launch", 1).op(30, 30, "aten::mm").call(40, 5, "launch", 2)
    assert path(made.kernel(12, 8, "a", 1).kernel(48, 8, "b", 2).build()) == [
        ("host", "host", 0, 5),
        ("launch", "launch", 5, 10),
        ("host", "host, before aten::mm", 10, 30),
        ("host", "aten::mm", 30, 40),
        ("launch", "launch", 40, 45),
        ("queue", QUEUED, 45, 48),
        ("device", "b", 48, 56),
    ]


def test_a_launch_that_had_begun_when_the_work_before_ended() -> None:
    """Within the usual time between two pieces of work the device is what held it up; later the launch is."""
    made = HandMade().call(5, 5, "launch", 1).call(18, 4, "launch", 2).kernel(12, 8, "a", 1)
    assert path(made.kernel(23, 8, "b", 2).build())[-2:] == [("queue", BETWEEN, 20, 23), ("device", "b", 23, 31)]
    made = HandMade().call(5, 5, "launch", 1).call(18, 20, "launch", 2).kernel(12, 8, "a", 1)
    assert path(made.kernel(39, 8, "b", 2).build())[-3:] == [
        ("launch", "launch", 18, 38),
        ("queue", QUEUED, 38, 39),
        ("device", "b", 39, 47),
    ]


def test_a_graph_of_many_kernels() -> None:
    """All of one launch: a pause between two of them is the device's, however long (HTA#290)."""
    made = HandMade().call(5, 40, "cudaGraphLaunch", 1)
    made.kernel(30, 10, "a", 1).kernel(60, 10, "b", 1).kernel(71, 9, "c", 1)
    assert path(made.build()) == [
        ("host", "host", 0, 5),
        ("launch", "cudaGraphLaunch", 5, 30),
        ("device", "a", 30, 40),
        ("queue", BETWEEN, 40, 60),
        ("device", "b", 60, 70),
        ("queue", BETWEEN, 70, 71),
        ("device", "c", 71, 80),
    ]


def test_programmatic_launch_overlaps_are_cut() -> None:
    made = HandMade().call(1, 1, "launch", 1).call(3, 1, "launch", 2).kernel(10, 20, "a", 1).kernel(28, 12, "b", 2)
    assert path(made.build())[-2:] == [("device", "a", 10, 28), ("device", "b", 28, 40)]


def test_a_stream_that_was_told_to_wait_for_another() -> None:
    made = HandMade().call(1, 1, "launch", 1).kernel(5, 45, "a", 1, on=20).call(3, 1, "cudaEventRecord", 32)
    made.call(5, 1, "cudaStreamWaitEvent", 33)
    made.record(5, 1, "Stream Wait Event", 33, on=24, wait_on_stream=20, wait_on_cuda_event_record_corr_id=32)
    trace = made.call(7, 1, "launch", 2).kernel(51, 9, "b", 2, on=24).build()
    assert path(trace)[-3:] == [("device", "a", 5, 50), ("queue", BETWEEN, 50, 51), ("device", "b", 51, 60)]


def test_a_wait_that_held_up_earlier_work_is_not_taken_again() -> None:
    made = HandMade().call(1, 1, "launch", 1).kernel(5, 45, "a", 1, on=20).call(3, 1, "cudaEventRecord", 32)
    made.call(5, 1, "cudaStreamWaitEvent", 33)
    made.record(5, 1, "Stream Wait Event", 33, on=24, wait_on_stream=20, wait_on_cuda_event_record_corr_id=32)
    made.call(7, 1, "launch", 2).kernel(51, 9, "b", 2, on=24).call(70, 1, "launch", 3)
    assert path(made.kernel(75, 5, "c", 3, on=24).build())[-3:-1] == [
        ("launch", "launch", 70, 71),
        ("queue", QUEUED, 71, 75),
    ]


def test_a_wait_of_the_host_leads_to_what_it_waited_for() -> None:
    made = HandMade().call(1, 1, "launch", 1).kernel(5, 45, "a", 1).call(10, 50, "cudaDeviceSynchronize")
    trace = made.call(70, 2, "launch", 2).kernel(75, 5, "b", 2).build()
    assert path(trace) == [
        ("host", "host", 0, 1),
        ("launch", "launch", 1, 2),
        ("queue", QUEUED, 2, 5),
        ("device", "a", 5, 50),
        ("wait", "cudaDeviceSynchronize", 50, 60),
        ("host", "host", 60, 70),
        ("launch", "launch", 70, 72),
        ("queue", QUEUED, 72, 75),
        ("device", "b", 75, 80),
    ]


def test_a_wait_for_nobody_knows_what_stays_on_the_host() -> None:
    made = HandMade().call(1, 1, "launch", 1).kernel(5, 45, "a", 1).call(10, 50, "cudaEventSynchronize")
    trace = made.call(70, 2, "launch", 2).kernel(75, 5, "b", 2).build()
    assert path(trace)[:5] == [
        ("host", "host", 0, 1),
        ("launch", "launch", 1, 2),
        ("host", "host", 2, 10),
        ("wait", "cudaEventSynchronize", 10, 60),
        ("host", "host", 60, 70),
    ]
    assert "does not say which work was waited for" in critical_path(trace).attrs["cannot_say"][0]


def test_nested_launch_calls_count_once() -> None:
    made = HandMade().call(10, 8, "cudaLaunchKernel", 1).call(12, 4, "cuLaunchKernel", 2).call(30, 2, "launch", 3)
    made.kernel(13, 2, "a", 1).kernel(16, 2, "b", 2)
    assert path(made.kernel(40, 5, "c", 3).build())[:4] == [
        ("host", "host", 0, 10),
        ("launch", "cudaLaunchKernel", 10, 18),
        ("host", "host", 18, 30),
        ("launch", "launch", 30, 32),
    ]


def test_work_whose_launch_is_not_in_the_file() -> None:
    made = HandMade().call(1, 1, "launch", 1).kernel(5, 5, "a", 1).kernel(12, 5, "orphan").kernel(40, 5, "late")
    trace = made.build()
    assert path(trace)[-5:] == [
        ("device", "a", 5, 10),
        ("queue", "its launch is not in the file", 10, 12),
        ("device", "orphan", 12, 17),
        ("unknown", "its launch is not in the file", 17, 40),
        ("device", "late", 40, 45),
    ]
    assert "23.0 us lead to work whose launch" in critical_path(trace).attrs["cannot_say"][0]
    assert path(HandMade().kernel(12, 5, "orphan").build())[0] == ("unknown", "its launch is not in the file", 0, 12)


def test_a_step_ends_with_its_own_work_and_may_lead_through_another_s() -> None:
    made = HandMade().step(1, 20, 1).call(5, 1, "launch", 1).kernel(10, 90, "a", 1)
    made.step(30, 20, 2).call(35, 1, "launch", 2).kernel(100, 10, "b", 2).step(60, 5, 3)
    trace = made.build()
    assert path(trace, 0)[-1] == ("device", "a", 10, 100)
    expected: Path = [("device", "a", 30, 100), ("device", "b", 100, 110)]
    assert path(trace, 1) == path(trace, "mrv2lab.step#2") == expected
    assert path(trace, "mrv2lab.step#3") == [("host", "host", 60, 65)]
    assert "launched no device work" in critical_path(trace, 2).attrs["cannot_say"][0]


@pytest.mark.parametrize("step", [3, -1, "no such step"])
def test_a_step_that_is_not_there(step: int | str) -> None:
    with pytest.raises(TraceError, match=r"hand-made: no step .* among its 1 steps"):
        critical_path(HandMade().step(1, 20, 1).build(), step)


def test_traces_with_little_in_them() -> None:
    with pytest.raises(TraceError, match="holds no events"):
        critical_path(HandMade().build().select(np.empty(0, np.int64)))
    cpu = HandMade().op(5, 20, "aten::mm").build()
    assert path(cpu) == [("host", "host, before aten::mm", 0, 5), ("host", "aten::mm", 5, 25)]
    assert "no GPU activity recorded" in critical_path(cpu).attrs["cannot_say"][0]


def test_clocks_that_disagree_end_the_path() -> None:
    """A kernel that starts before its launch, and a wait that ends before what it waited for."""
    made = HandMade().call(20, 5, "launch", 1).kernel(15, 10, "a", 1).call(30, 5, "cudaDeviceSynchronize")
    made.call(40, 1, "launch", 2).kernel(33, 30, "b", 2)
    trace = made.build()
    assert path(trace)[-1] == ("device", "b", 33, 63)


def test_host_time_is_named_after_what_ran_in_it() -> None:
    made = HandMade().frame(0, 60, "user/app.py(3): prepare").op(10, 5, "aten::empty").op(12, 2, "aten::inner")
    made.op(30, 10, "aten::copy_").call(35, 2, "launch", 1)
    made.op(61, 3, "aten::add").call(70, 2, "launch", 2).kernel(40, 5, "a", 1)
    assert path(made.kernel(75, 5, "b", 2).build())[:8] == [
        ("host", "prepare", 0, 10),
        ("host", "aten::empty", 10, 15),
        ("host", "prepare", 15, 30),
        ("host", "aten::copy_", 30, 35),
        ("launch", "launch", 35, 37),
        ("host", "aten::copy_", 37, 40),
        ("host", "host, before aten::add", 40, 61),  # partly in prepare, partly not
        ("host", "aten::add", 61, 64),
    ]


def test_host_time_of_a_recording_is_named_after_its_phases() -> None:
    made = Marks().add(0, 10, "prepare_inputs", "phase", Lane("mrv2", "host phases"))
    made.add(20, 20, "forward", "phase", Lane("mrv2", "host phases"))
    made.mark(30, "kernel", "gemm", device=(32, 40), phase="forward")
    assert path(made.build())[:3] == [
        ("host", "prepare_inputs", 0, 10),
        ("host", "host, before forward", 10, 20),
        ("host", "forward", 20, 30),
    ]


def test_any_trace_gives_a_whole_path() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        made, link = HandMade(), 0
        for _ in range(int(rng.integers(1, 40))):
            at, length = int(rng.integers(200)), int(rng.integers(40))
            kind = rng.integers(5)
            if kind == 0:
                made.call(at, length, str(rng.choice(["cudaStreamSynchronize", "cudaDeviceSynchronize"])))
            elif kind == 1:
                made.kernel(at, length, on=int(rng.integers(3)))
            else:
                link += 1
                made.call(at, length, "launch", link)
                for _ in range(int(rng.integers(1, 4))):
                    later = int(rng.integers(-5, 60))
                    made.kernel(max(at + later, 0), int(rng.integers(30)), "k", link, on=int(rng.integers(3)))
        trace = made.build()
        found = path(trace)
        work = trace.mask("kernel")
        if found:
            assert found[0][2] == 0 and found[-1][3] * US == (trace.end[work].max() if work.any() else trace.end.max())


@pytest.mark.parametrize(
    ("owner", "name", "bug", "test"),
    [
        (PathGraph, "before", lambda self, work: -1, test_work_behind_work_on_its_stream),
        (PathGraph, "wait_before", lambda *_: None, test_a_wait_of_the_host_leads_to_what_it_waited_for),
        (PathGraph, "calls_within", lambda *_: [], test_nested_launch_calls_count_once),
        (HostNames, "_between", lambda self, start, call, event: "host", test_host_time_is_named_after_what_ran_in_it),
        (module, "ADJACENT_NS", 0, test_a_launch_that_had_begun_when_the_work_before_ended),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mutants_die(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Any, test: Any) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        test()
