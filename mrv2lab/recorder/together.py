"""Several observers at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from mrv2lab.observer import Mark, Observer


class Together(Observer):
    """Tells every one of ``observers`` everything: spans open in their order and close the other way round."""

    def __init__(self, *observers: Observer) -> None:
        self.keep(*observers)

    def keep(self, *observers: Observer) -> None:
        """Tell these from now on."""
        self._observers = observers
        self._enabled = tuple(one for one in observers if one.enabled)
        self.enabled = bool(self._enabled)
        self.call_sites = any(one.call_sites for one in self._enabled)

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return Ranges([one.span(name) for one in self._observers])

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        for one in self._enabled:
            one.mark(mark)

    def launch(self, describe: Callable[[], Mark]) -> None:
        """See :meth:`Observer.launch`. The launch is described once, by whoever is the first to ask."""
        once = _Once(describe)
        for one in self._enabled:
            one.launch(once)

    def gauge(self, name: str, value: float) -> None:
        """See :meth:`Observer.gauge`."""
        for one in self._observers:
            one.gauge(name, value)


class _Once:
    """Makes a mark once."""

    __slots__ = ("_describe", "_mark")

    def __init__(self, describe: Callable[[], Mark]) -> None:
        self._describe: Callable[[], Mark] | None = describe
        self._mark: Mark | None = None

    def __call__(self) -> Mark:
        describe = self._describe
        if self._mark is None and describe is not None:
            self._mark = describe()
            self._describe = None  # it keeps the launch's arguments alive
        assert self._mark is not None
        return self._mark


class Ranges(AbstractContextManager[None]):
    """Several ranges as one: opened in order, closed the other way round."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: list[AbstractContextManager[None]]) -> None:
        self._ranges = ranges

    def __enter__(self) -> None:
        for one in self._ranges:
            one.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in reversed(self._ranges):
            one.__exit__(kind, error, trace)
