"""Every span and chokepoint of an engine's turns with its time: what a profile keeps beside the profiler's own events.

For both runners, unlike a recording. Nothing is waited for and nothing is read from the device. A turn is one
``engine.step()``: with asynchronous scheduling it launches one step and then waits for the step before, and a turn that
only waits is no step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from mrv2lab.observer import WAITS, Mark, Observer
from mrv2lab.protocol import SchedulerOutput
from mrv2lab.recorder.listen import LAUNCHES
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.stamps import Stamps


class LoggedSpan(NamedTuple):
    """A phase or sub-phase; times are nanoseconds of the runtime's clock."""

    name: str
    start_ns: int
    end_ns: int
    depth: int
    turn: int
    """Position in :attr:`HostLog.turns`; -1: outside every turn."""


class LoggedMark(NamedTuple):
    """One pass through a chokepoint: the mark, and where and when it was."""

    mark: Mark
    time_ns: int
    """The runtime's clock at the end of the call."""
    phase: str
    """Innermost span around it; empty: none."""
    step: int
    """The step that the turn launched, as in the trace's ``mrv2lab.step#N``; -1: none."""
    turn: int
    """Position in :attr:`HostLog.turns`; -1: outside every turn."""
    device_start_ns: int = -1
    device_end_ns: int = -1
    """Modelled device time of a launch or copy on a software stream; -1: not known here."""

    @property
    def kind(self) -> str:
        """One of ``observer.MARKS``."""
        return self.mark.kind

    @property
    def name(self) -> str:
        """Of the op, buffer, event or stream."""
        return self.mark.name

    @property
    def nbytes(self) -> int:
        """Bytes moved or touched."""
        return self.mark.nbytes

    @property
    def wait_ns(self) -> int:
        """The host's time in a call that could block."""
        return self.mark.wait_ns

    @property
    def site(self) -> str | None:
        """``file:line`` of the caller."""
        return self.mark.site


@dataclass(slots=True)
class Turn:
    """One ``engine.step()``."""

    step: int
    """The scheduler's number of the step that it launches; -1: it launches none."""
    start_ns: int
    end_ns: int = -1
    """-1: still going on."""
    schedule: SchedulerOutput | None = None
    """What it scheduled, if it did."""


class HostLog(Observer):
    """Keeps what it is told. ``stamps`` None: no device times.

    ``begin_turn`` and ``end_turn`` are called around each ``engine.step()``. Launches are described between turns
    (some microseconds each the first time, then less than one), so that no phase pays for it.
    """

    enabled = True
    call_sites = True

    def __init__(self, rt: Runtime, stamps: Stamps | None = None) -> None:
        self.turns: list[Turn] = []
        self.spans: list[LoggedSpan] = []
        """In the order of their ends."""
        self._rt = rt
        self._now = rt.now
        self._stamps = stamps
        self._marks: list[tuple[Mark | Callable[[], Mark], int, str, int, int]] = []
        """(mark, time, phase, turn, stamp or -1)"""
        self._described = 0
        self._turn = -1
        self._phase = ""
        self._depth = 0

    # -- turns ---------------------------------------------------------------------------------------------------------

    def begin_turn(self, step: int) -> None:
        """A turn begins."""
        self._depth, self._phase = 0, ""  # an interrupt may have cut a span short
        self._turn = len(self.turns)
        self.turns.append(Turn(step, self._now()))

    def end_turn(self, schedule: SchedulerOutput | None) -> None:
        """The turn ends, or broke off; ``schedule`` is what it scheduled."""
        turn = self.turns[self._turn]
        turn.end_ns, turn.schedule = self._now(), schedule
        self._turn = -1
        self._describe()
        if self._stamps is not None:
            self._stamps.anchor()

    @property
    def heard_last_turn(self) -> bool:
        """False where the latest turn scheduled something and no span of it came here."""
        heard = bool(self.spans) and self.spans[-1].turn == len(self.turns) - 1
        return heard or not self.turns or self.turns[-1].schedule is None

    def _describe(self) -> None:
        marks = self._marks
        for i in range(self._described, len(marks)):
            mark, *rest = marks[i]
            if not isinstance(mark, Mark):
                marks[i] = (mark(), *rest)  # type: ignore[assignment]
        self._described = len(marks)

    # -- the three verbs -----------------------------------------------------------------------------------------------

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return _Span(self, name)

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        self._note(mark, mark.kind in LAUNCHES)

    def launch(self, describe: Callable[[], Mark]) -> None:
        """See :meth:`Observer.launch`."""
        self._note(describe, True)

    def _note(self, mark: Mark | Callable[[], Mark], launched: bool) -> None:
        time = self._now()  # before the stamp, which the device may pass at once
        stamp = self._stamps.take(self._rt.current) if launched and self._stamps is not None else -1
        self._marks.append((mark, time, self._phase, self._turn, stamp))

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def marks(self) -> list[LoggedMark]:
        """Every chokepoint so far, in order."""
        self._describe()
        ends = starts = None
        if self._stamps is not None:
            ends, starts = self._stamps.ends_ns().tolist(), self._stamps.starts_ns()
        found = []
        for mark, time, phase, turn, stamp in self._marks:
            assert isinstance(mark, Mark)
            step = self.turns[turn].step if turn >= 0 else -1
            known = ends is not None and starts is not None and stamp >= 0 and ends[stamp] >= 0
            times = (int(starts[stamp]), ends[stamp]) if known else (-1, -1)  # type: ignore[index]
            found.append(LoggedMark(mark, time, phase, step, turn, *times))
        return found

    @property
    def waits(self) -> list[LoggedMark]:
        """The chokepoints at which the host stood still or could have."""
        return [mark for mark in self.marks if mark.kind in WAITS]


class _Span(AbstractContextManager[None]):
    """A span that is open."""

    __slots__ = ("_log", "_name", "_outer", "_start")

    def __init__(self, log: HostLog, name: str) -> None:
        self._log = log
        self._name = name
        self._outer = ""
        self._start = 0

    def __enter__(self) -> None:
        log = self._log
        self._outer, log._phase = log._phase, self._name
        log._depth += 1
        self._start = log._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        log = self._log
        end = log._now()
        log._depth -= 1
        log._phase = self._outer
        log.spans.append(LoggedSpan(self._name, self._start, end, log._depth, log._turn))
