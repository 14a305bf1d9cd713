"""What the host did on a stretch of a path that lies between launches and waits: the ranges that ran there, by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.trace.call_site import enclosing, frame
from mrv2lab.trace.intervals import leaders
from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]

HOST = "host"
"""Host time of which the file says nothing more."""


class HostNames:
    """The outermost phases and operators of each host lane, and the user's functions around ``calls`` (positions)."""

    def __init__(self, trace: Trace, calls: list[int]) -> None:
        self.trace = trace
        self._ranges: dict[int, tuple[Array, Array, Array]] = {}
        """Lane -> its outermost ranges, in order of time, none within another; their starts, their ends."""
        named = np.flatnonzero(trace.mask("phase", "op") & (trace.duration > 0))
        for lane in np.unique(trace.lane[named]).tolist():
            mine = named[trace.lane[named] == lane]
            mine = mine[leaders(trace.end[mine]) == np.arange(len(mine))]
            self._ranges[lane] = mine, trace.start[mine], trace.end[mine]
        self._chains = dict(zip(calls, enclosing(trace, calls), strict=True))

    def pieces(self, start: int, end: int, lane: int, call: int) -> list[tuple[int, int, str, int]]:
        """The stretch ``[start, end)`` in front of ``call`` (-1: none) on a lane, cut where a range begins or ends:
        (start, end, name, event; -1: no event) of each piece, in order.

        What no range covers is named after the innermost of the user's functions around all of it; else after what it
        leads to: ``host, before aten::copy_``.
        """
        trace = self.trace
        ranges, starts, ends = self._of_lane(lane)
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(starts, end)
        found, at = [], start
        for event in ranges[first:last].tolist():
            begin, back = max(int(trace.start[event]), at), min(int(trace.end[event]), end)
            if begin > at:
                found.append((at, begin, self._between(at, call, event), -1))
            if back > begin:
                found.append((begin, back, trace.name_of(event), event))
                at = back
        if at < end:
            following = int(ranges[last]) if last < len(ranges) and int(trace.start[ranges[last]]) == end else -1
            found.append((at, end, self._between(at, call, following), -1))
        return found

    def _of_lane(self, lane: int) -> tuple[Array, Array, Array]:
        """Ranges of a lane; of a lane without any (calls of a recording) the phases of its process."""
        if lane in self._ranges:
            return self._ranges[lane]
        process = self.trace.lanes[lane].process
        for other, ranges in self._ranges.items():
            if self.trace.lanes[other].process == process and self.trace.kind_of(int(ranges[0][0])) == "phase":
                return ranges
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing

    def _between(self, start: int, call: int, following: int) -> str:
        """Name of what lies between ranges, from ``start`` on."""
        for event in self._chains.get(call, []):
            if self.trace.kind_of(event) != "python" or int(self.trace.start[event]) > start:
                continue
            found = frame(self.trace.name_of(event))
            if found is not None and found.of_user:
                return found.function
        return f"{HOST}, before {self.trace.name_of(following)}" if following >= 0 else HOST
