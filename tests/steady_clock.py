"""A host clock that a test moves: modelled times are the same on every machine, however busy it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mrv2lab.runtime import clock

READ_NS = 1_000
"""What a look at the clock costs: all that a host does takes no time, except looking."""


class SteadyClock:
    """Stands for module ``time`` in :mod:`mrv2lab.runtime.clock`."""

    def __init__(self) -> None:
        self._now_ns = 10**9

    def perf_counter_ns(self) -> int:
        """The next microsecond."""
        self.advance(READ_NS)
        return self._now_ns

    def advance(self, ns: int) -> None:
        """The host is busy for ``ns`` nanoseconds."""
        self._now_ns += ns


@contextmanager
def steady_clock() -> Iterator[SteadyClock]:
    """Every software stream's host time comes from one steady clock inside the ``with``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", made := SteadyClock())
        yield made
