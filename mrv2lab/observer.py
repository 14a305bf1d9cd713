"""What a step says about itself: three verbs (span, mark, gauge) and the words both runners share.

The null :class:`Observer` costs an attribute load and, for a span, an empty ``with``. A recorder subclasses it and
sets ``enabled``; the chokepoints of ``runtime/`` then hand it every launch, copy and wait without any synchronisation.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PHASES: tuple[str, ...] = (
    "schedule",
    "barrier_wait",
    "update_states",
    "apply_writes",
    "dispatch",
    "prepare_inputs",
    "gather",
    "prepare_attn",
    "forward",
    "logits",
    "sample",
    "copy_output",
    "postprocess",
    "propose",
    "wait_output",
    "update_from_output",
)
"""The phases of a step. Order may differ by runner; matching is by name."""

MARKS: tuple[str, ...] = (
    "kernel",
    "run",
    "h2d",
    "d2h",
    "publish",
    "replay",
    "record",
    "wait_event",
    "synchronize",
    "implicit_sync",
    "queue_full",
)
"""Kinds of mark, one a chokepoint of the runtime and two for what the host did not ask for."""

WAITS: frozenset[str] = frozenset({"synchronize", "implicit_sync", "queue_full"})
"""Marks at which the host stood still."""


class Mark(NamedTuple):
    """One pass through a chokepoint.

    A named tuple, since one is made at every launch and a frozen dataclass costs three times as much.
    ``nbytes`` counts the bytes moved (copies, publishes) or touched (kernels, runs: every tensor argument once).
    ``reads`` and ``writes`` are buffer names. ``wait_ns`` is the host's time in the call where it could block.
    ``site`` is ``file:line`` of the caller outside the runtime, or None where nobody asked for call sites.
    """

    kind: str
    name: str
    stream: str = ""
    nbytes: int = 0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    wait_ns: int = 0
    site: str | None = None


class _NullSpan:
    """A ``with`` that does nothing, shared by every null span."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NULL_SPAN = _NullSpan()


class Observer:
    """The null observer: looks at nothing and changes nothing."""

    enabled: bool = False
    """Chokepoints build a :class:`Mark` only where this is true."""
    call_sites: bool = False
    """Whether marks should carry the caller's ``file:line`` (about 1 us each)."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """A stretch of host time with a name from :data:`PHASES`, or a sub-span ``phase/detail``."""
        return _NULL_SPAN

    def mark(self, mark: Mark) -> None:
        """One pass through a chokepoint."""

    def launch(self, describe: Callable[[], Mark]) -> None:
        """A launch on the current stream. ``describe`` makes its mark, now or soon: naming nine buffers costs as much
        as everything else. Until it is called it keeps the launch's arguments alive."""
        self.mark(describe())

    def gauge(self, name: str, value: float) -> None:
        """A number that belongs to the current step."""


NULL_OBSERVER = Observer()


@dataclass(slots=True)
class Span:
    """A closed stretch of host time, in nanoseconds of ``time.perf_counter_ns``."""

    name: str
    start_ns: int
    end_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """Length of the span in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass
class EventLog(Observer):
    """The simplest observer that keeps what it is told, in order. For tests, ``bench`` and a first look."""

    call_sites: bool = False
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    gauges: list[tuple[str, float]] = field(default_factory=list)
    enabled: bool = True

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        span = Span(name, time.perf_counter_ns())
        try:
            yield
        finally:
            span.end_ns = time.perf_counter_ns()
            self.spans.append(span)

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return self._timed(name)

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        self.marks.append(mark)

    def gauge(self, name: str, value: float) -> None:
        """See :meth:`Observer.gauge`."""
        self.gauges.append((name, value))

    def waits(self) -> list[Mark]:
        """The marks at which the host stood still."""
        return [mark for mark in self.marks if mark.kind in WAITS]

    def clear(self) -> None:
        """Forget everything seen so far."""
        self.spans.clear()
        self.marks.clear()
        self.gauges.clear()
