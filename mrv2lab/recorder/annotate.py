"""Steps and phases as named ranges for somebody else's profiler: ``torch.profiler`` and, through NVTX, Nsight Systems.

Names are ``mrv2lab.step#N`` (N is the scheduler's number of the step that a turn launches; a turn that launches none is
``mrv2lab.turn``) and ``mrv2lab.phase.NAME``, sub-phases ``NAME/DETAIL``. Within the step, from behind its schedule to
the settling of a step (under asynchronous scheduling the one before), lies
``mrv2lab.execute#N_context_REQUESTS(TOKENS)_generation_REQUESTS(TOKENS)``: what is being executed, as vLLM says it
(``v1/worker/gpu_worker.py``, annotate_profile). A range for ``torch.profiler`` takes the host about 6 us, whether it is
profiling or not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import NULL_OBSERVER, Mark, Observer
from mrv2lab.recorder.batch import batch_of
from mrv2lab.recorder.listen import SETTLING
from mrv2lab.recorder.step_hook import StepHook
from mrv2lab.recorder.together import Ranges
from mrv2lab.trace.annotations import batch_range

STEP = "mrv2lab.step#"
TURN = "mrv2lab.turn"
PHASE = "mrv2lab.phase."

Opener = Callable[[str], AbstractContextManager[Any]]


def nvtx_range() -> Opener | None:
    """What opens an NVTX range: of the package ``nvtx``, else of a CUDA build of torch; None without either."""
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        pass
    else:
        return lambda name: nvtx.annotate(name, domain="mrv2lab")
    try:
        torch.cuda.nvtx.range_push("mrv2lab")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:  # a CPU build
        return None
    return torch.cuda.nvtx.range


class Annotator(Observer):
    """Opens a range of every kind in ``openers`` around each turn of ``engine``, around what the runner does in it, and
    around each span; passes everything on to ``inner``."""

    def __init__(self, engine: Engine, openers: tuple[Opener, ...], inner: Observer = NULL_OBSERVER) -> None:
        self._engine = engine
        self.inner = inner
        self.enabled, self.call_sites = inner.enabled, inner.call_sites  # ranges need no chokepoint
        self._openers = openers
        self.over = False
        """Whoever has kept it as another's observer may take ``inner`` in its place."""
        self._step: Ranges | None = None
        self._batch: Ranges | None = None
        self._scheduling = False
        """The turn's schedule is being made, or was and has no range yet."""

    def begin_turn(self, step: int) -> None:
        """Open the step's range; -1: the turn launches none."""
        self._scheduling = False
        self._step = self._open(f"{STEP}{step}" if step >= 0 else TURN)

    def end_turn(self) -> None:
        """Close it, and the batch's within."""
        self._end_batch()
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _open(self, name: str) -> Ranges:
        ranges = Ranges([opener(name) for opener in self._openers])
        ranges.__enter__()
        return ranges

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.__exit__(None, None, None)

    def _follow(self, phase: str) -> None:
        """Begin and end the batch's range by the phase that is about to begin: the first one behind the schedule, which
        ``engine.core`` has by then, and the first that settles a step."""
        if phase == "schedule":
            self._scheduling = self._step is not None
        elif phase in SETTLING:
            self._scheduling = False
            self._end_batch()
        elif self._scheduling:
            self._scheduling = False
            schedule = self._engine.core.last_schedule
            if schedule is not None:
                self._batch = self._open(batch_range(schedule.step, batch_of(schedule)))

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        self._follow(name)  # here, not as the span begins: what others time in the phase holds nothing of it
        return Ranges([*[opener(f"{PHASE}{name}") for opener in self._openers], self.inner.span(name)])

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        self.inner.mark(mark)

    def launch(self, describe: Callable[[], Mark]) -> None:
        """See :meth:`Observer.launch`."""
        self.inner.launch(describe)

    def gauge(self, name: str, value: float) -> None:
        """See :meth:`Observer.gauge`."""
        self.inner.gauge(name, value)


@contextmanager
def annotate(engine: Engine, *, profiler: bool = True, nvtx: bool | None = None) -> Iterator[Annotator]:
    """Name the engine's steps and phases for a profiler of your own, ``torch.profiler`` or ``nsys``; for a recorded
    trace of this engine :func:`mrv2lab.recorder.profile.profile` does everything.

    ``profiler``: ranges for ``torch.profiler``. ``nvtx``: for Nsight; None = where NVTX is there. The observer that the
    engine has goes on listening, and the engine is left as it was.

    Raises ``RuntimeError`` where ``nvtx=True`` and there is none, and while a paused step of the engine is open.
    """
    opened = nvtx_range() if nvtx is not False else None
    if nvtx and opened is None:
        raise RuntimeError("there is no NVTX here: pip install nvtx, or install a CUDA build of PyTorch")
    openers: tuple[Opener, ...] = (torch.profiler.record_function,) if profiler else ()
    annotator = Annotator(engine, openers + ((opened,) if opened is not None else ()), engine.observer)
    hook = StepHook(engine, annotator.begin_turn, lambda step: annotator.end_turn())
    hook.attach()
    engine.observer = annotator
    try:
        yield annotator
    finally:
        annotator.over, annotator._openers = True, ()
        if engine.observer is annotator:
            engine.observer = annotator.inner
        hook.detach()
