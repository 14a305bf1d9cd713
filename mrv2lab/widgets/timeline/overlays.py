"""What lies over the slices: steps, marks and differences, from frames to what the page reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mrv2lab.trace.trace import Lane, Trace, TraceError
from mrv2lab.widgets.timeline.slices import GROUPS, Slices
from mrv2lab.widgets.timeline.text import plain

if TYPE_CHECKING:
    import pandas as pd

MOST = 20_000
"""Rows of a frame that are drawn; the page says when there are more."""
MARK_KINDS = ("sync", "hazard")


def for_each(frames: Any, count: int, what: str) -> list[pd.DataFrame | None]:
    """One frame a trace from one frame, a sequence of frames, or nothing."""
    if frames is None or (isinstance(frames, Sequence) and not len(frames)):
        return [None] * count
    given = list(frames) if isinstance(frames, Sequence) else [frames]
    if len(given) > count:
        raise TraceError(f"{what}= has {len(given)} frames for {count} trace(s); give one frame a trace, in order")
    return given + [None] * (count - len(given))


def steps_of(frame: pd.DataFrame | None, offset: int) -> list[list[Any]]:
    """``[label, start, end]`` of each step on the axis."""
    if frame is None:
        return []
    step, start, end = _columns(frame, "steps", ("step", "host_start_ns", "host_end_ns"))
    number = frame["number"].tolist() if "number" in frame else [""] * len(frame)
    return [
        [_label(a, n), int(b) + offset, int(c) + offset] for a, b, c, n in zip(step, start, end, number, strict=True)
    ]


def _label(step: object, number: object) -> str:
    """A step's name, with its number at the end: there the page finds it, and shows it where the name has no room."""
    name = plain(step, 200)
    known = str(number).isdigit()
    return f"{name} #{number}" if known and not re.search(rf"(?<!\d){number}$", name) else name


def marks_of(
    frame: pd.DataFrame | None, trace: int, offset: int, slices: Slices, lanes: Sequence[Lane]
) -> list[list[Any]]:
    """``[start, end, kind, label, lane]`` of each mark; lane is a lane of the picture.

    The frame's columns are ``start_ns``, ``end_ns``, ``kind`` ("sync" or "hazard") and ``label``; a column ``lane``
    (positions in the trace's lanes, or lanes as text) says where, otherwise the first lane of host calls is meant.
    """
    if frame is None:
        return []
    start, end, kind, label = _columns(frame, "marks", ("start_ns", "end_ns", "kind", "label"))
    wrong = sorted(set(map(str, kind)) - set(MARK_KINDS))
    if wrong:
        raise TraceError(f"marks= has the kind {wrong[0]!r}: a mark is {' or '.join(map(repr, MARK_KINDS))}")
    wanted = frame["lane"].tolist() if "lane" in frame else [-1] * len(frame)
    calls = GROUPS.index("calls")
    of_trace = [(index, lane) for index, lane in enumerate(slices.lanes) if lane.trace == trace]
    # Of a thread's levels the calls come first: a mark belongs to what waited.
    of_trace.sort(key=lambda pair: abs(pair[1].group - calls))
    default = of_trace[0][0]
    place: dict[Any, int] = {}
    for index, lane in of_trace:
        place.setdefault(lane.lane, index)
        if lane.lane >= 0:
            place.setdefault(str(lanes[lane.lane]), index)
    return [
        [int(a) + offset, int(b) + offset, str(c), plain(d, 400), place.get(e, default)]
        for a, b, c, d, e in zip(start, end, kind, label, wanted, strict=True)
    ]


def difference_of(frame: pd.DataFrame | None, offset: int) -> list[list[Any]]:
    """``[start, end, delta, label]`` of each step on the axis; the frame's times are A's, delta is B minus A in ns."""
    if frame is None:
        return []
    start, end, delta, label = _columns(frame, "difference", ("start_ns", "end_ns", "delta_ns", "label"))
    return [
        [int(a) + offset, int(b) + offset, int(c), plain(d, 200)]
        for a, b, c, d in zip(start, end, delta, label, strict=True)
    ]


def capped(overlays: dict[str, list[Any]]) -> str:
    """Cut every list to ``MOST`` rows, in place; a sentence about what is left out, empty if nothing is."""
    lists = [("steps", steps) for steps in overlays["steps"]]
    lists += [(name, overlays[name]) for name in ("marks", "difference")]
    left_out = [f"{len(rows) - MOST:,} of {len(rows):,} rows of {name}=" for name, rows in lists if len(rows) > MOST]
    for _, rows in lists:
        del rows[MOST:]
    return f"Not drawn: {', '.join(left_out)}." if left_out else ""


def _columns(frame: pd.DataFrame, what: str, names: Sequence[str]) -> list[list[Any]]:
    missing = [name for name in names if name not in frame]
    if missing:
        has = ", ".join(map(str, frame.columns))
        raise TraceError(f"{what}= lacks the column {missing[0]!r}: it needs {', '.join(names)}, and has {has}")
    return [frame[name].tolist() for name in names]


def check_traces(traces: Sequence[Trace]) -> None:
    """Raises :class:`TraceError` unless there are one or two traces."""
    if not 1 <= len(traces) <= 2:
        raise TraceError(f"a Timeline shows one trace or two on one axis, not {len(traces)}")
    for trace in traces:
        if not isinstance(trace, Trace):
            raise TraceError(f"a Timeline shows Trace values, not {type(trace).__name__}: Trace.load reads a file")
