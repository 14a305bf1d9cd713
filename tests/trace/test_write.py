"""What is written reads back as it was, is the same each time, and is what Perfetto wants."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.recording.recording import Recording
from mrv2lab.trace import write as module
from mrv2lab.trace import write_rows
from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.from_recording import from_recording
from mrv2lab.trace.nsys import read_nsys
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import KINDS, Lane, Trace, TraceError, TraceInfo
from mrv2lab.trace.write import write_perfetto
from mrv2lab.trace.write_rows import overflow
from tests.trace.nsys_file import two_processes, write_nsys

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
TRACES = Path(__file__).parents[2] / "traces"
FILES = (
    "01_vllm_v1_b200_eager.json.gz",
    "02_vllm_v1_decode_fullgraph.json.gz",
    "03_vllm_v1_prefilldecode_piecewise.json.gz",
    "04_h100_qwen1.5_0.5b_hf.json.gz",
    "06_hta_cuda_event_sync_multi_stream.json.gz",
    "07_hta_no_gpu_events.json.gz",
    "09a_hta_compare_base.json.gz",
)

HOST = Lane("100", "101", label="thread 101")
STREAM = Lane("0", "7", "stream", 0, 7, label="GPU 0 stream 7")


def info(**changes: Any) -> TraceInfo:
    return TraceInfo(**{"producer": "kineto", "title": "t", "clock": "unix", "origin_ns": 10**18} | changes)


def small() -> TraceBuilder:
    """A launch, a graph launch with two kernels that overlap, and an orphan."""
    b = TraceBuilder()
    b.add(0, 9000, "mrv2lab.step#1", "annotation", HOST, arg=b.arg(b'{"note":"<b>bold</b>"}'))
    b.add(1000, 500, "cudaLaunchKernel", "runtime", HOST, correlation=5)
    b.add(2000, 700, "cuGraphLaunch", "runtime", HOST, correlation=6, arg=b.arg(b'{"correlation":6}'))
    b.add(2001, 1, "first<int>", "kernel", STREAM, correlation=5)
    b.add(3000, 1000, "second", "kernel", STREAM, correlation=6)
    b.add(3900, 1234, "third", "kernel", STREAM, correlation=6)
    b.add(6000, 10, "Memcpy HtoD (Pinned -> Device)", "memcpy", STREAM, correlation=99, nbytes=64)
    b.add(7000, 0, "a moment", "instant", HOST)
    return b


def written(trace: Trace, tmp_path: Path, name: str = "out.json") -> dict[str, Any]:
    write_perfetto(trace, tmp_path / name)
    found: dict[str, Any] = json.loads((tmp_path / name).read_bytes())
    return found


def resolved(trace: Trace, args: bool = True) -> list[tuple[Any, ...]]:
    columns = zip(
        trace.start.tolist(), trace.duration.tolist(), trace.correlation.tolist(), trace.nbytes.tolist(), strict=True
    )
    return [
        (trace.name_of(i), trace.kind_of(i), trace.lane_of(i), *values, trace.args(i) if args else None)
        for i, values in enumerate(columns)
    ]


def test_the_file_in_full(tmp_path: Path) -> None:
    write_perfetto(small().build(info()), tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == (
        '{"displayTimeUnit":"ms","baseTimeNanoseconds":1000000000000000000,'
        '"mrv2lab":{"producer":"kineto","title":"t","clock":"unix","modelled":false,"versions":{},"problems":[],'
        '"arrows":"one a launch, to the first piece of its device work"},"traceEvents":[\n'
        '{"ph":"M","name":"process_sort_index","pid":100,"tid":0,"args":{"sort_index":0}},\n'
        '{"ph":"M","name":"thread_sort_index","pid":100,"tid":101,"args":{"sort_index":0}},\n'
        '{"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"GPU 0"}},\n'
        '{"ph":"M","name":"process_sort_index","pid":0,"tid":0,"args":{"sort_index":1}},\n'
        '{"ph":"M","name":"thread_name","pid":0,"tid":7,"args":{"name":"GPU 0 stream 7"}},\n'
        '{"ph":"M","name":"thread_sort_index","pid":0,"tid":7,"args":{"sort_index":0}},\n'
        '{"ph":"M","name":"thread_name","pid":0,"tid":"overlap of stream 7",'
        '"args":{"name":"GPU 0 stream 7, overlap"}},\n'
        '{"ph":"M","name":"thread_sort_index","pid":0,"tid":"overlap of stream 7","args":{"sort_index":0}},\n'
        '{"ph":"X","cat":"user_annotation","pid":100,"tid":101,"name":"mrv2lab.step#1","ts":0.000,"dur":9.000,'
        '"args":{"note":"\\u003cb>bold\\u003c/b>"}},\n'
        '{"ph":"X","cat":"cuda_runtime","pid":100,"tid":101,"name":"cudaLaunchKernel","ts":1.000,"dur":0.500,'
        '"args":{"correlation":5}},\n'
        '{"ph":"X","cat":"cuda_driver","pid":100,"tid":101,"name":"cuGraphLaunch","ts":2.000,"dur":0.700,'
        '"args":{"correlation":6}},\n'
        '{"ph":"X","cat":"kernel","pid":0,"tid":7,"name":"first\\u003cint>","ts":2.001,"dur":0.001,'
        '"args":{"correlation":5}},\n'
        '{"ph":"X","cat":"kernel","pid":0,"tid":7,"name":"second","ts":3.000,"dur":1.000,"args":{"correlation":6}},\n'
        '{"ph":"X","cat":"kernel","pid":0,"tid":"overlap of stream 7","name":"third","ts":3.900,"dur":1.234,'
        '"args":{"correlation":6}},\n'
        '{"ph":"X","cat":"gpu_memcpy","pid":0,"tid":7,"name":"Memcpy HtoD (Pinned -> Device)","ts":6.000,"dur":0.010,'
        '"args":{"correlation":99,"bytes":64}},\n'
        '{"ph":"i","s":"t","cat":"cpu_instant_event","pid":100,"tid":101,"name":"a moment","ts":7.000},\n'
        '{"ph":"s","id":0,"pid":100,"tid":101,"cat":"ac2g","name":"ac2g","ts":1.000},\n'
        '{"ph":"f","bp":"e","id":0,"pid":0,"tid":7,"cat":"ac2g","name":"ac2g","ts":2.001},\n'
        '{"ph":"s","id":1,"pid":100,"tid":101,"cat":"ac2g","name":"ac2g","ts":2.000},\n'
        '{"ph":"f","bp":"e","id":1,"pid":0,"tid":7,"cat":"ac2g","name":"ac2g","ts":3.000}\n'
        "]}\n"
    )


# -- reads back as it was


@pytest.mark.parametrize("name", FILES)
def test_real_files_read_back_as_they_were(name: str, tmp_path: Path) -> None:
    if not (SHARED / name).is_file():
        pytest.skip("the shared traces are not here")
    trace = load(SHARED / name, cache=False)
    path = tmp_path / name.removesuffix(".gz")
    write_perfetto(trace, path)
    again = load(path, cache=False)
    assert resolved(again) == resolved(trace)
    assert (again.info.clock, again.info.origin_ns, again.info.rank) == (
        trace.info.clock, trace.info.origin_ns, trace.info.rank,
    )  # fmt: skip
    assert again.info.devices == trace.info.devices
    # and what is read back is written as before
    before = path.read_bytes()
    write_perfetto(again, path)
    assert of_trace(path.read_bytes()) == of_trace(before)


def of_trace(text: bytes) -> tuple[dict[str, Any], list[Any]]:
    """A written file but for what it says of the file that was read."""
    found = orjson.loads(text)
    del found["mrv2lab"]["title"], found["mrv2lab"]["problems"]
    return found, found.pop("traceEvents")


def test_an_nsys_export_reads_back_but_for_what_chrome_has_no_word_for(tmp_path: Path) -> None:
    trace = read_nsys(write_nsys(tmp_path / "two.sqlite", two_processes()))
    write_perfetto(trace, tmp_path / "out.json")
    again = load(tmp_path / "out.json")
    spoken = trace.mask("annotation", "phase", "runtime", "kernel", "memcpy", "memset", "sync", "instant")
    assert resolved(again.select(spoken), args=False) == resolved(trace.select(spoken), args=False)
    assert again.info.origin_ns == trace.info.origin_ns
    copy = int(np.flatnonzero(again.mask("memcpy"))[0])
    assert again.args(copy) == {"correlation": 6, "bytes": 4096, "device": 2} | trace.args(copy)


@pytest.mark.parametrize("name", ["h200_stories", "h200_live"])
def test_a_recording_can_be_shown(name: str, tmp_path: Path) -> None:
    trace = from_recording(Recording.load(TRACES / f"{name}.mrv2rec"))
    write_perfetto(trace, tmp_path / "out.json")
    again = load(tmp_path / "out.json")
    assert again.names == tuple(dict.fromkeys(trace.name_of(i) for i in range(len(trace))))
    assert (again.start == trace.start).all()
    assert (again.duration == trace.duration).all()
    work = trace.mask("kernel", "memcpy")
    assert (again.mask("kernel", "memcpy") == work).all()
    assert (again.correlation[work] == trace.correlation[work]).all()


ORIGINS = st.sampled_from([0, 1, 10**9, 1_700_000_000_123_456_789, 2**53 + 1, 4_000_000_000_000_000_001])
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 10**12),
        st.one_of(st.integers(0, 5), st.integers(0, 10**10)),
        st.sampled_from(["k", "cuLaunchKernel", "<img src=x>", 'a"b\\c\n\x01é\U0001f600', "mrv2lab.phase.x", "\u2028"]),
        st.sampled_from(["kernel", "memcpy", "runtime", "op", "python", "annotation", "instant"]),
        st.integers(-1, 3),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, origin=ORIGINS, clock=st.sampled_from(["unix", "unknown"]))
def test_any_trace_reads_back_to_the_nanosecond(
    events: list[tuple[int, int, str, str, int, int]], origin: int, clock: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    b = TraceBuilder()
    for start, duration, name, kind, correlation, lane in events:
        on_device = kind in ("kernel", "memcpy")
        where = Lane("0", str(lane), "stream", 0, lane) if on_device else Lane("9", str(40 + lane))
        duration = 0 if kind == "instant" else duration
        correlation = correlation if on_device or kind == "runtime" else -1
        nbytes = 7 if kind == "memcpy" else -1
        kind = "phase" if kind == "annotation" and name.startswith("mrv2lab.phase.") else kind
        b.add(start, duration, name, kind, where, correlation=correlation or -1, nbytes=nbytes)
    trace = b.build(info(origin_ns=origin, clock=clock))
    path = tmp_path_factory.mktemp("any") / "out.json"
    write_perfetto(trace, path)
    again = load(path)

    def plain(one: Trace) -> list[tuple[Any, ...]]:
        return [(*row[:2], row[2].process, row[2].thread, row[2].role, *row[3:7]) for row in resolved(one)]

    assert plain(again) == plain(trace)
    assert again.info.origin_ns == trace.info.origin_ns


def test_mutant_a_time_that_is_rounded_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_us", lambda ns: b"%.2f" % (ns / 1000))
    trace = small().build(info())
    write_perfetto(trace, tmp_path / "out.json")
    assert resolved(load(tmp_path / "out.json"), args=False) != resolved(trace, args=False)


def test_mutant_all_slices_in_one_row_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_rows, "_levels", lambda start, end: np.zeros(len(start), np.int64))
    assert overflow(small().build(info())).tolist() != [0, 0, 0, 0, 0, 1, 0, 0]


# -- overlaps


def test_what_crosses_goes_beside_the_stream() -> None:
    assert overflow(small().build(info())).tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=40))
def test_slices_of_one_row_nest_and_none_is_lost(stretches: list[tuple[int, int]]) -> None:
    b = TraceBuilder()
    for start, duration in stretches:
        b.add(start, duration, "k", "kernel", STREAM)
    trace = b.build(info())
    rows = overflow(trace)
    assert len(rows) == len(stretches)
    for row in set(rows.tolist()):
        mine = list(zip(trace.start[rows == row].tolist(), trace.end[rows == row].tolist(), strict=True))
        for place, (start, end) in enumerate(mine):
            for earlier_start, earlier_end in mine[:place]:
                assert start >= earlier_end or (start >= earlier_start and end <= earlier_end)
    # No row more than needed: whoever is not in row 0 crosses somebody in the row above.
    for event in np.flatnonzero(rows):
        above = rows == rows[event] - 1
        start, end = trace.start[event], trace.end[event]
        assert (above & (trace.start < end) & (trace.end > start) & (trace.start <= start) & (trace.end < end)).any()


def test_host_slices_stay_on_their_thread() -> None:
    b = TraceBuilder()
    b.add(0, 10, "a", "op", HOST)
    b.add(5, 10, "b", "op", HOST)
    assert overflow(b.build(info())).tolist() == [0, 0]


def test_the_overlaps_of_a_programmatic_launch(tmp_path: Path) -> None:
    name = FILES[0]
    if not (SHARED / name).is_file():
        pytest.skip("the shared traces are not here")
    events = written(load(SHARED / name, cache=False), tmp_path)["traceEvents"]
    beside = [one for one in events if one["ph"] == "X" and one["tid"] == "overlap of stream 7"]
    # 74 overlaps; in a chain of them every other kernel is enough.
    assert len(beside) == 38
    assert sum(one["ph"] == "X" and one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") for one in events) == 929


def test_rows_of_threads_and_streams_of_one_process_do_not_meet(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.add(0, 1, "call", "runtime", Lane("7", "7"))
    b.add(0, 1, "k", "kernel", Lane("7", "7", "stream", 0, 7))
    tids = {one["tid"] for one in written(b.build(info()), tmp_path)["traceEvents"] if one["ph"] == "X"}
    assert tids == {7, "stream 7"}
    assert [lane.role for lane in load(tmp_path / "out.json").lanes] == ["thread", "stream"]


# -- arrows, counters, names


def test_a_graph_launch_has_one_arrow(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.add(0, 10, "cudaGraphLaunch", "runtime", HOST, correlation=1)
    for i in range(5):
        b.add(20 + i, 1, "k", "kernel", STREAM, correlation=1)
    events = written(b.build(info()), tmp_path)["traceEvents"]
    arrows = [(one["ph"], one["ts"], one["id"]) for one in events if one["ph"] in "sf"]
    assert arrows == [("s", 0.0, 0), ("f", 0.02, 0)]


def test_counters_keep_their_rows(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.add(0, 0, "memory", "counter", Lane("1", "memory", "counter", label="memory"), arg=b.arg(b'{"":5}'))
    b.add(1, 0, "memory", "counter", Lane("1", "memory 0x2", "counter", label="memory 0x2"), arg=b.arg(b'{"a":1}'))
    b.add(2, 3, "k", "op", HOST)
    trace = b.build(info())
    write_perfetto(trace, tmp_path / "out.json")
    assert resolved(load(tmp_path / "out.json")) == resolved(trace)


def test_markup_is_inert_and_lone_surrogates_survive(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.add(0, 1, "</script><script>alert(1)</script>", "op", HOST)
    b.add(1, 1, "\ud800 half a character", "op", HOST)
    trace = b.build(info(title="<img onerror=x>"))
    write_perfetto(trace, tmp_path / "out.json")
    assert b"<" not in (tmp_path / "out.json").read_bytes()
    assert load(tmp_path / "out.json").names == ("</script><script>alert(1)</script>", "? half a character")


def test_arguments_are_kept_and_only_completed(tmp_path: Path) -> None:
    b = TraceBuilder()
    where = Lane("rank 0", "main", "stream", 3, 4)
    b.add(0, 1, "a", "kernel", where, correlation=8, arg=b.arg(b'{"correlation":8,"grid":[1,2,3]}'))
    b.add(1, 1, "b", "kernel", where, correlation=8, arg=b.arg(b'{"nested":{"correlation":1},"stream":9}'))
    b.add(2, 1, "c", "kernel", where, correlation=8, arg=b.arg(b'{"text":"\\"correlation\\":"}'))
    args = [one["args"] for one in written(b.build(info()), tmp_path)["traceEvents"] if one["ph"] == "X"]
    assert args == [
        {"device": 3, "stream": 4, "correlation": 8, "grid": [1, 2, 3]},
        {"correlation": 8, "device": 3, "nested": {"correlation": 1}, "stream": 9},
        {"correlation": 8, "device": 3, "stream": 4, "text": '"correlation":'},
    ]


def test_without_a_wall_clock_times_are_the_file_s_own(tmp_path: Path) -> None:
    found = written(small().build(info(clock="host", origin_ns=123)), tmp_path)
    assert "baseTimeNanoseconds" not in found
    assert next(one["ts"] for one in found["traceEvents"] if one["ph"] == "X") == 0.123
    assert found["mrv2lab"]["clock"] == "host"


def test_every_kind_has_a_category() -> None:
    assert set(module.CATEGORIES) == set(KINDS)


# -- the file


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write_perfetto(small().build(info()), tmp_path / name)
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "c.json").read_bytes()
    assert packed[4:8] == bytes(4)  # no time of day


def test_an_empty_trace_is_a_valid_file(tmp_path: Path) -> None:
    assert written(TraceBuilder().build(info()), tmp_path)["traceEvents"] == []


def test_a_selection_reads_back_at_its_place(tmp_path: Path) -> None:
    trace = small().build(info()).between(3000, 5000)
    write_perfetto(trace, tmp_path / "out.json")
    again = load(tmp_path / "out.json")
    assert (again.start + again.info.origin_ns).tolist() == (trace.start + trace.info.origin_ns).tolist()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")

    def broken(self: Any) -> Any:
        yield [b"{}"]
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Events, "events", broken)
    with pytest.raises(KeyboardInterrupt):
        write_perfetto(small().build(info()), path)
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere/out\.json: cannot be written \(No such file or directory\)"):
        write_perfetto(small().build(info()), tmp_path / "nowhere" / "out.json")


def test_memory_is_bounded_by_a_piece_not_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1024)
    b = TraceBuilder()
    count = 40_000
    b.extend(
        start=np.arange(count) * 100,
        duration=np.full(count, 50),
        name=np.full(count, b.name("a kernel whose name is rather long" * 5)),
        kind=np.full(count, KINDS.index("kernel")),
        lane=np.full(count, b.lane(STREAM)),
    )
    trace = b.build(info())
    tracemalloc.start()
    write_perfetto(trace, tmp_path / "out.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = (tmp_path / "out.json").stat().st_size
    assert size > 9_000_000
    assert peak < size / 2
