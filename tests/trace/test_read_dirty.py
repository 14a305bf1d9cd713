"""Dirty files that users reported (peers' issue trackers), one test each: what is kept, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mrv2lab.trace.links import links, orphans
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import Trace, TraceError

Read = Callable[[str | bytes | list[Any]], Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def make(content: str | bytes | list[Any]) -> Trace:
        text = json.dumps({"traceEvents": content}) if isinstance(content, list) else content
        path = tmp_path / "trace.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load(path)

    return make


def event(name: str, start: float, duration: float = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": start, "dur": duration, **more}


def kernel(name: str, start: float, duration: float = 1, **args: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, **args}
    return event(name, start, duration, cat="kernel", pid=0, tid=7, args=args)


def launch(start: float, correlation: Any) -> dict[str, Any]:
    return event("cudaLaunchKernel", start, cat="cuda_runtime", args={"correlation": correlation})


def names(trace: Trace) -> list[str]:
    return [trace.name_of(row) for row in range(len(trace))]


def told(trace: Trace) -> dict[str, int]:
    return {problem.reason: problem.count for problem in trace.problems}


def test_row_2_a_kernel_of_no_length_inside_another_shares_its_lane(read: Read) -> None:
    trace = read([kernel("long", 10, 5), kernel("none", 12, 0)])
    assert trace.lane.tolist() == [0, 0]
    assert trace.duration.tolist() == [5000, 0]
    assert trace.problems == ()


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "NaN", "Infinity", "-Infinity", "-nan(ind)", "+inf"])
def test_row_4_words_that_json_lacks(read: Read, word: str) -> None:
    text = '[{"ph": "X", "name": "inf, nan", "pid": 1, "tid": 2, "ts": 1, "dur": 2, "args": {"GB/s": W, "l": [1, W]}}]'
    trace = read(text.replace("W", word))
    assert names(trace) == ["inf, nan"]
    assert trace.args(0) == {"GB/s": None, "l": [1, None]}
    assert told(trace) == {"inf or nan where JSON has no word for it, read as null": 1}
    assert trace.problems[0].offset == 1


def test_row_5_a_missing_quotation_mark_costs_nothing_but_is_said_with_its_place(read: Read) -> None:
    good, bad = json.dumps(event("good", 1)), json.dumps(event("bad", 2)).replace('"tid"', '\ttid"')
    trace = read(f"[{good}, {bad}, {good}]")
    assert names(trace) == ["good", "good", "bad"]
    assert trace.problems[0].reason == "keys without both quotation marks, mended"
    assert trace.problems[0].offset == len(good) + 3
    assert len(trace.lanes) == 1


def test_row_5_what_cannot_be_mended_is_left_out_with_its_place(read: Read) -> None:
    good = json.dumps(event("good", 1))
    trace = read(f'[{good}, {{"ph": "X", "name" "ts" 5}}, {good}]')
    assert names(trace) == ["good", "good"]
    assert told(trace) == {"events that are not JSON": 1}
    assert trace.problems[0].offset == len(good) + 3
    assert trace.problems[0].example.startswith('{"ph": "X", "name" "ts"')


def test_row_6_control_characters_and_replacement_characters(read: Read) -> None:
    raw = "".join(chr(code) for code in range(1, 0x20))
    text = '[{"ph": "X", "name": "a\ufffd' + raw + 'b", "pid": 1, "tid": 2, "ts": 1, "dur": 2}]'
    trace = read(text)
    assert names(trace) == [f"a\ufffd{raw}b"]
    assert told(trace) == {"control characters in a text, escaped": 1}


def test_row_7_bytes_that_are_not_utf8(read: Read) -> None:
    text = json.dumps([event("kernel<X>", 1), event("good", 2)]).encode().replace(b"<X>", b"<\xf0\x9f>")
    trace = read(text)
    assert names(trace) == ["kernel<\ufffd>", "good"]
    assert told(trace) == {"bytes that are not UTF-8, replaced": 1}


def test_row_9_an_array_without_its_end(read: Read) -> None:
    text = json.dumps([event("a", 1), event("b", 2)])
    trace = read(text[:-1])
    assert names(trace) == ["a", "b"]
    assert list(told(trace)) == ["the array of events has no end: the file was cut off, or is still being written"]
    assert read(text).problems == ()
    assert read(text[:-1] + ",").problems == trace.problems


def test_row_9_an_event_cut_in_the_middle(read: Read) -> None:
    text = json.dumps([event("a", 1), event("b", 2, args={"x": [{"y": 1}]})])
    trace = read(text[:-9])
    assert names(trace) == ["a"]
    assert "the file ends in the middle of an event, which was left out" in told(trace)


def test_row_9_events_within_events(read: Read) -> None:
    inner = {"traceEvents": [event("a", 1)], "baseTimeNanoseconds": 10**18}
    trace = read(json.dumps({"before": 1, "traceEvents": {"first": [{"x": 1}], **inner}, "behind": 2}))
    assert names(trace) == ["a"]
    assert trace.info.origin_ns == 10**18 + 1000
    assert trace.info.extra == {"before": 1, "first": [{"x": 1}], "behind": 2}
    assert trace.problems == ()


def test_row_10_no_rank_is_no_reason_to_refuse(read: Read) -> None:
    trace = read([kernel("k", 1)])
    assert (trace.info.rank, trace.info.world_size, trace.lanes[0].rank) == (-1, -1, -1)


def test_row_12_nothing_to_read_is_said_in_a_sentence(read: Read) -> None:
    with pytest.raises(TraceError, match=r"holds no events: nothing in its 19 bytes"):
        read('{"traceEvents": []}')


def test_row_14_a_trace_without_a_gpu_loads(read: Read) -> None:
    trace = read([event("a", 1)])
    assert not trace.mask("kernel", "memcpy", "memset").any()
    assert repr(trace).startswith("Trace 'trace.json' (kineto): 1 events, 0 on a device")


def test_row_15_a_kernel_that_starts_before_its_launch_keeps_both_times(read: Read) -> None:
    trace = read([launch(10, 5), kernel("early", 9, correlation=5), launch(1, 6)])
    assert names(trace) == ["cudaLaunchKernel", "early", "cudaLaunchKernel"]
    assert trace.start.tolist() == [0, 8000, 9000]
    assert links(trace).launch.tolist() == [-1, 2, -1]


@pytest.mark.parametrize("nothing", [0, -1, 4294967295, "", None, "none", [1], 2**63, 1.5])
def test_row_19_correlations_that_are_none(read: Read, nothing: object) -> None:
    trace = read([launch(1, nothing), kernel("k", 2, correlation=nothing), kernel("absent", 3)])
    assert trace.correlation.tolist() == [-1, -1, -1]
    assert orphans(trace).tolist() == [False, True, True]


def test_row_19_a_correlation_may_be_a_text_and_the_external_id_is_none(read: Read) -> None:
    trace = read([launch(1, "17"), kernel("k", 2, correlation=17), kernel("x", 3, **{"External id": 17})])
    assert trace.correlation.tolist() == [17, 17, -1]


def test_row_21_stream_0_is_a_stream(read: Read) -> None:
    trace = read([event("k", 1, cat="kernel", pid=2, tid=0, args={"device": 2, "stream": 0})])
    lane = trace.lanes[0]
    assert (lane.role, lane.device, lane.stream, str(lane)) == ("stream", 2, 0, "GPU 2 stream 0")


def test_row_24_ranges_that_cross_on_one_thread_are_all_kept(read: Read) -> None:
    trace = read([event("a", 1, 5), event("b", 3, 6)])
    assert names(trace) == ["a", "b"]
    assert trace.problems == ()


def test_row_27_rows_that_are_no_stream_give_way_to_the_arguments(read: Read) -> None:
    graph = {**kernel("node", 1), "tid": 900007}
    wait = event("Event Sync", 2, cat="cuda_sync", pid=0, tid=4000000, args={"stream": 7, "device": 0})
    trace = read([kernel("plain", 0), graph, wait])
    assert [str(trace.lane_of(row)) for row in range(3)] == [
        "GPU 0 stream 7",
        "GPU 0 stream 7",
        "GPU 0 stream 7 sync",
    ]
    assert trace.lane_of(2).role == "other"


def test_row_29_absolute_times_with_three_decimals_lose_no_nanosecond(read: Read) -> None:
    text = ",".join(
        f'{{"ph": "X", "name": "k", "pid": 0, "tid": 7, "cat": "kernel", "ts": 1661203462598738.{i:03}, "dur": 0.001}}'
        for i in range(1000)
    )
    trace = read(f"[{text}]")
    assert trace.start.tolist() == list(range(1000))
    assert set(trace.duration.tolist()) == {1}
    assert (trace.info.clock, trace.info.origin_ns) == ("unix", 1661203462598738000)


def test_row_29_the_digits_must_come_from_the_text(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant trusts doubles whatever their size, and 1,000 neighbours become a handful."""
    monkeypatch.setattr("mrv2lab.trace.microseconds.is_exact", lambda _: True)
    text = ",".join(f'{{"ph": "i", "name": "k", "pid": 0, "ts": 1661203462598738.{i:03}}}' for i in range(1000))
    assert len(set(read(f"[{text}]").start.tolist())) < 10


@pytest.mark.parametrize("written", ["1.661203462598738125e15", '"1661203462598738.125"', "1661203462598738.12500"])
def test_row_29_however_they_are_written(read: Read, written: str) -> None:
    trace = read(f'[{{"ph": "X", "name": "k", "pid": 0, "tid": 7, "ts": {written}, "dur": "1e-3"}}]')
    assert trace.info.origin_ns == 1661203462598738125
    assert trace.duration.tolist() == [1]


def test_row_30_with_a_base_times_are_unix_wherever_it_stands(read: Read) -> None:
    events = json.dumps([event("a", 1365627862757.064)])
    base = '"baseTimeNanoseconds": 1767189312000000000'
    for text in (f'{{{base}, "traceEvents": {events}}}', f'{{"traceEvents": {events}, "x": [{{"y": 1}}], {base}}}'):
        info = read(text).info
        assert (info.clock, info.origin_ns) == ("unix", 1768554939862757064)


def test_row_30_without_a_base_the_clock_is_unknown(read: Read) -> None:
    assert read([event("a", 1365627862757.064)]).info.clock == "unknown"


def test_row_30_a_base_beside_absolute_times_is_ignored(read: Read) -> None:
    text = json.dumps({"traceEvents": [event("a", 1661203462598738)], "baseTimeNanoseconds": 1767189312000000000})
    trace = read(text)
    assert trace.info.origin_ns == 1661203462598738000
    assert list(told(trace)) == ["a base time beside times that are absolute already, ignored"]


def test_bytes_behind_the_end_are_said(read: Read) -> None:
    text = json.dumps({"traceEvents": [event("a", 1)], "traceName": "x"})
    trace = read(text + "\n{more}")
    assert names(trace) == ["a"]
    assert list(told(trace)) == ["bytes behind the end of the trace, not read"]
    assert read(text + " \n\0\0").problems == ()
    assert list(told(read(json.dumps([event("a", 1)]) + "]"))) == ["bytes behind the end of the trace, not read"]


def test_a_file_cut_behind_its_events_keeps_what_it_says_there(read: Read) -> None:
    text = json.dumps({"traceEvents": [event("a", 1)], "baseTimeNanoseconds": 10**18, "traceName": "/tmp/x"})
    trace = read(text[:-5])
    assert trace.info.origin_ns == 10**18 + 1000
    assert list(told(trace)) == ["metadata that are not valid JSON, read in part"]


def test_metadata_with_inf_are_mended(read: Read) -> None:
    trace = read('{"speed": inf, "distributedInfo": {"rank": 3}, "traceEvents": [' + json.dumps(event("a", 1)) + "]}")
    assert trace.info.rank == 3
    assert list(told(trace)) == ["metadata that are not valid JSON, mended"]


def test_html_stays_text(read: Read) -> None:
    assert names(read([event("<img src=x onerror=alert(1)>", 1)])) == ["<img src=x onerror=alert(1)>"]


def test_quotation_marks_in_a_name(read: Read) -> None:
    trace = read('[{"ph": "X", "cat": "a", "name": "f("x", \'y\')", "pid": 1, "tid": 2, "ts": 1, "dur": 1}]')
    assert names(trace) == ["f(\"x\", 'y')"]


def test_backslashes_that_escape_nothing_and_lone_surrogates(read: Read) -> None:
    trace = read(r'[{"ph": "X", "name": "C:\Windows\ud800 \n", "pid": 1, "tid": 2, "ts": 1, "dur": 1}]')
    assert names(trace) == ["C:\\Windows\ufffd \n"]


def test_broken_arguments_cost_only_the_arguments(read: Read) -> None:
    good = json.dumps(event("good", 5))
    text = f'[{{"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 1, "dur": 1, "args": {{"x" 1}}}}, {good}]'
    trace = read(text)
    assert names(trace) == ["a", "good"]
    assert trace.args(0) == {}
    assert told(trace) == {"arguments that are not valid JSON, left out": 1}


def test_duplicate_keys_nested_arguments_and_entries_that_are_no_events(read: Read) -> None:
    text = '{"ph": "X", "name": "a", "name": "b", "pid": 1, "tid": 2, "ts": 1, "dur": 1, "args": {"a": [{"b": [1]}]}}'
    trace = read(f"[5, null, {text}]")
    assert names(trace) == ["b"]
    assert trace.args(0) == {"a": [{"b": [1]}]}
    assert told(trace) == {"entries that are no events, left out": 2}


def test_events_without_name_time_length_type_or_thread(read: Read) -> None:
    whole = event("a", 1)
    lacking = [{key: whole[key] for key in whole if key != lost} for lost in ("name", "ts", "dur", "ph", "tid")]
    trace = read([whole, *lacking])
    assert names(trace) == ["a", "unnamed", "a", "a"]
    assert told(trace) == {
        "events without a name, called 'unnamed'": 1,
        "events without a time, left out": 1,
        "events that were never finished (no length, a negative one, or one of months), drawn with length 0": 1,
        "events without a type (ph), left out": 1,
        "events without pid or tid": 1,
    }


def test_a_negative_length_is_no_length(read: Read) -> None:
    trace = read([event("ok", 1, 3), event("open", 2, -1)])
    assert trace.duration.tolist() == [3000, 0]
    assert trace.problems[0].example.startswith("{'ph': 'X', 'cat': 'cpu_op', 'name': 'open'")
    assert trace.problems[0].offset == len('{"traceEvents": [') + len(json.dumps(event("ok", 1, 3))) + 2


@pytest.mark.parametrize("time", [1e300, "1e999999", -(2**63), 2**80, "soon", None])
def test_times_that_are_none(read: Read, time: object) -> None:
    trace = read([event("good", 1), event("bad", 0) | {"ts": time}])
    assert names(trace) == ["good"]
    assert told(trace) == {"events without a time, left out": 1}


def test_a_list_for_an_id_is_read_as_a_text(read: Read) -> None:
    trace = read([event("a", 1, pid=[1], cat={"x": 1}), event("b", 2, cat="kernel", args={"stream": [7]})])
    assert names(trace) == ["a", "b"]
    assert trace.lane_of(0).process == "[1]"
    assert told(trace) == {"ids that are neither numbers nor texts, read as texts": 2}


@pytest.mark.parametrize("depth", [250, 300, 900])
def test_arguments_that_nest_deeply(read: Read, depth: int) -> None:
    deep = '{"ph": "X", "cat": "cpu_op", "name": "deep", "pid": 1, "tid": 2, "ts": 2, "dur": 1, "args": %s}'
    trace = read(f"[{json.dumps(event('good', 1, args={'x': 1}))}, {deep % ('[' * depth + ']' * depth)}]")
    assert names(trace) == ["good", "deep"]
    assert trace.args(0) == {"x": 1}
    assert json.dumps(trace.args(1)) == f'{{"args": {"[" * depth + "]" * depth}}}'


def test_arguments_that_nest_deeper_than_can_be_written(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(args: object) -> bytes:
        raise RecursionError

    monkeypatch.setattr(msgspec.json, "encode", refuse)
    deep = '{"ph": "X", "cat": "cpu_op", "name": "deep", "pid": 1, "tid": 2, "ts": 2, "dur": 1, "args": %s}'
    trace = read(f"[{deep % ('[' * 900 + ']' * 900)}]")
    assert [trace.args(row) for row in range(len(trace))] == [{"args": "nested too deeply to be kept"}]


def test_times_whose_ends_would_leave_int64(read: Read) -> None:
    far = 4_600_000_000_000_000
    trace = read([event("good", 0, 5), event("before", -far, far), event("behind", far, far), event("long", 1, 1e13)])
    assert names(trace) == ["good", "long", "behind"]
    assert trace.duration.tolist() == [5000, 0, 0]
    assert trace.span_ns == far * 1000
    assert told(trace) == {
        "events without a time, left out": 1,
        "events that were never finished (no length, a negative one, or one of months), drawn with length 0": 2,
    }


def test_a_rank_that_is_none_and_versions_that_are_no_texts(read: Read) -> None:
    about = {"distributedInfo": {"rank": 2**70, "world_size": "8"}, "mrv2lab": {"producer": "merged"}}
    about["mrv2lab"]["versions"] = {"a": [1]}
    trace = read(json.dumps({**about, "traceEvents": [event("good", 1)]}))
    assert (trace.info.rank, trace.info.world_size, trace.info.versions) == (-1, 8, {"a": "[1]"})
