"""The engine's inner loop, twice: synchronous, and asynchronous with a queue of two steps. Counterpart: ``core.py``.

In one notebook process the scheduler's and the runner's Python run one after the other; what the asynchronous loop
overlaps is the host with the device, nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.observer import Observer
from mrv2lab.protocol import (
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)


class StepWorker(Protocol):
    """What the loop needs of a worker."""

    def execute_model(self, output: Any) -> bool:
        """``output`` is the runner's own message."""

    def sample_tokens(self) -> AsyncModelRunnerOutput: ...


class EngineCore:
    """Schedules, launches, settles. ``project`` makes the runner's message of each schedule, once and in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        observer: Observer,
        max_concurrent_steps: int,
        project: Callable[[SchedulerOutput], Any],
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.observer = observer
        self.max_concurrent_steps = max_concurrent_steps
        self.project = project
        self.in_flight: deque[tuple[SchedulerOutput, AsyncModelRunnerOutput | None]] = deque()
        self.step = self._step_async if max_concurrent_steps > 1 else self._step_sync
        self.last_schedule: SchedulerOutput | None = None
        """What the latest turn scheduled; ``last_output`` and ``last_updates`` are what it settled. For observers."""
        self.last_output: ModelRunnerOutput | None = None
        self.last_updates: list[RequestUpdate] = []

    def _step_sync(self) -> list[RequestUpdate]:
        """Schedule, run, wait, settle."""
        schedule, message = self._schedule()
        return self._settle(schedule, self._launch(message))

    def _step_async(self) -> list[RequestUpdate]:
        """Schedule and launch step N + 1, then wait for step N: filling the queue goes before draining it."""
        if self.scheduler.has_work():
            schedule, message = self._schedule()
            self.in_flight.append((schedule, self._launch(message)))
            if len(self.in_flight) < self.max_concurrent_steps and schedule.total_num_scheduled_tokens:
                return []
        return self._settle(*self.in_flight.popleft()) if self.in_flight else []

    def _schedule(self) -> tuple[SchedulerOutput, Any]:
        """The schedule and the runner's message of it, which is the scheduler's work in vLLM."""
        with self.observer.span("schedule"):
            self.last_schedule = schedule = self.scheduler.schedule()
            return schedule, self.project(schedule)

    def _launch(self, message: Any) -> AsyncModelRunnerOutput | None:
        """None for a step without tokens, which only told the runner who is gone."""
        if not self.worker.execute_model(message):
            return None
        return self.worker.sample_tokens()

    def _settle(self, schedule: SchedulerOutput, future: AsyncModelRunnerOutput | None) -> list[RequestUpdate]:
        output = ModelRunnerOutput(schedule.step, [], []) if future is None else future.get_output()
        with self.observer.span("update_from_output"):
            self.last_output = output
            wasted = self.scheduler.stats.wasted_rows
            self.last_updates = self.scheduler.update_from_output(schedule, output)
            self.observer.gauge("wasted_rows", self.scheduler.stats.wasted_rows - wasted)
        return self.last_updates

    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return bool(self.in_flight) or self.scheduler.has_work()
