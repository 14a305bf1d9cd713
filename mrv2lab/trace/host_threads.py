"""What each host thread was doing: blocked, launching, or busy otherwise, as sets of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mrv2lab.trace.intervals import Intervals, subtract, union
from mrv2lab.trace.links import links
from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]

RECORDING_LANES: tuple[str, ...] = ("steps", "host phases", "host calls")
"""Threads by these names are views of one thread: a recording's."""
WORKING: tuple[str, ...] = ("python", "op", "annotation", "phase", "runtime", "overhead", "other")
"""Kinds that show that a thread did something."""


@dataclass(frozen=True)
class HostThread:
    """Disjoint times of one thread."""

    blocked: Intervals
    """Inside a call in which the host waits (:func:`mrv2lab.trace.syncs.blocked`)."""
    launching: Intervals
    """Else inside a call that launched device work."""
    working: Intervals
    """Else inside anything that was recorded."""


def thread_of_lane(trace: Trace) -> Array:
    """[lanes] int64: number of each lane's host thread; lanes of one thread share it."""
    keys = [
        (lane.process, lane.rank, "" if lane.thread in RECORDING_LANES else lane.thread, lane.role)
        for lane in trace.lanes
    ]
    known = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([known[key] for key in keys], np.int64)


def host_threads(trace: Trace, threads: Array) -> dict[int, HostThread]:
    """Those threads of the trace, by the numbers of :func:`thread_of_lane`."""
    from mrv2lab.trace.syncs import waits_of

    of_lane = thread_of_lane(trace)
    thread = of_lane[trace.lane]
    wanted = np.unique(threads)
    waits = _by_thread(waits_of(trace), thread, wanted)
    launches = _by_thread(np.flatnonzero(links(trace).work > 0), thread, wanted)
    works = _by_thread(np.flatnonzero(trace.mask(*WORKING)), thread, wanted)
    found = {}
    for place, number in enumerate(wanted.tolist()):
        blocked, launched, worked = (
            union(trace.start[events[place]], trace.start[events[place]] + trace.duration[events[place]])
            for events in (waits, launches, works)
        )
        found[number] = HostThread(blocked, subtract(launched, blocked), subtract(subtract(worked, blocked), launched))
    return found


def _by_thread(events: Array, thread: Array, wanted: Array) -> list[Array]:
    """The events of each wanted thread; ``thread`` has the number of every event of the trace."""
    order = events[np.argsort(thread[events], kind="stable")]
    numbers = thread[order]
    first, last = (np.searchsorted(numbers, wanted, side=side) for side in ("left", "right"))
    return [order[low:high] for low, high in zip(first, last, strict=True)]
