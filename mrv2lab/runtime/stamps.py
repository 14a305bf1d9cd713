"""Timing points in streams: when the device had done what was queued before each, learnt without a wait.

On CUDA a stamp is a timing event. An event's elapsed time is a float32 of milliseconds, 62 us coarse after ten minutes,
so times chain from one anchor (a stamp of the main stream, one a step) to the next. Device time is mapped to the host's
clock by a fit through synchronised anchors at the start and at the end. On a software stream a stamp is the record
before it, whose modelled times are the host's virtual clock already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from mrv2lab.runtime.base import Stream
    from mrv2lab.runtime.cpu import CpuRuntime
    from mrv2lab.runtime.cuda import CudaRuntime
    from mrv2lab.runtime.software import Record, SoftwareStream

POOL = 512
"""CUDA events made before a run: making one costs as much as several records of it."""
SYNC_TRIES = 20
"""Synchronised anchors taken at each end; the tightest is kept."""
MIN_FIT_NS = 1_000_000_000
"""Runs shorter than this get no drift: the anchors' uncertainty would be larger."""


@dataclass(frozen=True)
class ClockFit:
    """How device times became host times."""

    method: str
    uncertainty_ns: int
    """Half the width of the wider synchronised anchor; 0 where both clocks are one."""
    drift_ppm: float = 0.0


class Stamps(ABC):
    """Timing points, numbered from 0 in the order of :meth:`take`."""

    def __init__(self) -> None:
        self.taken = 0

    @abstractmethod
    def start(self) -> None:
        """Synchronise and set the first anchor. Before the first :meth:`take`."""

    @abstractmethod
    def take(self, stream: Stream) -> int:
        """Put a timing point into ``stream``, now; returns its number."""

    @abstractmethod
    def anchor(self) -> None:
        """Once a step, on the main stream, behind the step's work. Never waits."""

    @abstractmethod
    def finish(self) -> ClockFit:
        """Synchronise, set the last anchor and learn every time that is left."""

    @abstractmethod
    def ends_ns(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[taken] host nanoseconds at which the device reached each stamp; -1 = not known (yet)."""

    def starts_ns(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """[taken] when the work right before each stamp began, where the machine knows it."""
        return None


class SoftwareStamps(Stamps):
    """The modelled times of the records before the stamps."""

    def __init__(self, rt: CpuRuntime) -> None:
        super().__init__()
        self.rt = rt
        self._pending: deque[tuple[int, Record]] = deque()
        self._starts: list[int] = []
        self._ends: list[int] = []

    def start(self) -> None:
        """See :meth:`Stamps.start`."""
        self.rt.synchronize()

    def take(self, stream: Stream) -> int:
        """See :meth:`Stamps.take`."""
        last = _software(stream).last
        self._starts.append(-1)
        self._ends.append(-1)
        if last is not None:
            self._pending.append((self.taken, last))
        self.taken += 1
        return self.taken - 1

    def anchor(self) -> None:
        """See :meth:`Stamps.anchor`. Records that ran are let go, since they hold their arguments."""
        for _ in range(len(self._pending)):
            number, record = self._pending.popleft()
            if record.end_ns:
                self._starts[number], self._ends[number] = record.start_ns, record.end_ns
            else:
                self._pending.append((number, record))

    def finish(self) -> ClockFit:
        """See :meth:`Stamps.finish`."""
        self.rt.synchronize()
        self.anchor()
        self._pending.clear()
        return ClockFit("modelled: a virtual clock shared by host and device", 0)

    def ends_ns(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """See :meth:`Stamps.ends_ns`."""
        self.anchor()
        return np.array(self._ends, np.int64)

    def starts_ns(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """See :meth:`Stamps.starts_ns`."""
        self.anchor()
        return np.array(self._starts, np.int64)


def _software(stream: Stream) -> SoftwareStream:
    return stream  # type: ignore[return-value]


class CudaStamps(Stamps):
    """Timing events, chained from anchor to anchor."""

    def __init__(self, rt: CudaRuntime) -> None:
        super().__init__()
        self.rt = rt
        self._free: list[torch.cuda.Event] = []
        self._segment: list[tuple[int, torch.cuda.Event]] = []
        """Stamps since the last anchor: (number, event)."""
        self._segments: deque[tuple[list[tuple[int, torch.cuda.Event]], list[torch.cuda.Event], torch.cuda.Event]]
        self._segments = deque()
        """Stamps that were not read yet, by segment: the stamps, those of other streams, and the anchor behind them."""
        self._others: list[torch.cuda.Event] = []
        self._base: torch.cuda.Event | None = None
        """The anchor behind the last stamp that was read, ``_base_ns`` after the first anchor."""
        self._base_ns = 0.0
        self._device_ns: list[float] = []
        self._sync: list[tuple[int, float, int]] = []
        """Synchronised anchors: host ns, device ns, half width."""

    def _event(self, stream: Any) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def start(self) -> None:
        """See :meth:`Stamps.start`."""
        self._free = [torch.cuda.Event(enable_timing=True) for _ in range(POOL)]
        for event in self._free:  # torch makes the CUDA event at its first record
            event.record(self.rt.main.cuda)
        self._base, host, half = self._tightest()
        self._sync.append((host, 0.0, half))

    def _tightest(self) -> tuple[torch.cuda.Event, int, int]:
        """An event on the idle main stream, the host's time of it and half the bracket's width."""
        stream = self.rt.main.cuda
        torch.cuda.synchronize(self.rt.device)
        best: tuple[torch.cuda.Event, int, int] | None = None
        for _ in range(SYNC_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = self.rt.now()
            event.record(stream)
            event.synchronize()
            after = self.rt.now()
            if best is None or (after - before) // 2 < best[2]:
                best = (event, (before + after) // 2, (after - before) // 2)
        assert best is not None
        return best

    def take(self, stream: Stream) -> int:
        """See :meth:`Stamps.take`."""
        event = self._event(stream.cuda)  # type: ignore[attr-defined]
        self._segment.append((self.taken, event))
        if stream is not self.rt.main:
            self._others.append(event)
        self._device_ns.append(-1.0)
        self.taken += 1
        return self.taken - 1

    def anchor(self) -> None:
        """See :meth:`Stamps.anchor`. Segments that the device has passed are read, so that their events serve again."""
        self._close_segment(self._event(self.rt.main.cuda))
        self._read()

    def _close_segment(self, anchor: torch.cuda.Event) -> None:
        self._segments.append((self._segment, self._others, anchor))
        self._segment, self._others = [], []

    def _read(self) -> None:
        while self._segments:
            segment, others, anchor = self._segments[0]
            # What lies before the anchor on its own stream is done if the anchor is; other streams may trail.
            if not (anchor.query() and all(event.query() for event in others)):
                return
            self._segments.popleft()
            for number, event in segment:
                self._device_ns[number] = self._since_base(event)
                self._free.append(event)
            self._base_ns = self._since_base(anchor)
            if self._base is not None:
                self._free.append(self._base)
            self._base = anchor

    def _since_base(self, event: torch.cuda.Event) -> float:
        assert self._base is not None
        milliseconds: float = self._base.elapsed_time(event)
        return self._base_ns + milliseconds * 1e6

    def finish(self) -> ClockFit:
        """See :meth:`Stamps.finish`."""
        event, host, half = self._tightest()
        self._close_segment(event)
        self._read()
        self._sync.append((host, self._base_ns, half))
        uncertainty = max(half for _, _, half in self._sync)
        return ClockFit(
            "synchronised anchors at start and end, timing events chained a step", uncertainty, self._drift()
        )

    def _drift(self) -> float:
        """Host nanoseconds a device nanosecond, less one, in parts per million."""
        (host0, device0, _), (host1, device1, _) = self._sync[0], self._sync[-1]
        if len(self._sync) < 2 or device1 - device0 < MIN_FIT_NS:
            return 0.0
        return ((host1 - host0) / (device1 - device0) - 1.0) * 1e6

    def ends_ns(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """See :meth:`Stamps.ends_ns`."""
        self._read()
        device = np.array(self._device_ns)
        host = self._sync[0][0] + device * (1 + self._drift() * 1e-6)
        return np.where(device < 0, -1, host).astype(np.int64)
