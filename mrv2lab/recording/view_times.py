"""The timeline of a step: spans and marks in microseconds from the step's first span."""

from __future__ import annotations

from typing import Any

from mrv2lab.recording.schema import StepRecord


def timeline(record: StepRecord) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``meta.spans`` and ``meta.marks`` of the step, see ``view``. Device times are None where they are not known."""
    start = min((span.start_ns for span in record.spans), default=min((m.time_ns for m in record.marks), default=0))

    def us(time_ns: int) -> float:
        return (time_ns - start) / 1000

    def device(time_ns: int) -> float | None:
        return None if time_ns < 0 else us(time_ns)

    spans = [
        {
            "name": span.name,
            "start": us(span.start_ns),
            "end": us(span.end_ns),
            "depth": span.depth,
            "device_end": device(span.device_end_ns),
            "added": span.added,
        }
        for span in record.spans
    ]
    marks = [
        {
            "kind": mark.kind,
            "name": mark.name,
            "stream": mark.stream,
            "phase": mark.phase,
            "time": us(mark.time_ns),
            "device_start": device(mark.device_start_ns),
            "device_end": device(mark.device_end_ns),
            "nbytes": mark.nbytes,
            "wait": mark.wait_ns / 1000,
            "reads": list(mark.reads),
            "writes": list(mark.writes),
            "site": mark.site,
            "added": mark.added,
        }
        for mark in record.marks
    ]
    return spans, marks
