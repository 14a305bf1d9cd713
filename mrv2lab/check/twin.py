"""Two runners on one schedule: a's output drives it, b is held against a, step by step, until the first difference.

Where b's tokens must agree with a's, both run a step at the same time and b is compared before the scheduler hears of
a's output. Where b is given a's tokens (the near class, and sampled requests of a V1/MRV2 pair, whose draws agree in
law only), b follows one output behind: a's tokens are on the host by then, and nobody waits for them. So both runners
keep as many steps in flight as alone, and what is compared was cloned by queued work (``check/capture.py``). Comparing
costs the clones, and on a GPU copies that wait: the times of a twin's run mean nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from mrv2lab.check.compare import (
    BFLOAT16_BOUND,
    FLOAT32_BOUND,
    Captured,
    Difference,
    Equality,
    NearReport,
    Rules,
    compare_step,
)
from mrv2lab.check.side import (
    Launched,
    Side,
    Weights,
    equality_of,
    make_side,
    refuse_tokens,
    refuse_unlike,
    side_names,
    weights_of,
)
from mrv2lab.config import EngineConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.grammar import Grammars, Matcher
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.request import Request
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.engine.workload import Workload
from mrv2lab.protocol import GrammarOutput, LogitsFunction, ModelRunnerOutput, SamplingParams, SchedulerOutput


@dataclass(frozen=True)
class TwinReport:
    """How far two runners agreed: ``rows`` compared, and of those with a comparable token how many were excused."""

    equality: Equality
    names: tuple[str, str]
    steps: int
    near: NearReport
    difference: Difference | None
    tokens: dict[str, list[int]]
    """Output token ids by request."""
    stats: Any
    """The scheduler's counters."""

    @property
    def equal(self) -> bool:
        """Something was compared and no difference found. Excuses are judged over many runs: see
        ``NearReport.too_many_excused``."""
        return self.difference is None and self.steps > 0

    @property
    def rows(self) -> int:
        """Rows compared."""
        return self.near.rows

    @property
    def excused(self) -> int:
        """Tokens that differ, or may, where a's margin is too small to say."""
        return self.near.excused

    def __str__(self) -> str:
        seen = f"{self.steps} steps, {self.rows} rows, {self.near.tokens} tokens, {self.excused} excused"
        if not self.steps and self.difference is None:
            return f"{' and '.join(self.names)}: nothing was compared, since no step had tokens"
        if self.difference is None:
            return f"{' and '.join(self.names)} are equal ({self.equality}): {seen}"
        return f"{' and '.join(self.names)} differ ({self.equality}) after {seen}: {self.difference}"


@dataclass
class _Step:
    """A step between its schedule and its comparison."""

    schedule: SchedulerOutput
    message_b: Any
    forced: bool
    grammar: GrammarOutput | None = None
    has_tokens: bool = False
    a: Launched | None = None
    b: Launched | None = None
    launched_b: bool = False
    captured_a: Captured | None = None
    params: dict[str, tuple[SamplingParams, int]] = field(default_factory=dict)


class Twin:
    """One scheduler, two sides. See the module's docstring.

    ``equality`` None: the class that DESIGN.md gives this pair. Use it in a ``with``, or call :meth:`close`.

    Raises ``ValueError`` for a class that there is not.
    """

    def __init__(
        self, scheduler: Scheduler, a: Side, b: Side, *, equality: Equality | None = None, seed: int | None = 0
    ) -> None:
        if equality not in (None, *get_args(Equality)):
            raise ValueError(f"equality must be None or one of {get_args(Equality)}, got {equality!r}")
        self.scheduler, self.a, self.b = scheduler, a, b
        self.equality: Equality = equality or equality_of(a, b)
        config = a.config
        self.depth = config.scheduler.max_concurrent_steps
        wide = config.model.dtype == "float32"
        self.rules = Rules(
            self.equality,
            (config.cache.block_size,),
            bound=FLOAT32_BOUND if wide else BFLOAT16_BOUND,
            tokens=wide or self.equality == "exact",
            draws=a.kind == b.kind and (a.kind == "mrv2" or self.equality == "exact"),
            names=(a.name, b.name),
            alike=a.kind == b.kind,
            logprobs=config.runner.logprobs_mode == b.config.runner.logprobs_mode,
            processed_logprobs=config.runner.logprobs_mode.startswith("processed"),
            nans=config.runner.count_nans and b.config.runner.count_nans,
        )
        self.grammars = Grammars(config.model.vocab_size, config.spec.num_speculative_tokens, self.depth)
        self.near = NearReport()
        self.difference: Difference | None = None
        self.steps = 0
        """Steps with tokens that were compared."""
        self.tokens: dict[str, list[int]] = {}
        self._project_a = a.projection(scheduler.requests)
        self._project_b = b.projection(scheduler.requests)
        self._requests: dict[str, tuple[SamplingParams, int]] = {}
        self._rng = np.random.default_rng(seed)
        self._forces = self.equality == "near"
        self._in_flight: deque[_Step] = deque()
        self._following: deque[_Step] = deque()

    @classmethod
    def build(
        cls,
        a: EngineConfig,
        b: EngineConfig,
        *,
        weights: Weights | None = None,
        equality: Equality | None = None,
        seed: int | None = 0,
        around_b: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Twin:
        """From two configs, with the same weights (None: the model's random ones). ``around_b`` is entered around all
        of b's host work: a mutant of ``mrv2lab.teach.mutants`` there breaks b alone.

        Raises ``ValueError`` for configs that no schedule could serve both.
        """
        refuse_unlike(a, b)
        weights = weights if weights is not None else weights_of(a.model)
        names = side_names(a, b)
        side_a = make_side(a, weights, names[0])
        try:
            side_b = make_side(b, weights, names[1], around_b)
        except BaseException:
            side_a.close()
            raise
        kind = AsyncScheduler if a.scheduler.async_scheduling else Scheduler
        return cls(kind(a.scheduler, a.cache, a.spec), side_a, side_b, equality=equality, seed=seed)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        req_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        processors: tuple[LogitsFunction, ...] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Queue one request, given as token ids. Both sides call the same ``processors``, so these must keep nothing;
        ``matcher`` says what it may sample, as a grammar does. Raises ``ValueError`` as :meth:`Engine.submit` does."""
        params = params if params is not None else SamplingParams()
        refuse_tokens(self.a.config.model.vocab_size, prompt, params)
        seed = int(self._rng.integers(-(2**63), 2**63 - 1))
        request = Request(
            req_id,
            prompt,
            params,
            seed=seed,
            eos_token_ids=self.a.config.model.eos_token_ids,
            arrival_time=float(len(self._requests)),
            priority=priority,
            processors=processors,
        )
        self.scheduler.add_request(request)
        if matcher is not None:
            self.grammars.add(request, matcher)
        if processors:
            self.rules = dataclasses.replace(self.rules, opaque=self.rules.opaque | {req_id})
        self._requests[req_id] = (params, request.seed)
        self.tokens[req_id] = []
        if not self.rules.draws and params.temperature != 0:
            self._forces = True

    def abort(self, req_id: str) -> bool:
        """End a request; False if it has ended already."""
        if req_id not in self.scheduler.requests:
            return False
        self.scheduler.abort(req_id)
        return True

    # -- the loop ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether another :meth:`step` would do anything."""
        return bool(self._in_flight or self._following or self.scheduler.has_work())

    def step(self) -> Difference | None:
        """One turn of the loop, as ``EngineCore.step``; the first difference once there is one. Then it is over:
        another call raises ``RuntimeError``."""
        if self.difference is not None:
            raise RuntimeError(f"the twin stopped at its first difference: {self.difference}")
        if self.scheduler.has_work():
            schedule = self.scheduler.schedule()
            settled = self._launch(schedule)
            if settled or (len(self._in_flight) < self.depth and schedule.total_num_scheduled_tokens):
                return self.difference
        if self._in_flight:
            self._settle(self._in_flight.popleft())
        elif self._following:
            self._compare(self._following.popleft())
        return self.difference

    def _launch(self, schedule: SchedulerOutput) -> bool:
        """Put a step into flight; whether an older one had to be settled first, as a grammar may want it."""
        # A copy, since b may be told later, and so that no runner sees what another did to its message.
        step = _Step(schedule, copy.deepcopy(self._project_b(schedule)), self._forces)
        step.params = {req_id: self._requests[req_id] for req_id in schedule.num_scheduled_tokens}
        followers = self.grammars.sampling(schedule)
        step.has_tokens = self.a.execute(self._project_a(schedule))
        b_has_tokens = not step.forced and self.b.execute(step.message_b)
        settled = False
        if step.has_tokens and followers:
            if self._in_flight and Grammars.waiting(followers, schedule):
                self._settle(self._in_flight.popleft())
                settled = True
                if self.difference is not None:
                    return True
            step.grammar = copy.deepcopy(self.grammars.output(followers, schedule))
        if step.has_tokens:
            step.a = self.a.sample({}, step.grammar)
        if b_has_tokens:
            step.b = self.b.sample({}, step.grammar)
        step.launched_b = not step.forced
        self._in_flight.append(step)
        return settled

    def _launch_b(self, step: _Step, tokens: dict[str, int]) -> None:
        if self.b.execute(step.message_b):
            step.b = self.b.sample(tokens, step.grammar)
        step.launched_b = True

    def _settle(self, step: _Step) -> None:
        output = ModelRunnerOutput(step.schedule.step, [], [])
        if step.a is not None:
            output, step.captured_a = self.a.fetch(step.a)
        if not step.launched_b:
            self._launch_b(step, self._forced_tokens(output, step.params))
            self._following.append(step)
            if len(self._following) >= self.depth:
                self._compare(self._following.popleft())
        else:
            self._compare(step)
        if self.difference is None:
            self._note(self.scheduler.update_from_output(step.schedule, output))
            for req_id in self.grammars.follow():
                self.scheduler.finish(req_id, "error")

    def _forced_tokens(
        self, output: ModelRunnerOutput, params: Mapping[str, tuple[SamplingParams, int]]
    ) -> dict[str, int]:
        """a's tokens, of all requests, or of the sampled ones alone in the exact class."""
        pairs = zip(output.req_ids, output.sampled_token_ids, strict=True)
        everybody = self.equality == "near"
        return {
            req_id: tokens[0] for req_id, tokens in pairs if tokens and (everybody or params[req_id][0].temperature)
        }

    def _compare(self, step: _Step) -> None:
        if (step.a is None) != (step.b is None):
            left, right = (side is not None for side in (step.a, step.b))
            self.difference = Difference(
                step.schedule.step, "batch_order", "", "batch index", 0, left, right, self.rules.names, "has tokens"
            )
        if step.a is None or step.b is None:
            return
        assert step.captured_a is not None
        _, captured = self.b.fetch(step.b)
        self.difference = compare_step(step.captured_a, captured, self.rules, step.params, self.near)
        self.steps += 1

    def _note(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            self.tokens[update.req_id] += update.new_token_ids

    # -- a whole workload ----------------------------------------------------------------------------------------------

    def run(
        self,
        workload: Workload,
        *,
        aborts: Iterable[tuple[int, int]] = (),
        between: Callable[[Twin], None] | None = None,
        max_steps: int = 5000,
    ) -> TwinReport:
        """Submit the arrivals (ids ``w0``, ``w1``, ...) at their steps, abort (step, arrival) pairs, and go on to the
        end or to the first difference. ``between`` is called after every turn.

        Raises ``RuntimeError`` after ``max_steps`` turns.
        """
        waiting = list(workload.resolve(self.a.config.model.vocab_size))
        to_abort, count, turn = sorted(aborts), 0, 0
        while (waiting or self.has_work()) and self.difference is None:
            while waiting and waiting[0].step <= turn:
                arrival = waiting.pop(0)
                assert isinstance(arrival.prompt, tuple), "resolve() drew it; a twin has no tokenizer"
                self.submit(f"w{count}", arrival.prompt, arrival.params, priority=arrival.priority)
                count += 1
            while to_abort and to_abort[0][0] <= turn:
                self.abort(f"w{to_abort.pop(0)[1]}")
            self.step()
            if between is not None:
                between(self)
            turn += 1
            if turn >= max_steps:
                raise RuntimeError(f"no end after {max_steps} turns; unfinished: {sorted(self.scheduler.requests)}")
        return self.report()

    def report(self) -> TwinReport:
        """What was compared so far."""
        return TwinReport(
            self.equality,
            self.rules.names,
            self.steps,
            self.near,
            self.difference,
            {req_id: list(tokens) for req_id, tokens in self.tokens.items()},
            dataclasses.replace(self.scheduler.stats),
        )

    def close(self) -> None:
        """Give back both runtimes' threads."""
        self.a.close()
        self.b.close()

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
