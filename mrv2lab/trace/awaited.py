"""The device work that somebody who waits has to wait for: by queue order, which is the order of launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mrv2lab.trace.links import links
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

Array = np.ndarray[Any, Any]


class _Queue(NamedTuple):
    """Work in a chosen order, and of each prefix what was done last."""

    # [m] int64: when it was launched; of work whose launch is not in the file, when it was done
    key: Array
    # [m] int64: the event that was done last of it and all before it
    last: Array


class Awaited:
    """Device work of a trace as queues: of each lane, each stream, each device, and everything.

    A wait that returned at some moment waited for nothing that ended later. So work whose launch is not in the file
    counts as waited for if it had ended by then: right as long as no other thread launched it during the wait.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._work = np.flatnonzero(trace.mask(*DEVICE_KINDS))
        self._launch = links(trace).launch[self._work]
        self._device_of = np.array([lane.device for lane in trace.lanes] or [-1], np.int64)
        self._stream_of = np.array([lane.stream for lane in trace.lanes] or [-1], np.int64)
        self.devices: tuple[int, ...] = tuple(np.unique(self._device_of[trace.lane[self._work]]).tolist())
        self._queues: dict[Any, tuple[_Queue, _Queue]] = {}

    def __len__(self) -> int:
        return len(self._work)

    def last(
        self, before: int, back: int, *, device: int | None = None, stream: int | None = None, lane: int | None = None
    ) -> int:
        """The event that was done last of what was launched before the moment ``before``, and of what ended by ``back``
        and was launched outside the file; -1: no such work.

        Of one lane; of a stream id (of one device, if given); of a device; of all devices.
        """
        known, orphans = self._queue(device, stream, lane)
        places = (np.searchsorted(known.key, before, side="left"), np.searchsorted(orphans.key, back, side="right"))
        found = [int(queue.last[place - 1]) for queue, place in zip((known, orphans), places, strict=True) if place]
        return max(found, key=self._end, default=-1)

    def until(
        self, before: int, back: int, *, device: int | None = None, stream: int | None = None, lane: int | None = None
    ) -> int:
        """When the work of :meth:`last` was done; -1: no such work."""
        event = self.last(before, back, device=device, stream=stream, lane=lane)
        return self._end(event) if event >= 0 else -1

    def _end(self, event: int) -> int:
        return int(self.trace.start[event] + self.trace.duration[event])

    def _queue(self, device: int | None, stream: int | None, lane: int | None) -> tuple[_Queue, _Queue]:
        """Work whose launch is known, and the rest."""
        key = device, stream, lane
        if key not in self._queues:
            of_lane = self.trace.lane[self._work]
            chosen = np.ones(len(self._work), bool)
            if lane is not None:
                chosen &= of_lane == lane
            if device is not None:
                chosen &= self._device_of[of_lane] == device
            if stream is not None:
                chosen &= self._stream_of[of_lane] == stream
            known, orphan = self._work[chosen & (self._launch >= 0)], self._work[chosen & (self._launch < 0)]
            launched = self.trace.start[links(self.trace).launch[known]]
            ends = self.trace.start[orphan] + self.trace.duration[orphan]
            self._queues[key] = self._ordered(known, launched), self._ordered(orphan, ends)
        return self._queues[key]

    def _ordered(self, work: Array, key: Array) -> _Queue:
        order = np.argsort(key, kind="stable")
        work, key = work[order], key[order]
        ends = self.trace.start[work] + self.trace.duration[work]
        leads = ends == np.maximum.accumulate(ends) if len(ends) else np.zeros(0, bool)
        return _Queue(key, work[np.maximum.accumulate(np.where(leads, np.arange(len(ends)), 0))] if len(ends) else work)
