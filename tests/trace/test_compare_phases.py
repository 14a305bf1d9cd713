"""Times by phase where there are many names."""

from __future__ import annotations

import pytest

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.compare_phases import phases
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Lane, Trace, TraceInfo


def test_many_names_of_phases_are_not_looked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = TraceBuilder()
    builder.add(0, 10_000, "mrv2lab.step#1", "annotation", Lane("1", "1"))
    for number in range(50):
        builder.add(10 + 100 * number, 50, f"request {number}", "annotation", Lane("1", "1"))
        builder.add(20 + 100 * number, 30, f"request {number}", "annotation", Lane("1", "1"))
    trace = builder.build(TraceInfo("kineto", "names"))
    table, ends = steps(trace), Trace.end.func
    asked: list[int] = []
    monkeypatch.setattr(Trace, "end", property(lambda self: asked.append(1) or ends(self)))
    found = phases(trace, table)
    assert {name: times.tolist() for name, times in found.times.items()} == {f"request {n}": [50] for n in range(50)}
    assert len(asked) < 10
