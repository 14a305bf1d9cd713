"""Small scripts on a bare runtime whose hazards are known to the letter, and detectors with a deliberate bug."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2lab.check.host_reads import Hazard, HostRead, HostReads, Kind
from mrv2lab.check.races import RaceDetector
from mrv2lab.runtime.base import Event, Runtime, Tensors
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.places import Place
from mrv2lab.runtime.tap import Pass
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.runtime.uva import UvaBuffer

Detector = Callable[[Runtime], RaceDetector]

_LINE = re.compile(r" at \S+:\d+")


def plain(hazard: Hazard) -> tuple[Any, ...]:
    """A hazard without call sites: (buffer, step, kind, reader, writer or the two moments, changed)."""
    moments = tuple(_LINE.sub("", moment) for moment in hazard.between or ())
    writer = _LINE.sub("", hazard.writer) if hazard.writer is not None else moments
    return hazard.buffer, hazard.step, hazard.kind, _LINE.sub("", hazard.reader), writer, hazard.changed


def add(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.add_(src)


def runtime() -> CpuRuntime:
    """A deferred stream with the one segment that the scripts launch."""
    rt = CpuRuntime()
    rt.register("add", add)
    return rt


def published_twice(detector: Detector = RaceDetector) -> RaceDetector:
    """Step 1 publishes into the pinned buffer that step 0's copy has not read: other values, then the same."""
    rt = runtime()
    ids = POLICIES["unsafe"](rt).upload("ids", 2, torch.int32)
    with detector(rt) as races:
        for values in ([1, 2], [3, 4], [3, 4]):
            ids.send(np.array(values, np.int32))
            rt.end_step()
    return races


def written_through_numpy(detector: Detector = RaceDetector) -> RaceDetector:
    """The host writes a pinned table through its NumPy view, between two chokepoints that do not touch it."""
    rt = runtime()
    table = POLICIES["unsafe"](rt).table("table", 4, torch.int32)
    total, one = rt.zeros(4, torch.int32, name="total"), rt.zeros(4, torch.int32, name="one")
    with detector(rt) as races:
        table.np[:] = 7
        table.publish()
        rt.run("add", total, one, reads=(one,), writes=(total,))
        table.np[2] = 8
        rt.run("add", total, one, reads=(one,), writes=(total,))
        rt.end_step()
    return races


def written_before_the_wait(detector: Detector = RaceDetector) -> RaceDetector:
    """The write and the wait that lets the copy run have no chokepoint between them: only the checksum knows."""
    rt = runtime()
    table = POLICIES["unsafe"](rt).table("table", 4, torch.int32)
    copied = rt.event("copied")
    with detector(rt) as races:
        table.np[:] = 7
        table.publish()
        copied.record()
        table.np[2] = 8
        copied.synchronize()
        rt.end_step()
    return races


def read_in_place(detector: Detector = RaceDetector) -> RaceDetector:
    """A kernel reads a UVA buffer that the host publishes into before the kernel has run."""
    rt = runtime()
    slot = UvaBuffer(rt, 4, torch.int32, "slot")
    total = rt.zeros(4, torch.int32, name="total")
    with detector(rt) as races:
        for value in (5, 6):
            rt.publish(slot.gpu, np.full(4, value, np.int32))
            rt.run("add", total, slot.gpu, reads=(slot.gpu,), writes=(total,))
            rt.end_step()
    return races


def neighbours(detector: Detector = RaceDetector) -> RaceDetector:
    """A publish into the half of a buffer that no copy reads, and one into a buffer whose copy is over."""
    rt = runtime()
    host = rt.empty(8, torch.int32, name="halves", place="pinned")
    host.fill_(0)
    device = rt.zeros(4, torch.int32, name="device")
    with detector(rt) as races:
        rt.h2d(device, host[4:])
        rt.publish(host, np.full(4, 1, np.int32))
        rt.main.synchronize()
        rt.publish(host[4:], np.full(4, 2, np.int32))
        rt.end_step()
    return races


def memory_served_twice(detector: Detector = RaceDetector) -> RaceDetector:
    """Pinned memory that the device wrote gets another owner, as when it is freed and handed out again."""
    rt = runtime()
    device = rt.zeros(4, torch.int32, name="device")
    memory = rt.empty(4, torch.int32, name="back", place="pinned")
    with detector(rt) as races:
        rt.d2h(memory, device)
        rt.synchronize()
        rt.registry.add(memory, "host", Place.PINNED)
        rt.h2d(device, memory)
        memory.fill_(1)
        rt.end_step()
    return races


# -- detectors with a bug ----------------------------------------------------------------------------------------------


class NeverLooksAtUva(HostReads):
    def launched(self, what: Pass, reads: Tensors, writes: Tensors) -> None:
        if what.kind == "h2d":
            super().launched(what, reads, writes)


class ComparesAfterTheFact(HostReads):
    """Takes the bytes for comparison when it looks, not when the read was queued."""

    def look(self, moment: str) -> None:
        for reads in self._pending.values():
            for read in reads:
                read.content = read.now.tobytes()
        super().look(moment)


class TrustsTheChokepoints(HostReads):
    """Never asks the device."""

    def _settle(self, moment: str) -> None:
        for _ in self.sums.arrived():
            pass


class TrustsTheDevice(HostReads):
    """Never looks at the host's bytes while a read is pending."""

    def look(self, moment: str) -> None:
        for reads in self._pending.values():
            for read in reads:
                read.compared = False
        super().look(moment)


class IgnoresPublishes(HostReads):
    def publishing(self, what: Pass, slot: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        pass


class NeverForgetsTheDevice(HostReads):
    """Takes an address that the device once wrote for the device's, whoever has it now."""

    def _is_of_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._of_device


class NeverDone(HostReads):
    """Takes every read for pending, however long it is over."""

    def look(self, moment: str) -> None:
        self._settle(moment)


class WholeStorages(HostReads):
    """Takes a publish into a buffer for one into all of it."""

    def _keep(self, what: Pass, source: torch.Tensor, target: torch.Tensor | None, done: Event) -> None:
        super()._keep(what, source, target, done)
        read: HostRead = self._pending[self.rt.current.name][-1]
        storage = source.untyped_storage()
        read.start, read.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class CallsEverythingACopy(HostReads):
    def _report(self, read: HostRead, writer: str | None, between: tuple[str, str] | None, changed: bool) -> None:
        kind: Kind = "copy"
        read.kind = kind
        super()._report(read, writer, between, changed)


class ForgetsTheStep(HostReads):
    """Says the step in which it noticed, not the step whose read it was."""

    def _report(self, read: HostRead, writer: str | None, between: tuple[str, str] | None, changed: bool) -> None:
        read.step = self.step()
        super()._report(read, writer, between, changed)


MUTANTS: tuple[type[HostReads], ...] = (
    NeverLooksAtUva,
    ComparesAfterTheFact,
    TrustsTheChokepoints,
    TrustsTheDevice,
    IgnoresPublishes,
    NeverForgetsTheDevice,
    NeverDone,
    WholeStorages,
    CallsEverythingACopy,
    ForgetsTheStep,
)


def with_reads(kind: type[HostReads]) -> Detector:
    """A detector whose looking is done by ``kind``."""

    class Detective(RaceDetector):
        def _listener(self) -> HostReads:
            return kind(self.rt, self._step)

    return Detective
