"""Waits of our own marks (recordings, captures on software streams): the chokepoints say what they waited for."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from mrv2lab.observer import WAITS
from mrv2lab.trace.awaited import Awaited
from mrv2lab.trace.sync_kinds import BARRIER_PHASE
from mrv2lab.trace.sync_points import SyncPoint
from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]


def mark_kind(args: dict[str, Any]) -> str:
    """Kind of the mark (``observer.MARKS``) that an event was made from; empty: it was made from none."""
    return str(args.get("mark", ""))


def of_ours(trace: Trace) -> Array:
    """[n] bool: synchronisations that a mark of ours says."""
    found = np.zeros(len(trace), bool)
    for event in np.flatnonzero(trace.mask("sync") & (trace.arg >= 0)):
        found[event] = bool(mark_kind(trace.args(int(event))))
    return found


def mark_points(trace: Trace, events: Array, awaited: Awaited) -> tuple[list[SyncPoint], list[str]]:
    """The points of ``events`` (:func:`of_ours`), and what their marks do not say."""
    recorded = _recorded(trace)
    points, silent = [], 0
    for event in events.tolist():
        args, length = trace.args(event), int(trace.duration[event])
        mark, name, stream = mark_kind(args), trace.name_of(event), str(args.get("stream", ""))
        kind = _kind(mark, name, stream, recorded)
        point = SyncPoint(kind, name, event, [event])
        point.waits = [event] if mark in WAITS else []
        point.api_ns = length
        if mark == "implicit_sync" and not length and not trace.info.modelled:
            point.api_ns, silent = -1, silent + 1
        point.site, point.caller = str(args.get("site") or ""), str(args.get("phase") or "")
        point.step = None if args.get("step") is None else f"mrv2lab.step#{args['step']}"
        point.barrier = point.caller.split("/")[0] == BARRIER_PHASE
        lane = _lane(trace, stream)
        if lane >= 0:
            point.device, point.stream = trace.lanes[lane].device, trace.lanes[lane].stream
        known, point.awaited = _awaited(trace, event, kind, lane, recorded.get(name, []), awaited)
        if known and point.waits:
            until = int(trace.start[point.awaited] + trace.duration[point.awaited]) if point.awaited >= 0 else 0
            start = int(trace.start[event])
            point.gpu_wait_ns = max(0, min(until, start + length) - start)
        points.append(point)
    said = []
    if silent:
        said.append(
            f"{silent:,} implicit synchronisations of a real device: CUDA does not say how long they took, so neither "
            "do their marks"
        )
    return points, said


def _kind(mark: str, name: str, stream: str, recorded: dict[str, list[tuple[int, int]]]) -> str:
    if mark == "wait_event":
        return "device-side wait"
    if mark == "queue_full":
        return "queue full"
    if mark == "implicit_sync":
        return "implicit copy" if "copy" in name or "h2d" in name or "pageable" in name else "item"
    if name in recorded:
        return "event"
    return "stream" if name == stream else "device"


def _recorded(trace: Trace) -> dict[str, list[tuple[int, int]]]:
    """When each event was recorded, ascending, and on which lane (-1: its stream has no work); by the event's name."""
    found: dict[str, list[tuple[int, int]]] = {}
    for event in np.flatnonzero(trace.mask("event")).tolist():
        lane = _lane(trace, str(trace.args(event).get("stream", "")))
        found.setdefault(trace.name_of(event), []).append((int(trace.start[event]), lane))
    return found


def _lane(trace: Trace, stream: str) -> int:
    """The lane of a stream of that name; -1: none has work."""
    return next(
        (number for number, lane in enumerate(trace.lanes) if lane.role == "stream" and lane.thread == stream), -1
    )


def _awaited(
    trace: Trace, event: int, kind: str, lane: int, records: list[tuple[int, int]], awaited: Awaited
) -> tuple[bool, int]:
    """Whether the marks say which work was waited for, and the event that was done last of it (-1: none)."""
    start = int(trace.start[event])
    end = start + int(trace.duration[event])
    if not len(awaited) or kind == "queue full":  # that one waits for some launch, not for all
        return False, -1
    if kind == "device":
        return True, awaited.last(start + 1, end)
    if kind not in ("event", "device-side wait"):
        return lane >= 0, awaited.last(start + 1, end, lane=lane) if lane >= 0 else -1
    place = bisect_right(records, start, key=lambda record: record[0]) - 1
    if place < 0 or records[place][1] < 0:
        return False, -1
    moment, lane = records[place]
    return True, awaited.last(moment + 1, end, lane=lane)  # a launch in the same nanosecond came before the record
