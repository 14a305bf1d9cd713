"""Something to do before and after every ``engine.step()``, whoever calls it: ``run``, ``generate`` or a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.outputs import RequestOutput


class StepHook:
    """Stands for ``engine.step`` from :meth:`attach` to :meth:`detach`. Hooks may nest, last in first out.

    ``before(step)`` and ``after(step)`` get the scheduler's number of the step that the turn launches, -1 for a turn
    that only waits for what is in flight. What ``before`` raises comes out of ``engine.step()`` with nothing done;
    ``after`` is called also when the turn raised.
    """

    def __init__(self, engine: Engine, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        self._engine = engine
        self._before = before
        self._after = after
        self._inner: Callable[[], list[RequestOutput]] | None = None
        self._over = False

    def attach(self) -> None:
        """Raises ``RuntimeError`` while a paused step of the engine is open, and for an engine that was closed."""
        self._engine._refuse_if_closed()
        standing: Any = vars(self._engine).get("step")
        if standing is not None and not isinstance(getattr(standing, "__self__", None), StepHook):
            standing()  # a paused step: it says what to do
        self._inner = self._engine.step
        vars(self._engine)["step"] = self._step

    @property
    def attached(self) -> bool:
        """Whether ``engine.step()`` comes through here."""
        return bool(vars(self._engine).get("step") == self._step)

    def detach(self) -> None:
        """Leave the engine as it was. A hook that was put around this one stays, and this one does nothing more."""
        self._over = True
        if self.attached:
            inner = self._inner
            while isinstance(hook := getattr(inner, "__self__", None), StepHook) and hook._over:
                inner = hook._inner  # it was let go before the one around it
            if isinstance(hook, StepHook):
                vars(self._engine)["step"] = inner
            else:
                del vars(self._engine)["step"]

    def _step(self) -> list[RequestOutput]:
        assert self._inner is not None
        if self._over:
            return self._inner()
        engine = self._engine
        launches = engine.core.max_concurrent_steps == 1 or engine.scheduler.has_work()
        step = engine.scheduler.step if launches else -1
        self._before(step)
        try:
            return self._inner()
        finally:
            self._after(step)


def hooks(engine: Engine) -> Iterator[StepHook]:
    """The hooks on ``engine``, the outermost first."""
    standing = getattr(engine.step, "__self__", None)
    while isinstance(standing, StepHook):
        yield standing
        standing = getattr(standing._inner, "__self__", None)
