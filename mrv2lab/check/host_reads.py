"""What queued work has yet to read of the host's memory, and what the host did to it meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from mrv2lab.check.device_sums import DeviceSums, host_sum
from mrv2lab.recorder.steps import short_site
from mrv2lab.runtime.base import Event, Runtime, Tensors
from mrv2lab.runtime.device_tensor import DeviceTensor
from mrv2lab.runtime.places import Buffer
from mrv2lab.runtime.tap import Pass, Tap

Kind = Literal["copy", "uva"]


@dataclass(frozen=True, slots=True)
class Hazard:
    """The host wrote ``buffer`` while queued work of ``step`` had not read it.

    ``kind`` is how the device reads it: ``copy`` (a queued copy to the device) or ``uva`` (a kernel, in place).
    ``reader`` is the launch that reads. ``writer`` is the publish that wrote; where the host wrote through a view of
    its own (NumPy), it is None, and ``between`` names the two moments that bracket the write. ``changed``: whether the
    write changed a byte; one that did not is a hazard that had no consequence.
    """

    buffer: str
    step: int
    kind: Kind
    reader: str
    writer: str | None
    between: tuple[str, str] | None = None
    changed: bool = True


@dataclass(slots=True, eq=False)
class HostRead:
    """One queued read of ``[start, end)`` of the host's addresses."""

    buffer: str
    step: int
    kind: Kind
    reader: str
    start: int
    end: int
    # the host's bytes, as they are now; kept, so that the memory stays this buffer's as long as somebody will read it
    now: np.ndarray[Any, np.dtype[np.uint8]]
    width: int
    """Bytes an element."""
    content: bytes
    """The host's bytes at enqueue."""
    done: Event
    """Recorded right behind the read."""
    intact: str
    """The latest moment at which the host's bytes were still those of the enqueue."""
    closed: str | None = None
    """The first moment at which the read was known to be done."""
    hazard: int | None = None
    """Number of the hazard that was reported of it."""
    settled: bool = False
    """Whether that one changed a byte: then there is no more to say."""
    compared: bool = True
    """Whether the host's bytes must stay as they are while it is pending."""


@dataclass
class Found:
    """What a watch has found so far."""

    hazards: list[Hazard] = field(default_factory=list)
    corrupted: set[int] = field(default_factory=set)
    """Steps in which the device read other bytes than the host had queued."""
    reads: dict[tuple[int, str, str], int] = field(default_factory=dict)
    """(step, buffer, kind) -> reads"""
    wrong_reads: dict[tuple[int, str, str], int] = field(default_factory=dict)
    """Those of them whose checksum differs."""


class HostReads(Tap):
    """Keeps every queued read of host memory until it is done, and its truth until that has arrived.

    Memory that the device writes as well (a table that kernels keep in host memory, a target of copies back) is left
    out: what it should hold when a read runs, the host cannot know. ``step`` says whose work is being launched.
    """

    def __init__(self, rt: Runtime, step: Callable[[], int]) -> None:
        self.rt = rt
        self.step = step
        self.sums = DeviceSums(rt)
        self.found = Found()
        self.ended = 0
        """Steps that ended under this watch."""
        self._pending: dict[str, deque[HostRead]] = {}
        """By stream, in its order: if one read is not done, none behind it is."""
        self._of_device: dict[int, Buffer | None] = {}
        """Storages that queued work writes, by address, and who was there: memory that was freed serves others."""
        self._events: list[Event] = []

    # -- chokepoints ---------------------------------------------------------------------------------------------------

    def before(self, what: Pass) -> None:
        """See :meth:`Tap.before`."""
        self.look(_label(what))

    def launched(self, what: Pass, reads: Tensors, writes: Tensors) -> None:
        """See :meth:`Tap.launched`."""
        for tensor in writes:
            if on_host(tensor) and not self._is_of_device(tensor):
                self._leave_to_device(tensor)
        sources = [one for one in reads if on_host(one) and one.numel() and not self._is_of_device(one)]
        if not sources:
            return
        self.muted = True
        try:
            done = self._events.pop() if self._events else self.rt.event("races.read")
            done.record(self.rt.current)
            for source in sources:
                self._keep(what, source, writes[0] if what.kind == "h2d" else None, done)
        finally:
            self.muted = False

    def _is_of_device(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in self._of_device and self._of_device[address] is self.rt.registry.find(tensor)

    def _leave_to_device(self, tensor: torch.Tensor) -> None:
        """The device writes it: its bytes may change behind a pending read before the host knows that to be done."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        self._of_device[start] = self.rt.registry.find(tensor)
        for reads in self._pending.values():
            for read in reads:
                read.compared = read.compared and not start <= read.start < start + storage.nbytes()

    def _keep(self, what: Pass, source: torch.Tensor, target: torch.Tensor | None, done: Event) -> None:
        flat = span(source)
        now = flat.view(torch.uint8).numpy()
        kind: Kind = "uva" if target is None else "copy"
        step, start, label = self.step(), flat.data_ptr(), _label(what)
        buffer = buffer_name(self.rt.registry.name(source))
        read = HostRead(
            buffer, step, kind, label, start, start + now.nbytes, now, flat.element_size(), now.tobytes(), done, label
        )
        self._pending.setdefault(self.rt.current.name, deque()).append(read)
        key = step, buffer, kind
        self.found.reads[key] = self.found.reads.get(key, 0) + 1
        self.sums.add(flat if target is None else target, read)

    def publishing(self, what: Pass, slot: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        """See :meth:`Tap.publishing`."""
        host = slot.numpy()[: len(values)]
        start = slot.data_ptr()
        end = start + host.nbytes
        hit = [read for reads in self._pending.values() for read in reads if read.start < end and start < read.end]
        if not hit:
            return
        written = np.empty_like(host)
        written[:] = values  # as the publish will convert them
        content = written.tobytes()
        for read in hit:
            if not read.settled:
                # Only what both touch: behind it the buffer may hold what nobody wrote.
                low, high = max(start, read.start), min(end, read.end)
                old = read.now[low - read.start : high - read.start].tobytes()
                self._report(read, _label(what), None, old != content[low - start : high - start])

    def step_ending(self) -> None:
        """See :meth:`Tap.step_ending`."""
        self.muted = True
        try:
            self.sums.send()
        finally:
            self.muted = False
        self.ended += 1

    def dropped(self) -> None:
        """See :meth:`Tap.dropped`."""
        self._pending.clear()
        self.sums.drop()

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self, moment: str) -> None:
        """Compare what is pending with what was queued. ``moment`` names now."""
        for reads in self._pending.values():
            while reads and reads[0].done.query():
                self._close(reads.popleft(), moment, reads)
            for read in reads:
                if read.settled or not read.compared:
                    continue
                if read.now.tobytes() != read.content:
                    self._report(read, None, (read.intact, moment), True)
                else:
                    read.intact = moment
        self._settle(moment)

    def _close(self, read: HostRead, moment: str, rest: deque[HostRead]) -> None:
        read.closed = moment
        read.now = _NOTHING  # the memory may serve others
        if not rest or rest[0].done is not read.done:
            self._events.append(read.done)

    def _settle(self, moment: str) -> None:
        """The truth, where it has arrived: the device's checksum against that of the bytes at enqueue."""
        for read, seen in self.sums.arrived():
            if read is None or seen == host_sum(read.content, read.width):
                continue
            key = read.step, read.buffer, read.kind
            self.found.corrupted.add(read.step)
            self.found.wrong_reads[key] = self.found.wrong_reads.get(key, 0) + 1
            if not read.settled:
                self._report(read, None, (read.intact, read.closed or moment), True)

    def _report(self, read: HostRead, writer: str | None, between: tuple[str, str] | None, changed: bool) -> None:
        """One hazard a read: the first, or the first that changed something."""
        hazard = Hazard(read.buffer, read.step, read.kind, read.reader, writer, between, changed)
        if read.hazard is None:
            read.hazard = len(self.found.hazards)
            self.found.hazards.append(hazard)
        elif changed:
            self.found.hazards[read.hazard] = hazard
        read.settled = changed


_NOTHING = np.empty(0, np.uint8)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in host memory, by the runtime's own accounts."""
    return type(tensor) is not DeviceTensor and not tensor.is_cuda


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element of ``tensor`` (not empty), flat."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * stride for size, stride in sizes),), (1,))


def buffer_name(name: str) -> str:
    """The table's or array's own name: without its place and its slot in a pool."""
    stem, dot, last = name.rpartition(".")
    return stem if dot and (last in ("pinned", "host", "tmp", "cpu") or last.startswith("uva")) else name


def _label(what: Pass) -> str:
    return f"{what.kind} {what.name} at {short_site(what.site)}"
