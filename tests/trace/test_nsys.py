"""Reading nsys exports: what each table becomes, that the file stays as it was, and what is refused."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.trace import nsys_lanes
from mrv2lab.trace.links import links, orphans
from mrv2lab.trace.nsys import EVENTS, read_nsys
from mrv2lab.trace.trace import Lane, Trace, TraceCancelled, TraceError
from tests.trace.nsys_file import (
    COLUMNS,
    EVENT,
    KERNEL,
    MEMCPY,
    NVTX,
    RUNTIME,
    SYNC,
    global_id,
    two_processes,
    write_nsys,
)

REAL = Path(__file__).parents[2].parent / "shared" / "traces" / "10_nsys_h100_2gpu_1s.sqlite"


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return read_nsys(write_nsys(tmp_path / "two.sqlite", two_processes()))


def only(trace: Trace, name: str) -> int:
    """The one event of that name."""
    (event,) = np.flatnonzero(trace.named(lambda text: text == name))
    return int(event)


def row(trace: Trace, event: int) -> tuple[str, str, int, int, str]:
    return (
        trace.name_of(event),
        trace.kind_of(event),
        int(trace.start[event]) + trace.info.origin_ns - 1_700_000_000_000_000_000,
        int(trace.duration[event]),
        str(trace.lane_of(event)),
    )


def test_every_table_becomes_events(trace: Trace) -> None:
    assert [row(trace, event) for event in range(len(trace))] == [
        ("mrv2lab.step#1", "annotation", 900, 1700, "python3 100: main"),
        ("mrv2lab.phase.forward", "phase", 950, 350, "python3 100: main"),
        ("request 7", "annotation", 960, 740, "python3 100: NVTX start/end ranges"),
        ("never popped", "annotation", 970, 0, "python3 100: main"),
        ("a mark", "instant", 980, 0, "python3 100: main"),
        ("cudaLaunchKernel", "runtime", 1000, 100, "python3 100: main"),
        ("cuLaunchKernelEx", "runtime", 1010, 40, "process 200: thread 1"),
        ("Command Buffer Full", "overhead", 1020, 20, "python3 100: main"),
        ("cudaMemcpyAsync", "runtime", 1200, 50, "python3 100: main"),
        ("gemm<int>", "kernel", 1500, 100, "GPU 2 stream 7"),
        ("gemm<int>", "kernel", 1501, 20, "GPU 3 stream 7"),
        ("Memcpy HtoD (Pageable -> Device)", "memcpy", 1600, 50, "GPU 2 stream 7"),
        ("orphan", "kernel", 1700, 1, "GPU 3 stream 7"),
        ("Memcpy DtoH (Device -> Pinned)", "memcpy", 1800, 10, "GPU 2 stream 7"),
        ("Memset (Device)", "memset", 1820, 10, "GPU 2 stream 7"),
        ("CUDA graph 3", "graph", 1850, 350, "GPU 2 stream 7"),
        ("cudaStreamSynchronize", "runtime", 1900, 400, "python3 100: main"),
        ("Stream Sync", "sync", 1910, 380, "GPU 2 stream 7 sync"),
        ("Stream Wait Event", "sync", 1910, 2, "GPU 3 stream 8 sync"),
        ("CUDA event", "event", 2250, 0, "GPU 2 stream 7 events"),
        ("poll", "other", 2400, 100, "python3 100: main"),
    ]
    assert trace.lane_of(only(trace, "orphan")) == Lane("200", "7", "stream", 3, 7, label="GPU 3 stream 7")
    assert trace.lane_of(only(trace, "poll")) == Lane("100", "1", label="python3 100: main")


def test_what_the_columns_say_goes_into_the_arguments(trace: Trace) -> None:
    kernel = int(np.flatnonzero(trace.mask("kernel"))[0])
    assert trace.args(kernel) == {
        "grid": [4, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 1040,
    }  # fmt: skip
    assert trace.args(only(trace, "orphan")) == {}  # nothing was said
    pageable = only(trace, "Memcpy HtoD (Pageable -> Device)")
    assert trace.args(pageable) == {"copy_kind": "HtoD", "src": "pageable", "dst": "device"}
    assert int(trace.nbytes[pageable]) == 4096
    assert trace.args(only(trace, "Memset (Device)")) == {"value": 0, "dst": "device"}
    assert trace.args(only(trace, "CUDA graph 3")) == {"graph id": 3, "graph exec id": 4}
    assert trace.args(only(trace, "Stream Sync")) == {"cuda_sync_kind": "Stream Sync"}
    assert trace.args(only(trace, "Stream Wait Event")) == {
        "cuda_sync_kind": "Stream Wait Event", "event id": 11, "device_side": True,
    }  # fmt: skip
    assert trace.args(only(trace, "cudaMemcpyAsync")) == {"api": "cudaMemcpyAsync_ptsz_v7000"}
    assert trace.args(only(trace, "cuLaunchKernelEx")) == {"return value": 700}
    assert trace.args(only(trace, "Command Buffer Full")) == {"overhead": "Command buffer full (CUDA)"}
    assert trace.args(only(trace, "request 7")) == {"domain": "NCCL"}
    assert trace.args(only(trace, "never popped")) == {"unfinished": True}


def test_the_file_as_a_whole(trace: Trace) -> None:
    info = trace.info
    assert (info.producer, info.title, info.clock, info.modelled) == ("nsys", "two.sqlite", "unix", False)
    assert info.origin_ns == 1_700_000_000_000_000_900
    assert info.versions == {"nsys": "2026.2.1", "schema": "3.25.0"}
    assert info.devices == ({"id": 2}, {"id": 3})
    assert {(problem.reason, problem.count) for problem in trace.problems} == {
        ("an NVTX range has no end and is shown with length 0", 1),
        ("an NVTX row of type 99 is left out", 1),
        ("a CUDA event has no device time", 1),
        ("a CUDA graph is one piece of work, its kernels unknown; --cuda-graph-trace=node traces them", 1),
        ("table SCHED_EVENTS is not read", 2),
    }


def test_a_correlation_joins_within_its_process(trace: Trace) -> None:
    launch = links(trace).launch
    kernels = np.flatnonzero(trace.mask("kernel"))
    assert [trace.name_of(int(event)) if event >= 0 else None for event in launch[kernels]] == [
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        None,  # correlation 6 is a copy of the other process
    ]
    assert launch[only(trace, "Memcpy HtoD (Pageable -> Device)")] == only(trace, "cudaMemcpyAsync")
    assert trace.correlation[only(trace, "Stream Sync")] == trace.correlation[only(trace, "cudaStreamSynchronize")]
    assert int(orphans(trace).sum()) == 4


def test_mutant_a_correlation_without_its_process_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_lanes.Lanes, "correlations", lambda self, processes, ids: np.where(ids > 0, ids, -1))
    with pytest.raises(AssertionError):
        test_a_correlation_joins_within_its_process(read_nsys(write_nsys(tmp_path / "two.sqlite", two_processes())))


@pytest.mark.parametrize("table", sorted(set(two_processes()) - {"META_DATA_EXPORT"}))
def test_any_table_may_be_missing(tmp_path: Path, trace: Trace, table: str) -> None:
    tables = two_processes()
    count = len(tables.pop(table))
    without = read_nsys(write_nsys(tmp_path / "less.sqlite", tables))
    assert len(without) == len(trace) - {NVTX: 5, EVENT: 1}.get(table, count if table in EVENTS else 0)


def test_alone_each_table_of_events_is_enough(tmp_path: Path) -> None:
    for table in EVENTS & set(two_processes()):
        rows = two_processes()[table]
        assert len(read_nsys(write_nsys(tmp_path / "one.sqlite", {table: rows}))) > 0


def test_columns_that_other_versions_lack(tmp_path: Path) -> None:
    without = (
        "graphId",
        "graphNodeId",
        "globalPid",
        "returnValue",
        "callchainId",
        "srcKind",
        "eventSyncId",
        "domainId",
    )
    tables = {
        RUNTIME: two_processes()[RUNTIME][:1],
        KERNEL: two_processes()[KERNEL][:1],
        MEMCPY: two_processes()[MEMCPY],
    }
    trace = read_nsys(write_nsys(tmp_path / "old.sqlite", tables, without))
    assert trace.name_of(2) == "Memcpy HtoD (Unknown -> Device)"
    assert trace.args(2) == {"copy_kind": "HtoD", "dst": "device"}
    assert links(trace).launch.tolist() == [-1, 0, -1, -1]  # one process, though kernels do not name it


def test_without_a_wall_clock_the_session_counts(tmp_path: Path) -> None:
    tables = {KERNEL: two_processes()[KERNEL]}
    info = read_nsys(write_nsys(tmp_path / "one.sqlite", dict(tables))).info
    assert (info.clock, info.origin_ns) == ("session", 1500)
    tables["META_DATA_EXPORT"] = [{"name": "EXPORT_PARAM_TIME_NORMALIZE", "value": "true"}]
    tables["TARGET_INFO_SESSION_START_TIME"] = [{"utcEpochNs": 10**18}]
    info = read_nsys(write_nsys(tmp_path / "one.sqlite", tables)).info
    assert (info.clock, info.origin_ns) == ("unix", 1500)  # --ts-normalize: the times are the wall clock's already


def test_what_the_gpu_table_says(tmp_path: Path) -> None:
    tables = {KERNEL: two_processes()[KERNEL], "TARGET_INFO_GPU": [{"id": 0, "name": "NVIDIA H200", "smCount": 132}]}
    assert read_nsys(write_nsys(tmp_path / "one.sqlite", tables)).info.devices == (
        {"id": 0, "name": "NVIDIA H200", "smCount": 132},
    )


def test_call_chains_are_kept(tmp_path: Path) -> None:
    call = {"start": 1, "end": 2, "globalTid": global_id(1, 1), "nameId": "cudaFree", "callchainId": 4}
    frames = [{"id": 4, "symbol": "outer", "stackDepth": 1}, {"id": 4, "symbol": "inner", "stackDepth": 0}]
    trace = read_nsys(write_nsys(tmp_path / "one.sqlite", {RUNTIME: [call], "CUDA_CALLCHAINS": frames}))
    assert trace.args(0) == {"callchain": ["inner", "outer"]}


def test_an_index_that_somebody_added_changes_nothing(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "one.sqlite", two_processes())
    before = read_nsys(path)
    with sqlite3.connect(path) as connection:
        for table, columns in (("NVTX_EVENTS", "text"), ("NVTX_EVENTS", "textId"), ("PROCESSES", "name")):
            connection.execute(f"CREATE INDEX _{table}_{columns} ON {table} ({columns})")
        assert connection.execute("SELECT text FROM NVTX_EVENTS").fetchone() == (None,)  # in the index's order
    connection.close()
    after = read_nsys(path)
    assert [row(after, event) for event in range(len(after))] == [row(before, event) for event in range(len(before))]


def test_what_the_capture_knows_of_the_user_stays_in_the_file(tmp_path: Path) -> None:
    said = {
        "EXPORT_USER": "someone", "PROCESS_0:ENVIRONMENT_VARIABLE": 'TOKEN="hush"', "EXPORT_SCHEMA_VERSION": "3.25.0",
    }  # fmt: skip
    tables = {KERNEL: two_processes()[KERNEL]}
    tables["META_DATA_EXPORT"] = [{"name": name, "value": value} for name, value in said.items()]
    assert read_nsys(write_nsys(tmp_path / "one.sqlite", tables)).info.extra == {"EXPORT_SCHEMA_VERSION": "3.25.0"}


def test_two_contexts_of_one_process_do_not_share_a_stream(tmp_path: Path) -> None:
    kernel = {"start": 1, "end": 2, "globalPid": global_id(1), "deviceId": 0, "streamId": 7, "demangledName": "k"}
    tables = {KERNEL: [kernel | {"contextId": context} for context in (1, 2)]}
    lanes = read_nsys(write_nsys(tmp_path / "one.sqlite", tables)).lanes
    assert [str(lane) for lane in lanes] == ["GPU 0 stream 7 of context 1", "GPU 0 stream 7 of context 2"]


def test_a_wait_is_on_the_device_of_its_context(tmp_path: Path) -> None:
    at = {"start": 1, "end": 2, "globalPid": global_id(1), "contextId": 2, "streamId": 7}
    kernel, sync = at | {"deviceId": 1, "demangledName": "k"}, at | {"deviceId": 0, "syncType": 3}
    trace = read_nsys(write_nsys(tmp_path / "one.sqlite", {KERNEL: [kernel], SYNC: [sync]}))
    assert [lane.device for lane in trace.lanes] == [1, 1]  # nsys 2026.2 writes device 0 for every wait


def test_two_processes_on_one_gpu_are_told_apart(tmp_path: Path) -> None:
    kernel = {"start": 1, "end": 2, "deviceId": 0, "streamId": 7, "contextId": 1, "demangledName": "k"}
    tables = {KERNEL: [kernel | {"globalPid": global_id(pid)} for pid in (1, 2)]}
    lanes = read_nsys(write_nsys(tmp_path / "one.sqlite", tables)).lanes
    assert [str(lane) for lane in lanes] == ["GPU 0 stream 7 of process 1", "GPU 0 stream 7 of process 2"]


def test_damaged_rows_are_mended_and_counted(tmp_path: Path) -> None:
    kernel = {"deviceId": 0, "streamId": 7, "contextId": 1, "globalPid": global_id(1), "demangledName": 12345}
    rows = [kernel | times for times in ({"start": 9, "end": 4}, {"end": 4}, {"start": 5}, {"start": 6, "end": 8})]
    trace = read_nsys(write_nsys(tmp_path / "one.sqlite", {KERNEL: rows}))
    assert trace.duration.tolist() == [0, 2, 0]
    assert trace.names == ("string 12345",)
    assert sorted(problem.reason for problem in trace.problems) == [
        "a kernel ends before it starts and is shown with length 0",
        "a kernel has no end and is shown with length 0",
        "a kernel has no start and is left out",
    ]


def test_names_are_kept_as_they_are(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\n\u2028'\"; DROP TABLE StringIds"
    rows = [{"start": 1, "end": 2, "eventType": 59, "text": name, "globalTid": global_id(1, 1)}]
    assert read_nsys(write_nsys(tmp_path / "one.sqlite", {NVTX: rows})).names == (name,)


# -- the file stays as it was


def state(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        file.name: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns) for file in folder.iterdir()
    }


def test_nothing_is_written(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "with space, 100% ?#é.sqlite", two_processes())
    before = state(tmp_path)
    assert len(read_nsys(path)) == 21
    assert state(tmp_path) == before


def test_a_journal_beside_it_is_neither_used_nor_removed(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "one.sqlite", two_processes())
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute(f"DELETE FROM {KERNEL}")
    writer.commit()
    before = state(tmp_path)
    trace = read_nsys(path)
    assert state(tmp_path) == before
    assert any("not merged" in problem.reason for problem in trace.problems)
    writer.close()


# -- refusals


def refuse(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_nsys(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"QuadDstream....")
    assert "`nsys export --type sqlite report.nsys-rep`" in refuse(report)
    text = tmp_path / "trace.json"
    text.write_text('{"traceEvents": []}')
    assert "begins with b'{\"traceE'" in refuse(text)
    assert "No such file" in refuse(tmp_path / "none.sqlite")
    assert "directory" in refuse(tmp_path)

    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE songs (title)")
    connection.close()
    assert "its tables: songs" in refuse(foreign)
    bare = write_nsys(tmp_path / "bare.sqlite", {"META_DATA_EXPORT": [], KERNEL: []})
    assert f"without events (tables for them: {KERNEL})" in refuse(bare)


def test_too_large_and_cancelled(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "one.sqlite", two_processes())
    assert "over the cap of 1,000; pass max_bytes=" in refuse(path, max_bytes=1000)
    with pytest.raises(TraceCancelled, match="cancelled"):
        read_nsys(path, cancel=lambda: True)


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    rows = [{"start": "soon", "end": 2, "eventType": 59, "text": "x"}]
    assert "NVTX_EVENTS holds something else than integers" in refuse(write_nsys(tmp_path / "one.sqlite", {NVTX: rows}))


def test_damage_anywhere_never_ends_in_another_error(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "one.sqlite", two_processes())
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole[: int(rng.integers(17, len(whole)))] if rng.random() < 0.5 else whole)
        for place in rng.integers(16, len(damaged), 20):
            damaged[place] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            read_nsys(path)
        except TraceError:
            refused += 1
    assert refused > 50


# -- a real one


@pytest.mark.skipif(not REAL.is_file(), reason="the shared traces are not here")
def test_golden_numbers_of_the_h100_export() -> None:
    before = hashlib.sha256(REAL.read_bytes()).hexdigest(), sorted(REAL.parent.iterdir())
    trace = read_nsys(REAL)
    assert (hashlib.sha256(REAL.read_bytes()).hexdigest(), sorted(REAL.parent.iterdir())) == before
    count = {
        kind: int(trace.mask(kind).sum()) for kind in ("kernel", "memcpy", "memset", "runtime", "annotation", "sync")
    }
    assert count == {
        "kernel": 3442, "memcpy": 904, "memset": 22, "runtime": 5796, "annotation": 16782, "sync": 244,
    }  # fmt: skip
    streams = {(lane.device, lane.stream) for lane in trace.lanes if lane.role == "stream"}
    assert streams == {(0, 7), (1, 15)}
    h2d = trace.where("memcpy", name="HtoD")
    assert (len(h2d), len(h2d.where(name="Pageable"))) == (450, 4)
    # By id alone 1,799 kernels have no runtime row; 11 of the others share their id with a call of the other process.
    kernels, calls = trace.correlation[trace.mask("kernel")], trace.correlation[trace.mask("runtime")]
    assert int((~np.isin(kernels & 0xFFFFFFFF, calls & 0xFFFFFFFF)).sum()) == 1799
    assert int((orphans(trace) & trace.mask("kernel")).sum()) == 1810
    # The waits of the second process are its own device's, though CUPTI's records say device 0.
    waits = {(lane.device, lane.stream) for lane in trace.lanes if lane.role == "other"}
    assert waits == {(0, 7), (0, 22), (0, 26), (1, 15), (1, 30), (1, 34)}
    syncs = trace.where("sync", name="Stream Sync")
    of_device = np.array([lane.device for lane in syncs.lanes])[syncs.lane]
    assert [round(int(syncs.duration[of_device == device].sum()) / 1e6, 1) for device in (0, 1)] == [428.5, 428.4]
    assert not trace.problems


def test_the_columns_used_here_are_those_of_a_real_export() -> None:
    if not REAL.is_file():
        pytest.skip("the shared traces are not here")
    with sqlite3.connect(f"file:{REAL}?mode=ro&immutable=1", uri=True) as connection:
        for table in (KERNEL, MEMCPY, SYNC, EVENT, RUNTIME, NVTX):
            there = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
            assert set(COLUMNS[table].split()) <= there
    connection.close()
