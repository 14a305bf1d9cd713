"""What the host knows to be done, by the order of our marks alone: no times, so modelled ones cannot mislead."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from mrv2lab.trace.mark_waits import mark_kind
from mrv2lab.trace.trace import Trace

Moments = dict[str, int]
"""Stream -> everything queued in it up to this moment."""


class HappensBefore:
    """A wait for an event makes everything done that its stream had been given when it was recorded, and what that
    stream had been told to wait for by then."""

    def __init__(self, trace: Trace) -> None:
        self._waits: dict[str, tuple[list[int], list[int]]] = {}
        """Stream -> moments of the host's waits, ascending, and up to when its work was known to be done."""
        held: dict[str, Moments] = {}
        """Stream -> what else is done once it has done all that it was given."""
        recorded: dict[str, Moments] = {}
        marks = np.flatnonzero(trace.mask("sync", "event") & (trace.arg >= 0))
        ends = trace.start[marks] + trace.duration[marks]
        for place in np.lexsort((marks, ends)):
            event, now = int(marks[place]), int(ends[place])
            args, name = trace.args(event), trace.name_of(event)
            mark, stream = mark_kind(args), str(args.get("stream", ""))
            if mark == "record":
                recorded[name] = held.get(stream, {}) | {stream: now}
            elif mark == "wait_event":
                _raise(held.setdefault(stream, {}), recorded.get(name, {}))
            elif mark == "synchronize" and name in recorded:
                self._done(now, recorded[name])
            elif mark in ("synchronize", "implicit_sync"):
                # Of the stream's own queue: everything that it was given before the wait began.
                self._done(now, held.get(stream, {}) | {stream: int(trace.start[event])})

    def _done(self, now: int, moments: Moments) -> None:
        for stream, moment in moments.items():
            times, until = self._waits.setdefault(stream, ([], []))
            times.append(now)
            until.append(max(moment, until[-1] if until else moment))

    def done(self, stream: str, queued: int, now: int) -> bool:
        """Whether at ``now`` the host had made sure that what ``stream`` was given at ``queued`` was done."""
        times, until = self._waits.get(stream, ([], []))
        place = bisect_right(times, now)
        return place > 0 and until[place - 1] >= queued


def _raise(moments: Moments, others: Moments) -> None:
    for stream, moment in others.items():
        moments[stream] = max(moment, moments.get(stream, moment))
