"""The timeline of a step: spans and marks in microseconds from the step's first span.

A step's output is settled a turn after its launch, and who steps by hand lets seconds pass between the two: ``gap``
says where a picture may leave that time out.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.recording.schema import StepRecord

SETTLING = ("wait_output", "update_from_output")
KEPT = 0.08
"""Of a gap, as a share of the launched part's length."""


def timeline(record: StepRecord) -> dict[str, Any]:
    """``spans``, ``marks``, ``device_phases`` and ``gap`` of the step, see ``view``. Unknown device times are None."""
    start = min((span.start_ns for span in record.spans), default=min((m.time_ns for m in record.marks), default=0))

    def us(time_ns: int) -> float:
        return (time_ns - start) / 1000

    def device(time_ns: int, since_ns: int = 0) -> float | None:
        return us(time_ns) if time_ns >= max(since_ns, 0) else None

    spans = [
        {
            "name": span.name,
            "start": us(span.start_ns),
            "end": us(span.end_ns),
            "depth": span.depth,
            # Earlier than the span itself: nothing was queued in it.
            "device_end": device(span.device_end_ns, span.start_ns),
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
    known = any(mark["device_end"] is not None for mark in marks)
    device_phases = [] if known else _device_phases(spans)
    return {"spans": spans, "marks": marks, "device_phases": device_phases, "gap": _gap(spans, marks + device_phases)}


def _device_phases(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where phases were stamped and launches were not: from the later of a phase's start and the one before's end."""
    found, free_at = [], 0.0
    for span in sorted(spans, key=lambda span: float(span["start"])):
        end = span["device_end"]
        if not span["depth"] and end is not None and end > free_at:
            begin = max(free_at, span["start"])
            found.append(
                {"kind": "phase", "name": span["name"], "stream": "main", "phase": span["name"]}
                | {"device_start": begin, "device_end": end, "added": False}
            )
            free_at = end
    return found


def _gap(spans: list[dict[str, Any]], on_device: list[dict[str, Any]]) -> dict[str, float] | None:
    """The time between launch and settling, if it is longer than the launch itself."""
    launched = [span["end"] for span in spans if span["name"] not in SETTLING]
    settled = [span["start"] for span in spans if span["name"] in SETTLING]
    if not launched or not settled:
        return None
    ends = [one["device_end"] for one in on_device if one["device_end"] is not None]
    at, to = max(launched + [end for end in ends if end <= min(settled)]), min(settled)
    kept = KEPT * max(launched)
    return {"at": at, "hidden": to - at - kept} if to - at > max(launched) else None
