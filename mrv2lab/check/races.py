"""The race detector: did the host write what queued work had yet to read, and did the device read the wrong bytes?

Two questions, asked apart. *Hazards* are looked for on the host, at every chokepoint: a publish into memory that is
still to be read, or bytes that changed under a queued read. *Corruption* is the truth: a device checksum is queued
right behind every read of host memory and compared with the host's at enqueue. A hazard may stay without consequence;
a corrupted step had one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import pandas as pd
import torch

from mrv2lab.check.host_reads import Hazard, HostReads
from mrv2lab.check.spin import Spin
from mrv2lab.check.waits import cause, waits_by_cause
from mrv2lab.observer import NULL_OBSERVER, Mark, Observer
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.tap import tapped

if TYPE_CHECKING:
    from mrv2lab.engine.engine import Engine

__all__ = ["Hazard", "RaceDetector"]


class RaceDetector:
    """``with RaceDetector(engine) as races: ...`` watches an engine of either runner, or a bare :class:`Runtime`.

    It adds launches (named ``races.*``) and no wait while the ``with`` lasts; entering and leaving it wait for what is
    queued, leaving it to learn the last steps' truth. Inside the ``with`` results are of what has arrived.
    ``spin_ms`` > 0 puts a kernel of that length in front of each step's copies, on a GPU only, so that the device is
    sure to trail the host.

    Steps are the scheduler's numbers; of a bare runtime, ``end_step`` calls. Raises ``RuntimeError`` when the runtime
    is watched already, ``ValueError`` for a spin that cannot be.
    """

    def __init__(self, target: Engine | Runtime, *, spin_ms: float = 0.0) -> None:
        self._engine = None if isinstance(target, Runtime) else target
        self.rt: Runtime = target if isinstance(target, Runtime) else target.rt
        self._spin = Spin(self.rt, spin_ms) if spin_ms else None
        self.reads = self._listener()
        self._waits: list[Mark] = []
        self._before: Observer = NULL_OBSERVER
        self._tee: _Tee | None = None
        self._stack: ExitStack | None = None

    def _listener(self) -> HostReads:
        """What looks; the detector's mutants in the tests put another in its place."""
        return HostReads(self.rt, self._step)

    def _step(self) -> int:
        if self._engine is None:
            return self.reads.ended
        schedule = self._engine.core.last_schedule
        return schedule.step if schedule is not None else -1

    # -- attach and detach ---------------------------------------------------------------------------------------------

    def __enter__(self) -> RaceDetector:
        if self._stack is not None:
            raise RuntimeError("a RaceDetector watches once; make a new one")
        with ExitStack() as stack:
            stack.enter_context(tapped(self.rt, self.reads))  # refuses a second watch
            self._before = self.rt.observer
            self._prepare()
            self._stack = stack.pop_all()
        self._tee = _Tee(self, self._before)
        self._observe(self._tee)
        return self

    def _prepare(self) -> None:
        """Let what was queued before finish, since what it writes is not known, and compile what will be launched."""
        self.reads.muted = True
        self._observe(NULL_OBSERVER)
        try:
            if self.rt.backend == "triton":  # its compiler would make the host stand still in the middle of a step
                with torch.inference_mode(), self.rt.active():
                    self.reads.sums.prime()
            self.rt.synchronize()
        finally:
            self._observe(self._before)
            self.reads.muted = False

    def _observe(self, observer: Observer) -> None:
        if self._engine is not None:
            self._engine.observer = observer
        else:
            self.rt.observer = observer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None
        outer = self.rt.observer
        try:
            self.reads.look("the end of the watch")
            self.reads.muted = True
            self._observe(NULL_OBSERVER)  # what follows is nobody's step
            with torch.inference_mode(), self.rt.active():
                self.reads.sums.send()
            self.rt.synchronize()
            self.reads.look("the end of the watch")
        except RuntimeError:  # queued work had raised: whoever waits for it next is told, and what arrived is kept
            self.reads.dropped()
        finally:
            self._stack.close()
            self._observe(self._before if outer is self._tee else outer)

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def hazards(self) -> list[Hazard]:
        """Every read that the host interfered with, once each, in the order in which it was noticed."""
        return list(self.reads.found.hazards)

    @property
    def corrupted_steps(self) -> list[int]:
        """Steps in which the device read other bytes than the host had queued, ascending."""
        return sorted(self.reads.found.corrupted)

    @property
    def waits(self) -> pd.DataFrame:
        """The engine's waits by cause; see :func:`waits_by_cause`."""
        return waits_by_cause(self._waits)

    @property
    def wait_ns(self) -> int:
        """Nanoseconds that the host stood still for anything but the output, which every policy waits for."""
        return sum(mark.wait_ns for mark in self._waits if cause(mark) != "output")

    def report(self) -> pd.DataFrame:
        """One row a (step, buffer, kind) that had a hazard or a wrong read.

        Columns ``step``, ``buffer``, ``kind``, ``reads``, ``corrupted`` (reads whose checksum differs), ``hazards``,
        ``reader``, ``writer`` (the publish, or the two moments around the write, of the first hazard).
        """
        found = self.reads.found
        hazards: dict[tuple[int, str, str], list[Hazard]] = {}
        for hazard in found.hazards:
            hazards.setdefault((hazard.step, hazard.buffer, hazard.kind), []).append(hazard)
        rows = []
        for key in sorted(hazards.keys() | found.wrong_reads.keys()):
            first = hazards[key][0]
            writer = first.writer or "between {} and {}".format(*first.between or ("?", "?"))
            count, wrong = found.reads[key], found.wrong_reads.get(key, 0)
            rows.append((*key, count, wrong, len(hazards[key]), first.reader, writer))
        columns = "step buffer kind reads corrupted hazards reader writer".split()
        return pd.DataFrame(rows, columns=columns)

    # -- told by the tee -----------------------------------------------------------------------------------------------

    def _waited(self, mark: Mark) -> None:
        if not self.reads.muted:
            self._waits.append(mark)
            self.reads.look(f"{mark.kind} {mark.name}")

    def _begins(self, phase: str) -> None:
        self.reads.look(f"the beginning of {phase}")
        if phase == "update_states" and self._spin is not None:
            self.reads.muted = True
            try:
                self._spin.queue()
            finally:
                self.reads.muted = False

    def _ends(self, phase: str) -> None:
        self.reads.look(f"the end of {phase}")


class _Tee(Observer):
    """Tells the detector of phases and waits, and whoever observed before of everything."""

    enabled = True

    def __init__(self, races: RaceDetector, inner: Observer) -> None:
        self._races = races
        self._inner = inner
        self.call_sites = inner.call_sites

    def span(self, name: str) -> AbstractContextManager[None]:
        return _TeeSpan(self._races, name, self._inner.span(name))

    def mark(self, mark: Mark) -> None:
        if cause(mark) is not None:
            self._races._waited(mark)
        if self._inner.enabled:
            self._inner.mark(mark)

    def gauge(self, name: str, value: float) -> None:
        self._inner.gauge(name, value)


class _TeeSpan(AbstractContextManager[None]):
    def __init__(self, races: RaceDetector, name: str, inner: AbstractContextManager[None]) -> None:
        self._races, self._name, self._inner = races, name, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._races._begins(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._races._ends(self._name)
        self._inner.__exit__(kind, error, trace)
