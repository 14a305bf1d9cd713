"""From another format to Chrome's and back: what it has no place for survives."""

from __future__ import annotations

from pathlib import Path

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import Lane, TraceInfo
from mrv2lab.trace.write import write_perfetto


def test_a_converted_recording_stays_one(tmp_path: Path) -> None:
    """What is modelled, which clock it is on and what the events are survives Chrome's format."""
    b = TraceBuilder()
    b.add(0, 900, "forward", "phase", Lane("engine", "host phases"))
    b.add(950, 40, "step", "graph", Lane("device", "main", "stream", device=0, stream=0))
    made = b.build(TraceInfo("recording", "run", clock="session", modelled=True, extra={"runner": "v1"}))
    write_perfetto(made, tmp_path / "run.json")
    again = load(tmp_path / "run.json", cache=False)
    assert (again.info.producer, again.info.title, again.info.clock) == ("recording", "run", "session")
    assert again.info.modelled
    assert again.info.extra == {"runner": "v1"}
    assert [again.kind_of(i) for i in range(2)] == ["phase", "graph"]
    write_perfetto(again, tmp_path / "again.json")
    assert load(tmp_path / "again.json", cache=False).info.extra == {"runner": "v1"}


def test_what_a_profile_says_of_its_engine_survives(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.add(0, 900, "k", "kernel", Lane("device", "7", "stream", device=0, stream=7))
    made = b.build(TraceInfo("kineto", "p", extra={"mrv2lab": {"config": {"runner": "v1"}}}))
    write_perfetto(made, tmp_path / "p.json")
    assert load(tmp_path / "p.json", cache=False).info.extra["mrv2lab"]["config"] == {"runner": "v1"}
