"""A live engine as a step source: it is recorded while it runs, and can be stopped between two phases.

What was run at speed is shown from the recording (asynchronous truth, no wait added); a step that stands still is read
from the device, and its picture says so. All sources of one engine share one recorder and one paused step.
"""

from __future__ import annotations

import weakref

from mrv2lab.engine.engine import Engine
from mrv2lab.recorder.listen import Listener
from mrv2lab.recorder.paused import PausedStep
from mrv2lab.recorder.readback import SYNCHRONISED, Readback
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.replay import Replay
from mrv2lab.recording.view import StepView, step_view

NOTHING_TO_DO = 'nothing to do: submit a request first, engine.submit("...")'
ENDED = "the recording that is shown here has ended; open a new explorer on the engine to go on"
RESET = "engine.reset() drops the unfinished requests and makes the engine usable again"


class LiveSource:
    """A :class:`StepSource` on ``engine``: its steps since the first source was opened, whoever made them.

    Attaches a recorder in memory, or uses the one that is attached. ``top_k``: logits kept a row, if the recorder is
    this one's. Every settled step stays in memory until :meth:`close` (some 40 KB at 32 requests), so for long runs
    record to a file. Raises ``RuntimeError`` if the engine is being recorded to a file or was closed.
    """

    live = True

    def __init__(self, engine: Engine, *, top_k: int = 8, title: str = "live engine") -> None:
        self.title = title
        self._shared: _Shared | None = _Shared.of(engine, min(top_k, engine.config.model.vocab_size))
        self._shared.users += 1

    def _open(self) -> _Shared:
        if self._shared is None:
            raise RuntimeError("this source was closed; open a new explorer on the engine")
        return self._shared

    def __len__(self) -> int:
        """Settled steps, and the one that stands still."""
        return len(self._open())

    @property
    def recording(self) -> Recording:
        """The settled steps; grows."""
        return self._open().recording

    def view(self, index: int) -> StepView:
        """See :meth:`StepSource.view`. Looking at a settled step asks nothing of the device."""
        return self._open().view(index, self.title)

    def advance(self, unit: str) -> str | None:
        """Run on to the next settled ``"step"`` (a paused one to its end), or to the end of the next ``"phase"``.

        A sentence instead of an exception, an interrupt included. Raises ``ValueError`` for another unit.
        """
        if unit not in ("step", "phase"):
            raise ValueError(f"unit must be 'step' or 'phase', got {unit!r}")
        shared = self._open()
        try:
            return shared.step() if unit == "step" else shared.next_phase()
        except (Exception, KeyboardInterrupt) as error:
            return _sentence(error, shared.engine)

    def close(self) -> None:
        """Give the recorder back; the last source of an engine runs a paused step to its end first. Twice is fine."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave()


class _OwnRecorder(Recorder):
    """Attached by a live source; the engine's last one takes it away."""


class _Shared:
    """One engine's recorder and paused step, for every source that looks at it."""

    def __init__(self, engine: Engine, recorder: Recorder, listener: Listener, top_k: int) -> None:
        self.engine = engine
        self.users = 0
        self._recorder = recorder
        self._listener = listener
        self._top_k = top_k
        self._replay: Replay | None = None
        self._paused: PausedStep | None = None
        self._readbacks: list[Readback] = []
        """Steps that were launched phase by phase and are not settled."""

    @classmethod
    def of(cls, engine: Engine, top_k: int) -> _Shared:
        """The engine's, or a new one."""
        engine._refuse_if_closed()
        if not isinstance(engine.observer, Listener):
            _OwnRecorder(engine, top_k=top_k).__enter__()
        listener = engine.observer
        assert isinstance(listener, Listener)
        shared: _Shared | None = listener.live() if listener.live is not None else None
        if shared is None:
            recorder = listener.recorder
            if recorder.path is not None:
                raise RuntimeError(
                    f"this engine is being recorded to {recorder.path}, so its steps are not in memory: leave that "
                    "Recorder first, or open the file"
                )
            shared = cls(engine, recorder, listener, top_k)
            # Weak: a step that stands is kept by its thread, and the thread keeps the engine and its observer. What is
            # forgotten without close() must not be kept by these, or the thread would stand for ever.
            listener.live = weakref.ref(shared)
        return shared

    def leave(self) -> None:
        """One user less; the last one turns off the light."""
        self.users -= 1
        if self.users:
            return
        try:
            if self._paused is not None and self._is_paused():
                self._paused.finish()
        except Exception:  # it is the engine's, which says so at its next step
            pass
        finally:
            if self._paused is not None:
                self._paused.cancel()  # no-op unless an interrupt kept it from its end
            self._listener.live = None
            if isinstance(self._recorder, _OwnRecorder) and self._recorder.listener is not None:
                self._recorder.__exit__(None, None, None)

    @property
    def recording(self) -> Recording:
        """What the recorder has; see :attr:`LiveSource.recording`."""
        return self._recorder.recording

    def _is_paused(self) -> bool:
        return self._paused is not None and self._paused.open

    # -- looking -------------------------------------------------------------------------------------------------------

    def _unsettled(self) -> list[Readback]:
        launched, core = self._listener.open, self.engine.core
        self._readbacks = [r for r in self._readbacks if r.core is core and r.raw in launched]
        return self._readbacks

    def __len__(self) -> int:
        return self._recorder.num_settled + len(self._unsettled())

    def view(self, index: int, title: str) -> StepView:
        """The step at ``index``; see :meth:`LiveSource.view`."""
        recording, unsettled = self._recorder.recording, self._unsettled()
        settled, count = len(recording), len(recording) + len(unsettled)
        if not 0 <= index < count:
            raise IndexError(f"step {index} is outside 0..{count - 1} of {title}")
        paused = self._paused.phase if self._paused is not None and index == count - 1 else None
        if index >= settled:
            return unsettled[index - settled].view(index, count, title, recording.texts, paused)
        if self._replay is None:
            self._replay = Replay(recording)
        view = step_view(self._replay, index, title=title, live=True, count=count, paused_after=paused)
        if recording[index].paused:
            view.meta["notes"].append(SYNCHRONISED)
        return view

    # -- running -------------------------------------------------------------------------------------------------------

    def _why_not(self) -> str | None:
        """A sentence if nothing can be run."""
        if self._recorder.listener is None:
            return ENDED
        # A step that broke off, or an engine that was closed, is for engine.step() to say.
        broken = self.engine._broken or self.engine._closed
        return None if broken or self.engine.has_work() else NOTHING_TO_DO

    def step(self) -> str | None:
        """To the end of the paused step, else until there is one more."""
        if self._is_paused():
            while self._is_paused():
                self.next_phase()
            return None
        why_not, known = self._why_not(), len(self)
        while why_not is None:
            self.engine.step()
            # Asynchronous scheduling fills its queue first, and only then settles.
            if len(self) > known or not self.engine.has_work():
                return None
        return why_not

    def next_phase(self) -> str | None:
        """One phase; a step that launches nothing is run as a whole, since nothing in it could be seen."""
        if self._paused is None or not self._is_paused():
            why_not = self._why_not()
            if why_not is not None:
                return why_not
            self._paused = PausedStep(self.engine)
        phase = self._paused.advance()
        if phase == "schedule":
            self._readbacks.append(Readback(self._recorder, self._listener.open[-1], self._top_k))
        elif phase is not None and self._unsettled():
            try:
                self._readbacks[-1].take(phase)
            except BaseException:  # the next reading would take this phase's writes for its own
                self._readbacks.pop()
                raise
        elif phase is not None and phase != "update_from_output":
            self._paused.finish()
        return None


def _sentence(error: BaseException, engine: Engine) -> str:
    """What went wrong and what helps."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted in the middle of a step; {RESET}" if engine._broken else "interrupted; go on when you like"
    text = " ".join(str(error).split())
    if not isinstance(error, RuntimeError):
        text = f"{type(error).__name__}: {text}"
    helps = engine._broken and not engine._closed and "engine.reset()" not in text
    return f"{text}; {RESET}" if helps else text
