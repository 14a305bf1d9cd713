from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace import busy as busy_module
from mrv2lab.trace.busy import CAUSES, PARTS, busy, gaps
from mrv2lab.trace.trace import Lane, Trace
from tests.trace.small_trace import SmallTrace


def test_busy_time_is_a_union_and_devices_are_kept_apart() -> None:
    small = SmallTrace()
    small.launch((0, 2), (10, 30), stream=7)
    small.launch((2, 4), (20, 40), stream=20)
    small.launch((4, 6), (90, 110), "Memset (Device)", kind="memset", stream=7)
    small.launch((6, 8), (35, 45), device=1)
    small.launch((8, 9), (10, 10), stream=7)  # a kernel without length
    frame = busy(small.build()).drop(columns=["rank", "process"])
    assert frame.to_dict("list") == {
        "device": [0, 1, "all"],
        "start_ns": [10, 35, 10],
        "end_ns": [110, 45, 110],
        "span_ns": [100, 10, 100],
        "busy_ns": [50, 10, 55],
        "sum_ns": [60, 10, 70],
        "busy_share": [0.5, 1.0, 0.55],
        "events": [4, 1, 5],
        "streams": [2, 1, 3],
    }


def test_streams_of_id_0_and_unknown_devices_count() -> None:
    small = SmallTrace()
    small.launch((0, 1), (2, 4), stream=0)
    small.launch((5, 6), (7, 9), stream=-1, device=-1)
    assert busy(small.build())["device"].tolist() == [-1, 0, "all"]


def test_ranks_share_device_numbers_but_no_devices() -> None:
    small = SmallTrace()
    for rank in (0, 1):
        small.builder.add(10 * rank, 5, "k", "kernel", Lane("GPU 0", "stream 7", "stream", 0, 7, rank=rank))
    frame = busy(small.build())
    assert frame["rank"].tolist() == [0, 1, -1]
    assert frame["busy_share"].tolist() == [1.0, 1.0, 10 / 15]


def test_merged_traces_without_ranks_keep_their_devices_apart() -> None:
    small = SmallTrace()
    for start, title in ((0, "a"), (10, "b")):
        small.builder.add(start, 5, "k", "kernel", Lane(f"{title}: GPU 0", "stream 7", "stream", 0, 7))
    assert busy(small.build(producer="merged"))["process"].tolist() == ["a: GPU 0", "b: GPU 0", ""]


def test_without_device_work_nothing_is_idle() -> None:
    small = SmallTrace()
    small.host(0, 100, "aten::mm", "op")
    for frame in (busy(small.build()), gaps(small.build())):
        assert len(frame) == 0
        assert any(said.startswith("no GPU activity recorded") for said in frame.attrs["cannot_say"])
    assert "busy_share" in busy(small.build()).columns


def only(trace: Trace) -> dict[str, Any]:
    frame = gaps(trace)
    assert len(frame) == 1
    return frame.iloc[0].to_dict()


def first_kernel(small: SmallTrace) -> None:
    """Work until 100; every gap below begins there."""
    small.launch((0, 10), (20, 100), "first")


def host_late() -> Trace:
    small = SmallTrace()
    first_kernel(small)
    small.host(0, 200, "python")
    small.launch((180, 190), (195, 210), "second")
    return small.build()


def test_host_late() -> None:
    found = only(host_late())
    assert {key: found[key] for key in ("device", "start_ns", "end_ns", "duration_ns", "before", "after", "cause")} == {
        "device": 0,
        "start_ns": 100,
        "end_ns": 195,
        "duration_ns": 95,
        "before": "first",
        "after": "second",
        "cause": "host late",
    }
    assert [found[part] for part in PARTS] == [0, 80, 0, 10, 5]


def test_waiting() -> None:
    """The host synchronises on what runs, then needs 30 ns to launch again."""
    small = SmallTrace()
    small.host(0, 400, "python")
    first_kernel(small)
    small.call(50, 160, "cudaDeviceSynchronize")
    small.launch((190, 194), (195, 210), "second")
    found = only(small.build())
    assert [found[part] for part in PARTS] == [60, 30, 0, 4, 1]
    assert found["cause"] == "waiting"


def test_another_threads_wait_is_not_the_launchers() -> None:
    small = SmallTrace()
    small.host(0, 400, "python")
    first_kernel(small)
    small.call(50, 190, "cudaDeviceSynchronize", thread="2")
    small.launch((190, 194), (195, 210), "second")
    assert only(small.build())["cause"] == "host late"


def test_nothing_queued() -> None:
    small = SmallTrace()
    first_kernel(small)
    small.launch((190, 194), (195, 210), "second")
    found = only(small.build())
    assert [found[part] for part in PARTS] == [0, 0, 90, 4, 1]
    assert found["cause"] == "nothing queued"


def test_launch_bound_by_one_long_launch() -> None:
    small = SmallTrace()
    small.host(0, 400, "python")
    first_kernel(small)
    small.launch((90, 150), (152, 160), "second", api="cudaGraphLaunch")
    found = only(small.build())
    assert [found[part] for part in PARTS] == [0, 0, 0, 50, 2]
    assert found["cause"] == "launch-bound"


def test_launch_bound_by_launches_of_another_device() -> None:
    """Four launches back to back for device 1 before device 0 gets its turn."""
    small = SmallTrace()
    small.host(0, 400, "python")
    first_kernel(small)
    for start in (100, 110, 120, 130):
        small.launch((start, start + 9), (20, 400), device=1)
    small.launch((142, 149), (150, 160), "second")
    frame = gaps(small.build())
    found = frame[frame["device"] == 0].iloc[0]
    assert [found[part] for part in PARTS] == [0, 6, 0, 43, 1]
    assert found["cause"] == "launch-bound"


def test_device_late_and_device_side_wait() -> None:
    """Launched long before; with a record that names the stream, the wait for an event is the reason."""
    for waits in (False, True):
        small = SmallTrace()
        first_kernel(small)
        correlation = small.call(20, 22, "cudaStreamWaitEvent")
        if waits:
            small.work(
                20,
                22,
                "Stream Wait Event",
                "sync",
                correlation=correlation,
                stream=20,
                cuda_sync_kind="Stream Wait Event",
            )
        small.launch((30, 40), (150, 160), "second", stream=20)
        small.launch((41, 45), (190, 200), "third", stream=20)  # behind the second; the wait is not for it
        frame = gaps(small.build())
        assert frame["cause"].tolist() == ["device-side wait" if waits else "device late", "device late"]
        assert frame["queued_ns"].tolist() == [50, 30]


def test_orphan() -> None:
    small = SmallTrace()
    first_kernel(small)
    small.work(150, 160, "second", correlation=77)
    frame = gaps(small.build())
    assert frame["cause"].tolist() == ["orphan"]
    assert frame["launch_event"].tolist() == [-1]
    assert frame.attrs["cannot_say"] == ["1 gaps end with work whose launch is not in the file: no cause can be given"]


def test_only_gaps_that_are_longer_than_usual_ask_for_a_reason() -> None:
    small = SmallTrace()
    for start in (0, 200, 5_400):  # gaps of 100 ns and of 5,100 ns, all launched long before
        small.launch((start // 1000, start // 1000 + 1), (start + 10, start + 110))
    frame = gaps(small.build())
    assert frame["cause"].tolist() == ["device late", "device late"]
    (said,) = frame.attrs["cannot_say"]
    assert said.startswith("1 gap of more than 5 us, together 5.1 us, end with work that had been launched before")


def test_gaps_are_of_the_device_and_not_of_a_stream() -> None:
    small = SmallTrace()
    small.launch((0, 1), (10, 50), "a", stream=7)
    small.launch((1, 2), (20, 90), "b", stream=20)
    small.launch((2, 3), (60, 70), "c", stream=7)
    small.launch((3, 4), (100, 110), "d", stream=7)
    small.launch((4, 5), (110, 120), "e", stream=20)
    frame = gaps(small.build())
    assert frame[["before", "after", "start_ns", "end_ns"]].values.tolist() == [["b", "d", 90, 100]]
    assert len(gaps(small.build(), min_ns=10)) == 1
    assert len(gaps(small.build(), min_ns=11)) == 0


def test_the_step_is_that_of_the_work_that_ends_the_gap() -> None:
    small = SmallTrace()
    small.step(0, 50, "ProfilerStep#1")
    first_kernel(small)
    small.step(50, 100, "ProfilerStep#2")
    small.launch((60, 70), (150, 160))
    small.launch((110, 111), (170, 180))
    assert gaps(small.build())["step"].tolist() == [1, -1]


def test_the_profilers_overhead_is_shown_beside_the_cause() -> None:
    small = SmallTrace()
    small.host(0, 400, "python")
    first_kernel(small)
    small.host(110, 170, "Activity Buffer Request", "overhead", thread="profiler")
    small.launch((105, 190), (195, 210), "second")
    found = only(small.build())
    assert (found["cause"], found["overhead_ns"]) == ("launch-bound", 60)


def test_a_recordings_lanes_are_one_thread() -> None:
    small = SmallTrace()
    small.host(0, 200, "prepare_inputs", "phase", thread="host phases")
    small.launch((0, 10), (20, 100), "first", thread="host calls")
    small.launch((180, 190), (195, 210), "second", thread="host calls")
    trace = small.build(producer="recording", modelled=True)
    assert only(trace)["cause"] == "host late"
    assert any("modelled" in said for said in gaps(trace).attrs["cannot_say"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["python", "sync", "launch", "orphan"]),
            st.integers(0, 60),
            st.integers(0, 30),
            st.integers(0, 40),
            st.integers(0, 20),
            st.integers(0, 1),
        ),
        max_size=12,
    )
)
def test_parts_add_up_and_busy_and_idle_are_the_span(events: list[tuple[str, int, int, int, int, int]]) -> None:
    small = SmallTrace()
    for what, start, length, later, lasts, lane in events:
        call = (start, start + length)
        if what == "python":
            small.host(*call, "python", thread=str(lane))
        elif what == "sync":
            small.call(*call, "cudaStreamSynchronize", thread=str(lane))
        else:
            work = (start + later - 5, start + later - 5 + lasts)  # may begin before its call: clocks
            small.launch(call, work, stream=lane, thread=str(lane)) if what == "launch" else small.work(
                *work, stream=lane
            )
    trace = small.build()
    frame, whole = gaps(trace), busy(trace)
    assert (frame[list(PARTS)].sum(axis=1) == frame["duration_ns"]).all()
    assert (frame[list(PARTS)] >= 0).all(axis=None)
    assert set(frame["cause"]) <= set(CAUSES)
    if len(whole):
        row = whole[whole["device"] == 0].iloc[0]
        device = trace.mask("kernel") & (trace.duration > 0)
        span = int(trace.end[device].max() - trace.start[device].min()) if device.any() else 0
        assert frame["duration_ns"].sum() + row["busy_ns"] == span
        assert (trace.end[frame["before_event"]] == frame["start_ns"]).all()
        assert (trace.start[frame["after_event"]] == frame["end_ns"]).all()


def test_a_cause_by_the_wrong_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: all threads are one."""
    monkeypatch.setattr(busy_module, "thread_of_lane", lambda trace: np.zeros(len(trace.lanes), np.int64))
    monkeypatch.setattr("mrv2lab.trace.host_threads.thread_of_lane", lambda trace: np.zeros(len(trace.lanes), np.int64))
    with pytest.raises(AssertionError):
        test_another_threads_wait_is_not_the_launchers()
