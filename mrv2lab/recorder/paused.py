"""Step mode: one ``engine.step()``, phase by phase, with everything readable in between.

    for phase in paused_step(engine):
        print(phase, engine.rt.read(engine.worker.runner.req_states.total_len.gpu))

The step runs in a thread of its own, which stands still behind every phase; whoever asked runs only while it stands, so
no two threads ever touch the engine at once. The engine itself is unchanged and notices nothing but the time. Reading
synchronises: that is step mode, and the recording's steps say that they were ``paused``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.observer import Mark, Observer
from mrv2lab.recorder.listen import SETTLING, Listener
from mrv2lab.runtime.cpu import CpuRuntime


class StepCancelled(Exception):
    """Ends ``engine.step()`` where a paused step was given up; ``engine.reset()`` makes the engine usable again."""


class PausedStep:
    """One step of ``engine`` that stands behind each of its phases. Made between two steps; one at a time an engine.

    While it is open, ``engine.step()`` says so and raises; ``engine.reset()`` and ``engine.close()`` give it up first.
    Reading, ``submit`` and ``abort`` are allowed. A PausedStep that is forgotten gives the step up.
    Raises ``RuntimeError`` if another one is open.
    """

    def __init__(self, engine: Engine) -> None:
        if isinstance(getattr(engine.step, "__self__", None), _StepThread):
            engine.step()  # says what to do
        self._thread = thread = _StepThread(engine)
        self._told = 0
        thread.start()
        self._forgotten = weakref.finalize(self, thread.cancel)

    @property
    def engine(self) -> Engine:
        """Whose step this is."""
        return self._thread.engine

    @property
    def phase(self) -> str | None:
        """The phase behind which the step stands; None before the first and when the step is complete."""
        return None if self._thread.ended else self._thread.phase

    @property
    def step(self) -> int | None:
        """The scheduler's number of the step to which :attr:`phase` belongs.

        With asynchronous scheduling one ``engine.step()`` launches step N + 1 and settles step N: ``wait_output`` and
        ``update_from_output`` are phases of the earlier one.
        """
        return self._thread.step_of(self.phase)

    @property
    def open(self) -> bool:
        """Whether the step is not complete, and the engine still its."""
        return not self._thread.ended

    @property
    def outputs(self) -> list[RequestOutput]:
        """What ``engine.step()`` returned, once it is complete."""
        return self._thread.outputs

    def advance(self) -> str | None:
        """Run on to the end of the next phase and return its name; None when the step is complete.

        Raises whatever the step raises, as ``engine.step()`` would. An interrupt while this waits lets the phase end
        (it cannot be cut in two) and is raised then, and the next call returns that phase; a second one leaves at once.
        """
        thread = self._thread
        try:
            self._told = thread.run_on(self._told)
        except KeyboardInterrupt:
            thread.wait()
            raise
        if not thread.ended:
            return thread.phase
        self._let_go()
        error, thread.error = thread.error, None
        if error is not None:
            raise error
        return None

    def finish(self) -> list[RequestOutput]:
        """Run to the step's end; returns what ``engine.step()`` would have."""
        while self.advance() is not None:
            pass
        return self.outputs

    def cancel(self) -> None:
        """Give the step up where it stands. Unless it had not begun, ``engine.reset()`` is needed afterwards."""
        self._thread.give_up()
        self._let_go()

    def _let_go(self) -> None:
        self._forgotten.detach()
        self._thread.join()


def paused_step(engine: Engine) -> Iterator[str]:
    """The phases of one ``engine.step()``, with the engine standing still behind each.

    Leaving the loop early runs the step to its end. After an error in the loop's body, which may keep the loop alive
    in its traceback, ``engine.reset()`` gives the step up.
    """
    paused = PausedStep(engine)
    try:
        while (phase := paused.advance()) is not None:
            yield phase
    finally:
        if paused.open:
            paused.finish()


class _StepThread(threading.Thread):
    """Runs the step and stands still behind its phases.

    Knows nothing of the PausedStep, which can be collected therefore, and stands for ``engine.step``, ``reset`` and
    ``close`` as long as it runs.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="mrv2lab-paused-step", daemon=True)
        self.engine = engine
        self.phase: str | None = None
        self.stops = 0
        """Phases that have ended, and 1 for the step's end."""
        self.ended = False
        self.error: BaseException | None = None
        self.outputs: list[RequestOutput] = []
        self._oldest = engine.core.in_flight[0][0].step if engine.core.in_flight else None
        self._changed = threading.Condition()
        self._working = False
        self._cancelled = False
        self._observer = engine.observer
        if isinstance(self._observer, Listener):
            self._hook: Listener | _Phases = self._observer
        else:
            self._hook = engine.observer = _Phases(self._observer)
        self._hook.pause = self._stand
        self._instead: dict[str, Any] = {"step": self.refuse, "reset": self.reset, "close": self.close}
        vars(engine).update(self._instead)

    # -- the step's side -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The whole step."""
        engine = self.engine
        try:
            self._await_turn()
            with engine.rt.active():  # the current device and stream are each thread's own
                self.outputs = Engine.step(engine)
        except StepCancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._hook.pause = None
            if engine.observer is self._hook:
                engine.observer = self._observer
            for name in self._instead:
                vars(engine).pop(name, None)
            with self._changed:
                self.stops += 1
                self.ended, self._working = True, False
                self._changed.notify_all()

    def _stand(self, phase: str) -> None:
        """Where a phase has ended. Modelled time stands still meanwhile; a device's does not."""
        rt = self.engine.rt
        frozen = isinstance(rt, CpuRuntime) and rt.clock.freeze()
        try:
            with self._changed:
                self.phase = phase
                self.stops += 1
                self._working = False
                self._changed.notify_all()
                self._await_turn()
        finally:
            if frozen and isinstance(rt, CpuRuntime):
                rt.clock.thaw()

    def _await_turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._working or self._cancelled)
        if self._cancelled:
            raise StepCancelled(f"the paused step was given up behind {self.phase!r}")

    # -- the reader's side ---------------------------------------------------------------------------------------------

    def run_on(self, told: int) -> int:
        """Wait for the stop after number ``told``, letting the step run on if it stands there; returns its number."""
        with self._changed:
            if self.stops == told and not self.ended:
                self._working = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: not self._working)
            return self.stops

    def wait(self) -> None:
        """Until the step stands."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)

    def cancel(self) -> None:
        """Let the step end at its present or next stop, without waiting for that."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Cancel, and wait until the thread is gone."""
        self.cancel()
        self.join()

    def step_of(self, phase: str | None) -> int | None:
        """The scheduler's number of the step to which ``phase`` belongs."""
        launched = self.engine.core.last_schedule
        if phase is None or launched is None:
            return None
        return self._oldest if phase in SETTLING and self._oldest is not None else launched.step

    # -- in the engine's place -----------------------------------------------------------------------------------------

    def refuse(self) -> list[RequestOutput]:
        """Instead of ``engine.step``."""
        where = f"stands behind {self.phase!r}" if self.phase else "has not begun"
        raise RuntimeError(
            f"a paused step of this engine is open and {where}: run it to its end (finish() of the PausedStep, or the "
            "explorer's Next step), or give it up with engine.reset()"
        )

    def reset(self) -> None:
        """Instead of ``engine.reset``."""
        self.give_up()
        self.engine.reset()

    def close(self) -> None:
        """Instead of ``engine.close``."""
        self.give_up()
        self.engine.close()


class _Phases(Observer):
    """An engine's observer, and a stop behind every phase."""

    def __init__(self, inner: Observer) -> None:
        self.enabled = inner.enabled
        self.call_sites = inner.call_sites
        self.pause: Callable[[str], None] | None = None
        self._inner = inner
        self._depth = 0

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        self._depth += 1
        try:
            with self._inner.span(name):
                yield
        finally:
            self._depth -= 1
        if self.pause is not None and not self._depth:
            self.pause(name)

    def span(self, name: str) -> Any:
        """See :meth:`Observer.span`."""
        return self._span(name)

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        self._inner.mark(mark)

    def gauge(self, name: str, value: float) -> None:
        """See :meth:`Observer.gauge`."""
        self._inner.gauge(name, value)
