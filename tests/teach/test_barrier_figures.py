"""The conclusion that stands before the figures of the runner bench."""

from __future__ import annotations

from typing import Any

from mrv2lab.teach.barrier_lesson import in_short


def part(us: float, copies: float, waits: float) -> dict[str, Any]:
    host = {"runner's own phases": {"median": us, "max": us, "min": us}}
    return {"host_us": host, "a_step": {"h2d copies": copies, "waits: synchronize": waits}}


def test_the_conclusion_is_of_the_figures() -> None:
    figures = {
        "repeats": 5,
        "steady 1 v1": part(10, 7, 2),
        "steady 1 mrv2": part(11, 2, 1),
        "churn 64 v1": part(30, 9.6, 2),
        "churn 64 mrv2": part(12, 2, 1),
    }
    assert in_short(figures) == (
        "In short: MRV2's own phases take less host time than V1's at 1 of 2 loads; what it changes is in the counts "
        "of a step: copies to the device 2 instead of 7 to 9.6, waits of the host 1 instead of 2."
    )
