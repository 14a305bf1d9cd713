"""Events -> columns: kinds, lanes, correlation, ranges in two halves, counters."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from mrv2lab.trace.json_chunks import Piece
from mrv2lab.trace.kineto import KinetoEvents
from mrv2lab.trace.links import links
from mrv2lab.trace.trace import KINDS, Trace, TraceInfo


def trace_of(*pieces: list[Any]) -> Trace:
    events = KinetoEvents()
    for piece in pieces:
        events.add(Piece(piece, b",".join(map(orjson.dumps, piece)), 0))
    events.finish()
    return events.build(TraceInfo("chrome", "test", rank=2))


def event(name: str, start: float, duration: float = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": start, "dur": duration, **more}


def mark(kind: str, start: float, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "name": kind, "pid": 1, "tid": 2, "ts": start, **more}


def table(trace: Trace) -> list[tuple[str, str, int, int]]:
    return [
        (trace.name_of(row), trace.kind_of(row), int(trace.start[row]), int(trace.duration[row]))
        for row in range(len(trace))
    ]


def lanes(trace: Trace) -> list[str]:
    return [str(lane) for lane in trace.lanes]


# -- kinds


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", "op"),
        ("Operator", "op"),
        ("user_annotation", "annotation"),
        ("gpu_user_annotation", "gpu_annotation"),
        ("python_function", "python"),
        ("cuda_runtime", "runtime"),
        ("cuda_driver", "runtime"),
        ("Runtime", "runtime"),
        ("privateuse1_runtime", "runtime"),
        ("xpu_runtime", "runtime"),
        ("mtia_runtime", "runtime"),
        ("kernel", "kernel"),
        ("Kernel", "kernel"),
        ("gpu_memcpy", "memcpy"),
        ("Memcpy", "memcpy"),
        ("gpu_memset", "memset"),
        ("Memset", "memset"),
        ("cuda_sync", "sync"),
        ("cuda_event", "event"),
        ("overhead", "overhead"),
        ("collective_comm", "collective"),
        ("hardware_counters", "counter"),
        ("Trace", "other"),
        ("whatever", "other"),
        (None, "other"),
    ],
)
def test_categories_of_today_and_of_2021(category: str | None, kind: str) -> None:
    assert trace_of([event("a", 1, cat=category)]).kind_of(0) == kind


def test_only_our_own_annotations_are_phases() -> None:
    trace = trace_of(
        [
            event("mrv2lab.phase.gather", 1, cat="user_annotation"),
            event("mrv2lab.other", 2, cat="user_annotation"),
            event("mrv2lab.phase.gather", 3),
            event("mrv2lab.phase.gather", 4, cat="gpu_user_annotation"),
        ]
    )
    assert [kind for _, kind, *_ in table(trace)] == ["phase", "annotation", "op", "gpu_annotation"]
    assert trace.name_of(0) == "mrv2lab.phase.gather"


# -- lanes


def test_threads_are_named_by_the_metadata_wherever_these_stand() -> None:
    name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}}
    assert lanes(trace_of([event("a", 1)], [name])) == ["main"]
    assert lanes(trace_of([name], [event("a", 1)])) == ["main"]
    assert lanes(trace_of([event("a", 1)])) == ["thread 2"]


def test_several_processes_are_named_with_their_threads() -> None:
    name = {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "engine"}}
    assert lanes(trace_of([event("a", 1), event("b", 2, pid=9), name])) == [
        "process 1: thread 2",
        "engine 9: thread 2",
    ]


def test_the_sort_index_of_the_file_orders_the_lanes() -> None:
    index = {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 5}}
    trace = trace_of([event("a", 1), event("b", 2, pid=9), index])
    assert [lane.process for lane in trace.lanes] == ["9", "1"]
    assert trace.lane_of(0).process == "1"


def test_ids_may_be_anything_and_lanes_know_the_rank() -> None:
    trace = trace_of(
        [
            event("span", 1, pid="Spans", tid="PyTorch Profiler", cat="Trace"),
            event("nothing", 2, pid="", tid=""),
            event("negative", 3, pid=-1, tid=0, cat="overhead"),
            event("thread", 4, tid="worker"),
            event("old", 5, cat="Kernel", pid=0, tid="stream 7"),
        ]
    )
    assert [(str(lane), lane.role, lane.rank) for lane in trace.lanes] == [
        ("Spans PyTorch Profiler", "other", 2),
        ("unnamed", "other", 2),
        ("profiler overhead", "other", 2),
        ("thread worker", "thread", 2),
        ("GPU 0 stream 7", "stream", 2),
    ]


def test_work_ranges_events_and_waits_of_one_stream_have_rows_of_their_own() -> None:
    args = {"device": 1, "stream": 20}
    kinds = ["kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync", "cuda_event"]
    trace = trace_of([event(kind, place, cat=kind, pid=1, tid=20, args=args) for place, kind in enumerate(kinds)])
    assert [(str(trace.lane_of(row)), trace.lane_of(row).role) for row in range(6)] == [
        *[("GPU 1 stream 20", "stream")] * 3,
        ("GPU 1 stream 20 annotations", "annotation"),
        ("GPU 1 stream 20 sync", "other"),
        ("GPU 1 stream 20 events", "other"),
    ]
    assert {(lane.device, lane.stream) for lane in trace.lanes} == {(1, 20)}


def test_lanes_that_would_be_called_the_same_are_told_apart() -> None:
    args = {"device": 0, "stream": 7}
    trace = trace_of([event("a", 1, cat="kernel", pid=pid, args=args) for pid in (1000, 2000)])
    assert lanes(trace) == ["GPU 0 stream 7 (process 1000, 7)", "GPU 0 stream 7 (process 2000, 7)"]


def test_a_process_id_is_no_device() -> None:
    trace = trace_of([event("k", 1, cat="kernel", pid=4242, tid=7), event("k", 2, cat="kernel", pid=3, tid=7)])
    assert [(str(lane), lane.device) for lane in trace.lanes] == [("4242 stream 7", -1), ("GPU 3 stream 7", 3)]


def test_a_context_wait_belongs_to_no_stream() -> None:
    args = {"device": 0, "stream": 4294967295}
    trace = trace_of([event("Context Sync", 1, cat="cuda_sync", pid=0, tid=-1, args=args)])
    assert (lanes(trace), trace.lanes[0].stream) == (["GPU 0 sync"], -1)


# -- numbers


def test_bytes_of_copies_only() -> None:
    trace = trace_of(
        [
            event("copy", 1, cat="gpu_memcpy", args={"bytes": 512}),
            event("set", 2, cat="gpu_memset", args={"Bytes": "64"}),
            event("unknown", 3, cat="gpu_memcpy", args={"a": 1}),
            event("report", 4, args={"bytes": 5}),
        ]
    )
    assert trace.nbytes.tolist() == [512, 64, -1, -1]


def launch(start: float, correlation: int, pid: int = 1, name: str = "launch") -> dict[str, Any]:
    return event(name, start, cat="cuda_runtime", pid=pid, args={"correlation": correlation})


def work(start: float, correlation: int, pid: int = 0) -> dict[str, Any]:
    return event("k", start, cat="kernel", pid=pid, tid=7, args={"correlation": correlation, "device": 0, "stream": 7})


def test_correlation_of_one_process_is_kept_as_it_is() -> None:
    trace = trace_of([launch(1, 5), work(2, 5), event("other process", 3, pid=99)])
    assert trace.correlation.tolist() == [5, 5, -1]


def test_ids_that_one_process_alone_uses_need_no_owner() -> None:
    trace = trace_of([launch(1, 5, pid=10), launch(2, 6, pid=20), work(3, 5), work(4, 6)])
    assert links(trace).launch.tolist() == [-1, -1, 0, 1]


def test_shared_ids_follow_the_process_whose_row_the_work_is_in() -> None:
    trace = trace_of([launch(1, 5, pid=10), launch(2, 5, pid=20), work(3, 5, pid=20), work(4, 5, pid=10)])
    assert links(trace).launch.tolist() == [-1, -1, 1, 0]
    assert trace.problems == ()


def test_shared_ids_follow_the_owner_of_what_is_beyond_doubt() -> None:
    rows = [launch(1, 5, pid=10), launch(2, 5, pid=20), launch(3, 8, pid=20), work(4, 8, pid=0), work(5, 5, pid=0)]
    trace = trace_of(rows)
    assert links(trace).launch.tolist() == [-1, -1, -1, 2, 1]


def test_shared_ids_that_stay_as_they_are_join_the_wrong_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant joins by the id alone, without the process."""
    monkeypatch.setattr("mrv2lab.trace.kineto.own_correlations", lambda *_: 0)
    trace = trace_of([launch(1, 5, pid=10), launch(2, 5, pid=20), work(3, 5, pid=20), work(4, 5, pid=10)])
    assert links(trace).launch.tolist() == [-1, -1, 1, 1]


def test_shared_ids_without_an_owner_are_said_to_have_none() -> None:
    trace = trace_of([launch(1, 5, pid=10), launch(2, 5, pid=20), work(3, 5, pid=0)])
    assert links(trace).launch.tolist() == [-1, -1, -1]
    assert [str(problem) for problem in trace.problems] == [
        "device work whose correlation id several processes use: no telling which launched it (1x)"
    ]


def test_arguments_stay_with_their_events_over_pieces() -> None:
    trace = trace_of(
        [event("c", 3, args={"c": [3]}), event("none", 4)],
        [event("a", 1, args={"a": {"b": None}}), event("text", 5, args="plain"), event("empty", 6, args={})],
    )
    assert [trace.args(row) for row in range(5)] == [{"a": {"b": None}}, {"c": [3]}, {}, {"args": "plain"}, {}]


# -- other types of events


def test_ranges_in_two_halves_nest_and_span_pieces() -> None:
    trace = trace_of(
        [mark("B", 1, name="outer", args={"a": 1}), mark("B", 2, name="inner"), mark("B", 2.5, tid=3, name="other")],
        [mark("E", 4), mark("E", 6.001, name="outer", args={"b": 2}), mark("E", 9, tid=3)],
    )
    assert table(trace) == [
        ("outer", "other", 0, 5001),
        ("inner", "other", 1000, 2000),
        ("other", "other", 1500, 6500),
    ]
    assert trace.args(0) == {"a": 1, "b": 2}
    assert len(trace.lanes) == 2


def test_halves_without_their_other_half() -> None:
    trace = trace_of([mark("E", 1), mark("B", 2, name="open")])
    assert table(trace) == [("open", "other", 0, 0)]
    assert [problem.reason for problem in trace.problems] == [
        "ends without a beginning, left out",
        "ranges that never ended, drawn with length 0",
    ]


def test_asynchronous_ranges_pair_by_id_in_a_row_beside_the_threads() -> None:
    trace = trace_of(
        [
            mark("b", 1, cat="request", id="a", name="first"),
            mark("b", 2, cat="request", id="b", name="second"),
            mark("n", 3, cat="request", id="a", name="token"),
            mark("e", 4, cat="request", id="a"),
            mark("e", 6, cat="request", id="b"),
        ]
    )
    assert table(trace) == [("first", "other", 0, 3000), ("second", "other", 1000, 4000), ("token", "instant", 2000, 0)]
    assert [(str(lane), lane.role) for lane in trace.lanes] == [("1 request (asynchronous)", "other")]


@pytest.mark.parametrize("kind", ["i", "I", "R"])
def test_moments(kind: str) -> None:
    trace = trace_of([mark(kind, 1, args={"x": 1}, s="g"), event("a", 2)])
    assert table(trace)[0] == (kind, "instant", 0, 0)
    assert trace.args(0) == {"x": 1}
    assert trace.lane.tolist() == [0, 0]


def test_counters_have_a_row_each_and_may_have_an_empty_key() -> None:
    trace = trace_of(
        [mark("C", 1, name="blocks", id=3, args={"": 5}), mark("C", 2, name="blocks", id=4, args={"a": 6})]
    )
    assert [(str(lane), lane.role) for lane in trace.lanes] == [("blocks 3", "counter"), ("blocks 4", "counter")]
    assert [trace.kind_of(row) for row in (0, 1)] == ["counter", "counter"]
    assert trace.args(0) == {"": 5}


def test_arrows_are_no_events_and_unknown_types_are_said() -> None:
    trace = trace_of([event("a", 1), mark("s", 1), mark("f", 2), mark("t", 2), mark("O", 3)])
    assert len(trace) == 1
    assert [problem.reason for problem in trace.problems] == ["events of type 'O', which is not read, left out"]


def test_events_without_pid_or_tid_are_counted() -> None:
    lost = {"ph": "X", "name": "a", "ts": 1, "dur": 1}
    trace = trace_of([lost, {**lost, "name": "b"}], [{**lost, "pid": 5}])
    assert [(problem.reason, problem.count) for problem in trace.problems] == [("events without pid or tid", 3)]


def test_every_kind_can_be_read() -> None:
    from mrv2lab.trace.categories import CATEGORY_KIND

    read = {KINDS[kind] for kind in CATEGORY_KIND.values()} | {"other"}
    assert set(KINDS) == read
