"""The bench of the trace readers in a tiny form: what its rows say; no figure is judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mrv2lab.bench import trace_bench, trace_child
from tests.trace.synthetic import synthetic_kineto, write_synthetic


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "some.json", 600)


def _reading(seconds: float, peak: int, imports: int = 50_000_000) -> dict[str, Any]:
    times = {"import": 1.0, "load": seconds, "gaps": seconds / 2}
    peaks = {"import": imports, "load": peak, "gaps": peak}
    return {"seconds": times, "cpu_seconds": times, "peak_bytes": peaks, "process_s": seconds + 2}


@pytest.mark.slow
def test_a_row_without_the_peer_says_why(trace: Path, tmp_path: Path) -> None:
    row = trace_bench.compare(trace, tmp_path / "1", "", "not here", 2)
    assert row["peer"] == {"failed": "not here"}
    assert "ours_beside_peer" not in row
    assert row["ours"]["failed"] == {}
    assert row["ours"]["work_s"]["n"] == 2
    assert list(row["ours"]["stages_s"]) == ["load", "syncs", "gaps", "queue_depth"]
    found = row["findings"]["ours"]
    assert found["events"] == 600
    assert found["idle_ns"] == found["span_ns"] - found["busy_ns"] == sum(found["idle_by_cause_ns"].values()) > 0
    assert str(tmp_path) not in json.dumps(row)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text("{}")
    row = trace_bench.compare(file, tmp_path / "1", "", "not here", 1)
    assert row["ours"]["failed"]["load"].startswith("TraceError: bad.json: holds no events")
    assert "work_s" not in row["ours"]


def _interpreter(folder: Path, script: str) -> str:
    """A program that answers as one with HolisticTraceAnalysis would."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_the_peer_dies_in_its_own_row(trace: Path, tmp_path: Path) -> None:
    peer = _interpreter(tmp_path, "echo killed >&2; exit 3")
    row = trace_bench.compare(trace, tmp_path / "1", peer, "", 1)
    assert row["peer"] == {"failed": "peer could not all some.json: killed"}
    assert row["ours"]["work_s"]["n"] == 1
    assert "ours_beside_peer" not in row


@pytest.mark.slow
def test_beside_the_peer(trace: Path, tmp_path: Path) -> None:
    """What fails in its extras is told and costs it no row; what fails in its analyses is told in the row."""
    answer = {**_reading(1, 10**9), "versions": {}, "found": {"events": 5}}
    more = {**answer, "seconds": {**answer["seconds"], "temporal breakdown": 0.25, "critical path": 2.0}}
    more["failed"] = {"critical path": "ValueError: axis", "gaps": "KeyError: 7"}
    peer = _interpreter(
        tmp_path, f"echo noise; [ $4 = all ] && echo '{json.dumps(more)}' || echo '{json.dumps(answer)}'"
    )
    row = trace_bench.compare(trace, tmp_path / "1", peer, "", 2)
    assert row["peer"]["failed"] == {"gaps": "KeyError: 7"}
    assert row["more_of_peer"] == {"temporal breakdown": 0.25, "critical path": "ValueError: axis"}
    assert row["findings"]["peer"] == {"events": 5}
    assert row["peer"]["work_s"]["n"] == row["ours"]["work_s"]["n"] == 2
    assert row["ours_beside_peer"]["share_of_memory"] < 0.5


@pytest.mark.parametrize("python", [None, "no-such-interpreter", sys.executable])
def test_why_no_peer(python: str | None) -> None:
    if trace_bench.importlib.util.find_spec("hta") is not None:
        pytest.skip("HolisticTraceAnalysis is installed here")
    why = trace_bench.why_no_peer(python)
    assert why
    assert sys.executable not in why


def test_a_rank_is_added_where_the_file_names_none(tmp_path: Path) -> None:
    text = synthetic_kineto(50)
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "b.json").write_bytes(text.replace(b'"rank": 0, ', b""))
    copy, facts = trace_bench.prepared(tmp_path / "a.json", tmp_path / "1")
    assert (copy.read_bytes(), facts["rank_added"]) == (text, False)
    copy, facts = trace_bench.prepared(tmp_path / "b.json", tmp_path / "2")
    assert facts["rank_added"]
    made = json.loads(copy.read_text())
    assert len(made["traceEvents"]) == len(json.loads(text)["traceEvents"])
    assert b'"rank": 0' in copy.read_bytes()


def test_beside() -> None:
    readings = {"ours": [_reading(1, 60_000_000)] * 3, "peer": [_reading(n, 100_000_000) for n in (4, 8, 6)]}
    row = {who: trace_bench._cost(found) for who, found in readings.items()}
    made = trace_bench._beside(row, readings)
    assert made["times_faster"] == made["times_faster_in_cpu"] == 6
    assert row["peer"]["work_s"]["median"] == 9
    assert made["times_faster_by_turn"] == [4, 8]
    assert made["times_faster_with_imports"] == pytest.approx(8 / 3)
    assert made["share_of_memory"] == pytest.approx(0.6)
    assert made["share_of_memory_over_imports"] == pytest.approx(0.2)
    assert (made["fast_enough"], made["small_enough"]) == (True, False)


@pytest.mark.slow
def test_alone(trace: Path) -> None:
    row = trace_bench.time_alone("raw", trace, "load", 1)
    assert (row["events"], row["raw_bytes"], row["failed"]) == (600, trace.stat().st_size, {})
    assert row["load_s"]["n"] == 1
    assert set(row["met"]) == {"load_s", "peak_mb"}
    assert not list(trace.parent.glob("*.mrv2trace"))
    row = trace_bench.time_alone("large, from the copy", trace, "cached", 1)
    assert row["events"] == 600
    assert row["copy_bytes"] == sum(one.stat().st_size for one in trace.parent.glob("*.mrv2trace")) > 0


def test_a_limit_that_is_missed_is_said(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trace_bench.LIMITS, "raw", {"load_s": 0.0, "peak_mb": 1e9})
    assert trace_bench.time_alone("raw", trace, "load", 1)["met"] == {"load_s": False, "peak_mb": True}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="ru_maxrss stands in where there is no /proc")
def test_a_child_does_not_count_its_parent(trace: Path) -> None:
    ballast = bytearray(400 << 20)
    ballast[:: 4 << 10] = b"x" * len(ballast[:: 4 << 10])
    peak = trace_bench.read_once(sys.executable, "ours", "load", trace)["peak_bytes"]["load"]
    assert trace_child.peak_bytes() > len(ballast) > peak > 20 << 20


def test_stages_go_on_after_a_failure() -> None:
    stages = trace_child.Stages()
    assert stages.run("one", lambda: 1 // 0) is None
    assert stages.run("two", lambda: 2) == 2
    assert stages.failed == {"one": "ZeroDivisionError: integer division or modulo by zero"}
    assert list(stages.seconds) == list(stages.cpu_seconds) == list(stages.peaks) == ["one", "two"]


@pytest.mark.slow
def test_the_whole_bench(tmp_path: Path) -> None:
    figures = trace_bench.bench([], "no-such-interpreter", 1, raw_bytes=200_000, events=700)
    assert [row["file"] for row in figures["files"]] == ["synthetic.json"]
    assert abs(figures["alone"]["raw"]["raw_bytes"] - 200_000) < 20_000
    assert figures["alone"]["large"]["events"] == figures["alone"]["large, from the copy"]["events"] == 700
    assert "--peer-python" in figures["peer"]
    assert len(figures["load_average_before"]) == len(figures["load_average_after"]) == 3
    assert str(tmp_path) not in json.dumps(figures)
