"""What comes before what: the edges that a critical path is walked along."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np

from mrv2lab.trace.host_threads import thread_of_lane
from mrv2lab.trace.intervals import leaders
from mrv2lab.trace.links import links
from mrv2lab.trace.members import member_of_lane
from mrv2lab.trace.syncs import points_of
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

Array = np.ndarray[Any, Any]

_NONE = np.empty(0, np.int64)


class Wait(NamedTuple):
    """A call in which the host stood still."""

    start: int
    end: int
    event: int
    awaited: int
    """The work that it waited for; -1: not known, or none."""


class PathGraph:
    """Of one trace: the work before each piece of work, its launch, and a host thread's waits and launches."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._launch = links(trace).launch
        # [n]: the work on the same stream that began before each piece of work and ended last; -1: none
        self._on_stream = np.full(len(trace), -1, np.int64)
        work = np.flatnonzero(trace.mask(*DEVICE_KINDS))
        for lane in np.unique(trace.lane[work]):
            events = work[trace.lane[work] == lane]
            self._on_stream[events[1:]] = events[leaders(trace.start[events] + trace.duration[events])][:-1]
        thread = thread_of_lane(trace)
        self._thread: list[int] = thread.tolist()
        calls = np.flatnonzero(links(trace).work > 0)
        self._calls: dict[int, tuple[Array, Array]] = {}
        """Thread -> its calls that launch work, and their starts."""
        for one in np.unique(thread[trace.lane[calls]]):
            mine = calls[thread[trace.lane[calls]] == one]
            self._calls[int(one)] = mine, trace.start[mine]
        self._waits: dict[int, list[Wait]] = {}
        self._member = member_of_lane(trace).tolist()
        self._held: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        """(member, device, stream) -> when it was told to wait, ascending, and for which work."""
        for point in points_of(trace)[0]:
            for event in point.waits:
                wait = Wait(int(trace.start[event]), self.end(event), event, point.awaited)
                self._waits.setdefault(self._thread[int(trace.lane[event])], []).append(wait)
            if point.kind == "device-side wait" and point.awaited >= 0:
                told = int(trace.start[point.event])
                key = self._member[int(trace.lane[point.event])], point.device, point.stream
                self._held.setdefault(key, []).append((told, point.awaited))
        for waits in self._waits.values():
            waits.sort()
        for held in self._held.values():
            held.sort()

    def end(self, event: int) -> int:
        """End of an event."""
        return int(self.trace.start[event] + self.trace.duration[event])

    def launch(self, work: int) -> int:
        """The call that launched it; -1: not in the file."""
        return int(self._launch[work])

    def before(self, work: int) -> int:
        """The work that it could not begin before: the one before it on its stream, or the one that its stream was told
        to wait for in between, whichever ended later; -1: none."""
        before = int(self._on_stream[work])
        lane = self.trace.lane_of(work)
        told = self._held.get((self._member[int(self.trace.lane[work])], lane.device, lane.stream), [])
        launch = self.launch(work)
        place = bisect_left(told, (int(self.trace.start[launch]), -1)) if told and launch >= 0 else 0
        if not place:
            return before
        when, awaited = told[place - 1]
        earlier = self.launch(before) if before >= 0 else -1
        if earlier >= 0 and int(self.trace.start[earlier]) > when:  # it held up the work before already
            return before
        return awaited if before < 0 or self.end(awaited) > self.end(before) else before

    def wait_before(self, lane: int, now: int) -> Wait | None:
        """The last wait of a lane's thread that began before ``now``."""
        waits = self._waits.get(self._thread[lane], [])
        place = bisect_left(waits, (now,))
        return waits[place - 1] if place else None

    def calls_within(self, lane: int, start: int, end: int) -> list[int]:
        """The calls of a lane's thread that begin in ``[start, end)`` and launch work; of nested ones the outermost."""
        calls, begins = self._calls.get(self._thread[lane], (_NONE, _NONE))
        inside = calls[np.searchsorted(begins, start, side="left") : np.searchsorted(begins, end, side="left")]
        if not len(inside):
            return []
        ends = self.trace.start[inside] + self.trace.duration[inside]
        reach = np.concatenate([[start], np.maximum.accumulate(ends)[:-1]])
        return [int(call) for call in inside[self.trace.start[inside] >= reach]]
