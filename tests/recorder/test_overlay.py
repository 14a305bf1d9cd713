"""Overlays of traces, which need no run and no PyTorch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mrv2lab.recorder.overlay import overlay
from mrv2lab.recorder.side_by_side import Run
from mrv2lab.trace.trace import Trace, TraceError
from tests.trace.hand_made import HandMade
from tests.trace.step_runs import COUNT, noisy, run_of_steps


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What Timeline was called with."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr("mrv2lab.widgets.timeline.Timeline", lambda *traces, **how: calls.append((traces, how)))
    return calls


def of_steps(seed: int, **how: Any) -> Trace:
    return run_of_steps(noisy(seed), barrier=True, title=f"file {seed}", **how)


def test_two_traces_have_steps_waits_and_differences(seen: list[tuple[Any, dict[str, Any]]]) -> None:
    a, b = of_steps(1), of_steps(2, start=7_000)
    overlay(a, b)
    (traces, how), *_ = seen
    assert traces == (a, b)
    assert how["titles"] == ["file 1", "file 2"]
    assert [len(frame) for frame in how["steps"]] == [len(frame) for frame in how["marks"]] == [COUNT, COUNT]
    assert len(how["difference"]) == COUNT
    assert how["align"][0] == 0


def test_one_trace_and_a_run_beside_a_trace(seen: list[tuple[Any, dict[str, Any]]]) -> None:
    a, b = of_steps(1), of_steps(2)
    overlay(a, height=200)
    overlay(Run("A", {}, trace=a), b)
    assert seen[0][1]["height"] == 200 and "difference" not in seen[0][1]
    assert seen[1][0] == (a, b) and seen[1][1]["titles"] == ["run A", "file 2"]


def test_traces_without_a_common_step_are_aligned_by_what_they_have(seen: list[tuple[Any, dict[str, Any]]]) -> None:
    a, b = (HandMade().call(5, 1, "cudaLaunchKernel", 1).kernel(at, 5, "k", 1).build() for at in (10, 30))
    overlay(a, b)
    assert seen[0][1]["align"] == [0, -20_000] and "difference" not in seen[0][1]
    with pytest.raises(TraceError, match="no step is in both"):
        overlay(Run("A", {}, trace=of_steps(1)), Run("B", {}, trace=of_steps(2, first_number=99)))


def test_the_overlay_is_a_timeline() -> None:
    shown = overlay(of_steps(1), of_steps(2))
    assert len(shown.traces) == 2
    shown.close()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (("a.json",), r"takes Runs of run_settings\(\) and Traces, got str; Trace.load\(path\)"),
        ((None, None), "got NoneType"),
        ((), "takes one or two runs or traces, got 0"),
        ((of_steps(1),) * 3, "got 3"),
    ],
)
def test_something_else(given: tuple[Any, ...], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        overlay(*given)


def test_traces_need_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from mrv2lab import overlay
from tests.trace.step_runs import noisy, run_of_steps
overlay(run_of_steps(noisy(1)), run_of_steps(noisy(2))).close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
