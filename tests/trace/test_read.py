"""Reading: what a file is, what is refused and how, what survives of dirty files."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrv2lab.trace import blocks, read
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import Trace, TraceCancelled, TraceError
from tests.trace.synthetic import GRAPH_KERNELS, synthetic_kineto, write_synthetic

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 8, "ts": 10.5, "dur": 2.25, "args": {"a": 1}}
KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "gemm",
    "pid": 0,
    "tid": 7,
    "ts": 11,
    "dur": 3,
    "args": {"device": 0, "stream": 7, "correlation": 5},
}


@pytest.fixture
def trace_of(tmp_path: Path) -> Any:
    """Writes bytes, a text, or a list of events, and loads them."""

    def make(content: bytes | str | list[Any], **options: Any) -> Trace:
        if isinstance(content, list):
            content = json.dumps({"traceEvents": content})
        path = tmp_path / "a trace.json"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load(path, cache=False, **options)

    return make


def names(trace: Trace) -> list[str]:
    return [trace.name_of(event) for event in range(len(trace))]


def reasons(trace: Trace) -> list[str]:
    return [problem.reason for problem in trace.problems]


# -- what a file is


def test_a_small_file_in_full(trace_of: Any) -> None:
    trace = trace_of([KERNEL, EVENT])
    assert names(trace) == ["aten::mm", "gemm"]
    assert trace.start.tolist() == [0, 500]
    assert trace.duration.tolist() == [2250, 3000]
    assert [trace.kind_of(event) for event in (0, 1)] == ["op", "kernel"]
    assert trace.correlation.tolist() == [-1, 5]
    assert trace.args(0) == {"a": 1}
    assert (trace.info.producer, trace.info.clock, trace.info.origin_ns) == ("kineto", "unknown", 10_500)
    assert trace.info.title == "a trace.json"
    assert trace.problems == ()


def test_gzip_is_known_by_its_magic_and_may_have_several_members(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [EVENT, KERNEL]}).encode()
    path = tmp_path / "trace.json"  # no .gz
    path.write_bytes(gzip.compress(text[:40]) + gzip.compress(text[40:]) + b"\0\0\0")
    assert names(load(path)) == ["aten::mm", "gemm"]


def test_plain_text_under_a_gz_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_text(json.dumps([EVENT]))
    assert names(load(path)) == ["aten::mm"]


@pytest.mark.parametrize("front", [b"\xef\xbb\xbf", b"\n\n  ", b"\xef\xbb\xbf \r\n"])
def test_a_byte_order_mark_and_blanks_in_front(trace_of: Any, front: bytes) -> None:
    assert names(trace_of(front + json.dumps({"traceEvents": [EVENT]}).encode())) == ["aten::mm"]


def test_a_sqlite_file_goes_to_the_nsys_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    with sqlite3.connect(path) as base:
        base.execute("create table t (a)")
    seen: list[Any] = []
    monkeypatch.setattr("mrv2lab.trace.nsys.read_nsys", lambda path, **options: seen.append((path, options)))
    load(path, max_bytes=99)
    assert seen == [(path, {"progress": True, "max_bytes": 99, "cancel": None})]


REFUSALS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty file"),
    "blank": (b"  \n ", "blank bytes"),
    "snapshot": (pickle.dumps({"segments": []}), r"memory snapshot.*load_snapshot"),
    "text": (b"hello, world", r"begins with b'hello, world'"),
    "utf16": ('{"traceEvents": []}'.encode("utf-16"), "UTF-16"),
    "no_key": (b'{"a": 1, "b": [2]}', r'no array "traceEvents"'),
    "null": (b'{"traceEvents": null}', r"\"traceEvents\" at byte 1 is no array"),
    "empty_array": (b'{"traceEvents": []}', "holds no events: nothing"),
    "bare_empty": (b"[]", "holds no events"),
    "metadata_only": (
        b'[{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}, {"ph": "s", "id": 1, "ts": 1}]',
        "1 metadata events, 1 flow arrows",
    ),
    "no_times": (b'[{"ph": "X", "name": "a", "pid": 1, "tid": 1}]', "1 events without a time"),
    "numbers": (b"[1, 2, 3]", "holds no events"),
    "unreadable": (b'{"traceEvents": [ {oops: 1}, {oops: 2} ]}', r"unreadable at byte 18: '{oops: 1}"),
    "columnar_copy": (b"MRV2TRC\0rest", "load the trace"),
    "bad_gzip": (b"\x1f\x8b\x08\x00 nonsense", "compressed data"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_the_file_and_what_it_holds(tmp_path: Path, case: str) -> None:
    content, message = REFUSALS[case]
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["some.json"]


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a folder.*holds no \.json"):
        load(tmp_path)
    (tmp_path / "one.json.gz").write_bytes(b"")
    with pytest.raises(TraceError, match=r"a folder.*one of one\.json\.gz"):
        load(tmp_path)
    with pytest.raises(TraceError, match="cannot be opened"):
        load(tmp_path / "none.json")


def test_a_zip_goes_to_the_reader_of_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "b")
    monkeypatch.setattr("mrv2lab.recording.recording.Recording.load", lambda path, cap: ("recording", path, cap))
    monkeypatch.setattr("mrv2lab.trace.from_recording.from_recording", lambda recording: ("trace of", recording))
    assert load(path, max_bytes=77) == ("trace of", ("recording", path, 77))


def test_a_foreign_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "b")
    with pytest.raises(TraceError, match=str(path)):
        load(path)


# -- the cap, the bar, the way out


def test_over_the_cap_the_message_names_size_cap_and_remedy(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "big.json", 500)
    size = path.stat().st_size
    with pytest.raises(TraceError, match=rf"{size:,} bytes.*cap of 1,000.*max_bytes="):
        load(path, max_bytes=1000)
    assert len(load(path, max_bytes=size)) == 500


def test_a_gzip_bomb_stops_at_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (64 << 20)))
    tracemalloc.start()
    with pytest.raises(TraceError, match="cap of 8,388,608"):
        load(path, max_bytes=8 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


def test_a_stretch_without_an_event_is_given_up(trace_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrv2lab.trace.json_chunks.MAX_EVENT_BYTES", 3 << 20)
    with pytest.raises(TraceError, match="no event ends within"):
        trace_of(b'[{"ph": "' + b"x" * (6 << 20))


def test_cancelling_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "trace.json", 20_000)
    asked: list[int] = []

    def cancel() -> bool:
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(TraceCancelled, match="cancelled"):
        load(path, cache=True, cancel=cancel)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "trace.json", 1000)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, cache=True, cancel=interrupted)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_a_bar_for_large_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_synthetic(tmp_path / "trace.json", 1000)
    load(path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(blocks, "LARGE_BYTES", 1000)
    load(path, cache=False, progress=False)
    assert capsys.readouterr().err == ""
    load(path, cache=False)
    assert "trace.json" in capsys.readouterr().err


# -- the synthetic trace


def test_the_synthetic_trace_has_what_it_says() -> None:
    assert synthetic_kineto(700, 3) == synthetic_kineto(700, 3)
    assert synthetic_kineto(700, 3) != synthetic_kineto(700, 4)


def test_a_synthetic_trace_reads_without_a_problem(trace_of: Any) -> None:
    trace = trace_of(synthetic_kineto(3000))
    assert len(trace) == 3000
    assert trace.problems == ()
    assert (trace.info.clock, trace.info.rank, trace.info.world_size) == ("unix", 0, 1)
    assert trace.info.origin_ns == 1_767_189_312_000_000_000 + 1_365_627_862_757_064
    assert {str(lane) for lane in trace.lanes} >= {"GPU 0 stream 7", "GPU 0 stream 20", "GPU 0 stream 7 annotations"}
    kernels = trace.where("kernel")
    assert int(np.unique(kernels.correlation, return_counts=True)[1].max()) == GRAPH_KERNELS
    assert trace.info.extra["flow_arrows"] > 500


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1000, 5000])
def test_where_blocks_end_makes_no_difference(tmp_path: Path, block_bytes: int) -> None:
    path = write_synthetic(tmp_path / "trace.json", 60)
    whole = load(path)
    parts = read.read_blocks(blocks.Blocks(path, block_bytes=block_bytes), title="t", path="t")
    for column in ("start", "duration", "kind", "correlation", "nbytes"):
        assert getattr(parts, column).tolist() == getattr(whole, column).tolist()
    assert names(parts) == names(whole)
    assert [parts.args(event) for event in range(60)] == [whole.args(event) for event in range(60)]
    assert parts.problems == ()


MEASURE = """
import sys
from mrv2lab.trace.read import load
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
trace = load(sys.argv[1], cache=False, progress=False)
print(len(trace), peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_stays_below_four_times_the_text(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "trace.json", 60_000)
    ran = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    events, peak = map(int, ran.stdout.split())
    assert events == 60_000
    assert peak < 4 * path.stat().st_size


# -- whatever happens to a file, the answer is a trace or a TraceError

SMALL = synthetic_kineto(12).replace(b'"synthetic.json"', b'"\xc3\xa9 {x},{y}]"')


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.json"


def attempt(path: Path, content: bytes) -> Trace | None:
    path.write_bytes(content)
    try:
        return load(path, cache=False, progress=False)
    except TraceError as error:
        return None if str(path) in str(error) else pytest.fail(f"the message does not name the file: {error}")


def test_cut_off_anywhere(scratch: Path) -> None:
    counts = []
    for length in range(0, len(SMALL), 11):
        trace = attempt(scratch, SMALL[:length])
        assert trace is None or trace.problems
        counts.append(0 if trace is None else len(trace))
    assert counts == sorted(counts)
    assert counts[-1] >= 11


def test_cut_off_anywhere_when_compressed(scratch: Path) -> None:
    packed = gzip.compress(SMALL)
    for length in range(0, len(packed), 7):
        trace = attempt(scratch, packed[:length])
        assert trace is None or any("compressed data end early" in reason for reason in reasons(trace))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_bytes_changed_anywhere(scratch: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(SMALL)
    for place, byte in flips:
        content[place] = byte
    attempt(scratch, bytes(content))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
FIELDS = st.fixed_dictionaries(
    {"ph": st.sampled_from("XBEiCMbensfSF") | VALUES},
    optional={
        "cat": st.sampled_from(["kernel", "cuda_runtime", "cpu_op", "gpu_memcpy", "cuda_sync"]) | VALUES,
        **dict.fromkeys(("name", "pid", "tid", "ts", "dur", "id"), VALUES),
        "args": st.dictionaries(st.sampled_from(["stream", "device", "correlation", "bytes", "name"]), VALUES) | VALUES,
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(FIELDS | VALUES, max_size=5), base=VALUES)
def test_any_values_anywhere(scratch: Path, events: list[Any], base: object) -> None:
    text = json.dumps({"traceEvents": [EVENT, *events], "baseTimeNanoseconds": base, "distributedInfo": base})
    trace = attempt(scratch, text.encode())
    assert trace is not None
    assert "aten::mm" in names(trace)
    assert (trace.duration >= 0).all()
    trace.to_frame(["a"])
