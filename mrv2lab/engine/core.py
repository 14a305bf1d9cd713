"""The engine's inner loop, twice: synchronous, and asynchronous with a queue of two steps. Counterpart: ``core.py``.

In one notebook process the scheduler's and the runner's Python run one after the other; what the asynchronous loop
overlaps is the host with the device, nothing else.

Structured output costs the asynchronous loop part of that overlap. What a request may sample in step N + 1 depends on
its token of step N, so in a step with such a request the forward pass is queued, then step N is waited for and settled,
then the mask is made and sampling is queued. The device has the forward pass of N + 1 to do meanwhile; behind it, it
stands still until the mask has come. The gauge ``deferred_sampling`` says in which steps that happened (1 or 0, told
only in steps with structured requests).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mrv2lab.engine.grammar import Follower, Grammars
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.observer import Observer
from mrv2lab.protocol import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput


class StepWorker(Protocol):
    """What the loop needs of a worker."""

    def execute_model(self, output: Any) -> bool:
        """``output`` is the runner's own message."""

    @property
    def sample_tokens(self) -> Callable[..., AsyncModelRunnerOutput]:
        """Called with a ``GrammarOutput`` where a request of the step is structured, and without one elsewhere."""


class EngineCore:
    """Schedules, launches, settles. ``project`` makes the runner's message of each schedule, once and in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        observer: Observer,
        max_concurrent_steps: int,
        project: Callable[[SchedulerOutput], Any],
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.observer = observer
        self.max_concurrent_steps = max_concurrent_steps
        self.project = project
        self.grammars = grammars
        self.in_flight: deque[tuple[SchedulerOutput, AsyncModelRunnerOutput | None]] = deque()
        self.step = self._step_async if max_concurrent_steps > 1 else self._step_sync
        self.last_schedule: SchedulerOutput | None = None
        """What the latest turn scheduled; ``last_output`` and ``last_updates`` are what it settled. For observers."""
        self.last_output: ModelRunnerOutput | None = None
        self.last_updates: Sequence[RequestUpdate] = []

    def _step_sync(self) -> Sequence[RequestUpdate]:
        """Schedule, run, wait, settle."""
        schedule, message = self._schedule()
        followers = self._followers(schedule)
        future = self._sample(schedule, followers) if self.worker.execute_model(message) else None
        return self._settle(schedule, future)

    def _step_async(self) -> Sequence[RequestUpdate]:
        """Schedule and launch step N + 1, then wait for step N: filling the queue goes before draining it."""
        if self.scheduler.has_work():
            schedule, message = self._schedule()
            followers = self._followers(schedule)
            settled: Sequence[RequestUpdate] | None = None
            future = None
            if self.worker.execute_model(message):  # False: no tokens, it was only told who is gone
                if followers and self.in_flight and Grammars.waiting(followers, schedule):
                    settled = self._settle(*self.in_flight.popleft())
                future = self._sample(schedule, followers, deferred=settled is not None)
            self.in_flight.append((schedule, future))
            if settled is not None:
                return settled
            if len(self.in_flight) < self.max_concurrent_steps and schedule.total_num_scheduled_tokens:
                return []
        return self._settle(*self.in_flight.popleft()) if self.in_flight else []

    def _schedule(self) -> tuple[SchedulerOutput, Any]:
        """The schedule and the runner's message of it, which is the scheduler's work in vLLM."""
        with self.observer.span("schedule"):
            self.last_schedule = schedule = self.scheduler.schedule()
            return schedule, self.project(schedule)

    def _followers(self, schedule: SchedulerOutput) -> list[Follower]:
        return self.grammars.sampling(schedule) if self.grammars is not None else []

    def _sample(
        self, schedule: SchedulerOutput, followers: list[Follower], deferred: bool = False
    ) -> AsyncModelRunnerOutput:
        """Queue sampling, behind the masks of ``followers``, whose tokens so far are known."""
        if not followers or self.grammars is None:
            return self.worker.sample_tokens()
        self.observer.gauge("deferred_sampling", deferred)
        grammar = self.grammars.output(followers, schedule)
        return self.worker.sample_tokens(grammar) if grammar is not None else self.worker.sample_tokens()

    def _settle(self, schedule: SchedulerOutput, future: AsyncModelRunnerOutput | None) -> Sequence[RequestUpdate]:
        output = ModelRunnerOutput(schedule.step, [], []) if future is None else future.get_output()
        with self.observer.span("update_from_output"):
            self.last_output = output
            wasted = self.scheduler.stats.wasted_rows
            updates = self.scheduler.update_from_output(schedule, output)
            if self.grammars is not None and (misfits := self.grammars.follow()):
                updates = [self._end_misfit(update, misfits) for update in updates]
                self.last_output = replace(output, errors=output.errors | misfits)
            self.last_updates = updates
            self.observer.gauge("wasted_rows", self.scheduler.stats.wasted_rows - wasted)
        return updates

    def _end_misfit(self, update: RequestUpdate, misfits: dict[str, str]) -> RequestUpdate:
        """A request whose token its mask forbids ends: all its logits were masked away, or somebody forced a token."""
        if update.req_id not in misfits:
            return update
        self.scheduler.finish(update.req_id, "error")
        return update._replace(finish_reason="error")

    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return bool(self.in_flight) or self.scheduler.has_work()
