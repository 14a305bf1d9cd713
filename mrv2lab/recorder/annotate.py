"""Steps and phases as named ranges for somebody else's profiler: ``torch.profiler`` and, through NVTX, Nsight Systems.

Names are ``mrv2lab.step#N`` (N is the scheduler's number of the step that a turn launches; a turn that launches none is
``mrv2lab.turn``) and ``mrv2lab.phase.NAME``, sub-phases ``NAME/DETAIL``. A range for ``torch.profiler`` takes the host
about 6 us, whether it is profiling or not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import NULL_OBSERVER, Mark, Observer
from mrv2lab.recorder.step_hook import StepHook
from mrv2lab.recorder.together import Ranges

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
    """Opens a range of every kind in ``openers`` around each span, and passes everything on to ``inner``."""

    def __init__(self, openers: tuple[Opener, ...], inner: Observer = NULL_OBSERVER) -> None:
        self.inner = inner
        self.enabled, self.call_sites = inner.enabled, inner.call_sites  # ranges need no chokepoint
        self._openers = openers
        self.over = False
        """Whoever has kept it as another's observer may take ``inner`` in its place."""
        self._step: Ranges | None = None

    def begin_turn(self, step: int) -> None:
        """Open the step's range; -1: the turn launches none."""
        name = f"{STEP}{step}" if step >= 0 else TURN
        self._step = Ranges([opener(name) for opener in self._openers])
        self._step.__enter__()

    def end_turn(self) -> None:
        """Close it."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
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
    annotator = Annotator(openers + ((opened,) if opened is not None else ()), engine.observer)
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
