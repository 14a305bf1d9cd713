"""The observer that a recorder attaches: it keeps what it is told and what it may look at, and interprets nothing.

This is the hot path: a few list appends a launch. Host objects of the engine are looked at where a phase begins or
ends; device memory is never read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.memory import StagedDiff
from mrv2lab.observer import Mark, Observer
from mrv2lab.protocol import SchedulerOutput
from mrv2lab.recorder.probes import Probes
from mrv2lab.recording.schema import Publish
from mrv2lab.runtime.stamps import Stamps
from mrv2lab.state.input_batch import HostBatch

if TYPE_CHECKING:
    from mrv2lab.engine.engine import Engine

LAUNCHES = frozenset({"kernel", "run", "h2d", "d2h", "replay"})
"""Marks that put work into a stream."""
SETTLING = frozenset({"wait_output", "update_from_output"})
"""Phases of the step that is settled, not of the one that was launched last."""
QUIET = SETTLING | {"schedule"}
"""Phases that put no work into a stream."""


class RawStep:
    """One step as it was seen; ``steps.step_record`` makes the record of it."""

    __slots__ = (
        "batch",
        "decisions",
        "diffs",
        "finish_reasons",
        "gauges",
        "keyframe",
        "marks",
        "new",
        "number",
        "owners",
        "paused",
        "publishes",
        "removed",
        "sampled",
        "schedule",
        "spans",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        """Position in the recording."""
        self.schedule: SchedulerOutput | None = None
        self.decisions: list[tuple[str, str, int, int]] = []
        self.gauges: dict[str, float] = {}
        self.removed: list[tuple[str, int]] = []
        self.new: list[tuple[Any, int]] = []
        """(RequestData, row)"""
        self.diffs: dict[str, list[StagedDiff]] = {}
        self.publishes: list[Publish] = []
        self.batch: HostBatch | None = None
        self.sampled: list[list[int]] | None = None
        self.finish_reasons: dict[str, str] = {}
        self.spans: list[tuple[str, int, int, int, int]] = []
        """(name, start, end, depth, stamp or -1)"""
        self.marks: list[tuple[Mark | Callable[[], Mark], int, str, int, bool]] = []
        """(mark, time, phase, stamp or -1, whether the recorder added it)"""
        self.keyframe: dict[str, np.ndarray[Any, Any]] | None = None
        self.owners: dict[str, int] = {}
        self.paused = False


def described(step: RawStep) -> list[tuple[Mark, int, str, int, bool]]:
    """The marks of ``step``, each launch described. Costs a few microseconds a launch the first time."""
    marks = [
        (one if isinstance(one, Mark) else one(), time, phase, stamp, added)
        for one, time, phase, stamp, added in step.marks
    ]
    step.marks[: len(marks)] = marks  # in place: a reader's mark may just be appended
    return marks


class _Span(AbstractContextManager[None]):
    """A phase or sub-span that is open."""

    __slots__ = ("depth", "listener", "name", "outer", "start", "step")

    def __init__(self, listener: Listener, name: str) -> None:
        self.listener = listener
        self.name = name
        self.depth = self.start = 0
        self.outer: tuple[str, RawStep | None] = ("", None)
        """Phase and step around it."""
        self.step: RawStep | None = None
        """Whose span it is."""

    def __enter__(self) -> None:
        self.listener.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.listener.leave(self, broken=kind is not None)


class Listener(Observer):
    """See the module's docstring. ``device_times`` says what is stamped: ``launches``, ``phases`` or ``none``."""

    enabled = True

    def __init__(
        self,
        engine: Engine,
        stamps: Stamps,
        probes: Probes,
        keyframe: Callable[[RawStep], None],
        settled: Callable[[RawStep], None],
        *,
        call_sites: bool,
        device_times: str,
    ) -> None:
        self.call_sites = call_sites
        self.pause: Callable[[str], None] | None = None
        """Step mode: called where a phase has ended, and returns when the engine may go on."""
        self.recorder: Any = None
        """Whose listener this is."""
        self.live: Any = None
        """A weak reference to what the engine's live sources share (``recorder.live``)."""
        self._engine = engine
        self._rt = engine.rt
        self._now = engine.rt.now
        self._stamps = stamps
        self._probes = probes
        self._keyframe = keyframe
        self._settled = settled
        self._stamp_launches = device_times == "launches"
        self._stamp_phases = device_times != "none"
        self._core = engine.core
        self._foreign = len(engine.core.in_flight)
        """Steps that were launched before the recording and are settled in it."""
        self.open: deque[RawStep] = deque()
        """Steps that were launched and not settled."""
        self._step: RawStep | None = None
        self._phase = ""
        self._depth = 0
        self._number = 0
        self._new_story = True
        self._owners: dict[str, int] = {}
        self._published: dict[str, np.ndarray[Any, Any]] = {}

    # -- the three verbs -----------------------------------------------------------------------------------------------

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return _Span(self, name)

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        step = self._step
        if step is None:
            return
        time = self._now()
        stamp = self._stamps.take(self._rt.current) if self._stamp_launches and mark.kind in LAUNCHES else -1
        step.marks.append((mark, time, self._phase, stamp, self._probes.busy))

    def launch(self, describe: Callable[[], Mark]) -> None:
        """See :meth:`Observer.launch`. It is described off the hot path, by :func:`described`."""
        step = self._step
        if step is not None:
            time = self._now()  # before the stamp, which the device may pass at once
            stamp = self._stamps.take(self._rt.current) if self._stamp_launches else -1
            step.marks.append((describe, time, self._phase, stamp, self._probes.busy))

    def gauge(self, name: str, value: float) -> None:
        """See :meth:`Observer.gauge`."""
        if self._step is not None:
            self._step.gauges[name] = value

    # -- spans ---------------------------------------------------------------------------------------------------------

    def enter(self, span: _Span) -> None:
        """A phase begins."""
        if span.name == "schedule":
            self._depth = 0  # an interrupt may have come between a span's beginning and its `with`
        span.outer = self._phase, self._step
        span.depth = self._depth
        if not span.depth:
            if span.name == "schedule":
                self._begin()
            elif span.name in SETTLING:
                self._step = self.open[0] if self.open and not self._foreign else None
        self._phase = span.name
        self._depth += 1
        span.step = self._step
        span.start = self._now()

    def leave(self, span: _Span, broken: bool) -> None:
        """A phase ends, or breaks off."""
        end = self._now()
        self._depth = span.depth
        step = span.step
        if step is not None:
            stamped = self._stamp_phases and not span.depth and span.name not in QUIET
            stamp = self._stamps.take(self._rt.main) if stamped else -1
            step.spans.append((span.name, span.start, end, span.depth, stamp))
        if not broken and not span.depth:
            self._look(span.name, step)
        self._phase = span.outer[0]
        if span.name in SETTLING:
            self._step = span.outer[1]
        if self.pause is not None and not span.depth and not broken:
            if step is not None:
                step.paused = True
            self._probes.busy = True  # what a reader asks for now is not the engine's doing
            try:
                self.pause(span.name)
            finally:
                self._probes.busy = False

    def _look(self, phase: str, step: RawStep | None) -> None:
        """What the host knows at the end of a phase."""
        if phase == "update_from_output":
            self._settle(step)
        elif step is None:
            pass
        elif phase == "schedule":
            self._look_at_schedule(step)
        elif phase == "update_states":
            self._look_at_writes(step)
        elif phase == "prepare_inputs":
            batch = self._engine.worker.runner.batch
            step.batch = batch.host if batch is not None else None
        elif phase == "logits":
            self._probes.after_logits(step.number)
        elif phase == "sample":
            self._probes.before_output(step.number)
        elif phase == "postprocess":
            self._probes.after_step(step.number)
            self._stamps.anchor()

    # -- looking -------------------------------------------------------------------------------------------------------

    def notice_reset(self) -> None:
        """Forget what was in flight if ``engine.reset()`` was called since the last step."""
        if self._engine.core is self._core:
            return
        self._core = self._engine.core
        self._foreign = 0
        self._number -= len(self.open)  # they will never be settled
        self.open.clear()
        self._probes.drop(self._number)
        self._new_story = True

    def _begin(self) -> None:
        """A new step; a keyframe first where the story does not follow from the steps before."""
        self.notice_reset()
        step, self._step = RawStep(self._number), None
        if self._new_story:
            self._new_story = False
            runner = self._engine.worker.runner
            self._owners = dict(runner.req_states.req_id_to_index)
            step.owners = dict(self._owners)
            self._keyframe(step)
            assert step.keyframe is not None
            # The device's, not the host's: after a reset it may lack what the host has written.
            self._published = {name: step.keyframe[name].copy() for name in runner.host_tables()}
        self._number += 1
        self._step = step
        self.open.append(step)

    def _look_at_schedule(self, step: RawStep) -> None:
        scheduler = self._engine.scheduler
        step.schedule = self._engine.core.last_schedule
        step.decisions = scheduler.decisions  # type: ignore[assignment]
        step.gauges |= {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": scheduler.kv.pool.num_free,
            "in_flight": len(self._engine.core.in_flight),
            "queued_ahead": len(self.open) - 1,
        }

    def _look_at_writes(self, step: RawStep) -> None:
        """What is staged and waits for ``apply_writes``."""
        if step.schedule is None:
            return
        runner, schedule = self._engine.worker.runner, step.schedule
        for req_id in sorted(schedule.finished | schedule.preempted):
            row = self._owners.pop(req_id, None)
            if row is not None:
                step.removed.append((req_id, row))
        for request in (*schedule.new, *schedule.resumed):
            row = runner.req_states.req_id_to_index[request.req_id]
            self._owners[request.req_id] = row
            step.new.append((request, row))
        step.diffs = runner.staged()
        for name, table in runner.host_tables().items():
            index = np.flatnonzero(table != self._published[name])
            if len(index):
                values = table.reshape(-1)[index]
                self._published[name].reshape(-1)[index] = values
                step.publishes.append(Publish(name, index, values))

    def _settle(self, step: RawStep | None) -> None:
        if self._foreign:
            self._foreign -= 1
            return
        if step is None:
            return
        core = self._engine.core
        self.open.popleft()
        if core.last_output is not None:
            step.sampled = list(core.last_output.sampled_token_ids)
        for update in core.last_updates:
            if update.finish_reason is not None:
                step.finish_reasons[update.req_id] = update.finish_reason
        self._settled(step)
