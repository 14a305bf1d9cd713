"""Small random runs, captured by a few lines of our own and read back from the device after every step.

Independent of the recorder: what these records hold is looked up in the engine, not heard at the chokepoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import Observer
from mrv2lab.protocol import SamplingParams
from mrv2lab.recording.schema import Array, Diff, Header, NewRequest, Publish, StepRecord
from tests.engine.small import MODEL

SIZES: dict[str, Any] = {
    "max_num_reqs": 8,
    "max_model_len": 48,
    "block_size": 4,
    "num_blocks": 20,
    "max_num_batched_tokens": 14,
}
"""Few blocks and few tokens a step: preemptions and chunks come by themselves."""
SYNC, ASYNC = {"async_scheduling": False}, {"async_scheduling": True}


@dataclass
class Run:
    """A recording, and what the device held after each of its steps."""

    header: Header
    steps: list[StepRecord] = field(default_factory=list)
    live: list[dict[str, Array]] = field(default_factory=list)
    owners: list[dict[str, int]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    title: str = "a run"


class Capture(Observer):
    """Writes ``run`` while it is the engine's observer."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        config = dataclasses.asdict(engine.config)
        tables = {name: (table.shape, str(table.dtype)) for name, table in self.read().items()}
        self.run = Run(Header("record", "mrv2", "cpu", True, config, "spec", tables, 0, 0))
        self.open: list[StepRecord] = []
        self.begin()
        engine.observer = self

    def read(self) -> dict[str, Array]:
        """Every table from the device, behind all that is queued."""
        return {name: self.engine.rt.read(t).numpy() for name, t in self.engine.worker.runner.tables().items()}

    def begin(self) -> None:
        """The next step begins with a keyframe."""
        runner = self.engine.worker.runner
        self.keyframe: dict[str, Array] | None = self.read()
        self.rows = dict(runner.req_states.req_id_to_index)
        self.host = {name: table.copy() for name, table in runner.host_tables().items()}
        self.open.clear()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:  # type: ignore[override]
        """See :meth:`Observer.span`."""
        if name == "apply_writes":
            self.writes(self.run.steps[-1])
        yield
        if name == "schedule":
            self.schedule()
        elif name == "prepare_inputs":
            batch, record = self.engine.worker.runner.batch, self.run.steps[-1]
            assert batch is not None
            record.req_ids, record.rows = list(batch.host.req_ids), batch.host.rows.copy()
            record.num_scheduled, record.has_prefill = batch.host.num_scheduled_tokens.copy(), batch.host.has_prefill
        elif name == "update_from_output":
            core, record = self.engine.core, self.open.pop(0)
            assert core.last_output is not None
            record.sampled = core.last_output.sampled_token_ids
            record.finish_reasons = {u.req_id: u.finish_reason for u in core.last_updates if u.finish_reason}

    def schedule(self) -> None:
        """A new record."""
        output = self.engine.core.last_schedule
        assert output is not None
        record = StepRecord(
            output.step,
            finished=sorted(output.finished),
            preempted=sorted(output.preempted),
            unscheduled=sorted(output.unscheduled),
            decisions=[tuple(decision) for decision in self.engine.scheduler.decisions],  # type: ignore[misc]
            gauges={"in_flight": float(len(self.engine.core.in_flight))},
        )
        if self.keyframe is not None:
            record.keyframe, record.owners, self.keyframe = self.keyframe, dict(self.rows), None
        self.run.steps.append(record)
        self.open.append(record)

    def writes(self, record: StepRecord) -> None:
        """What is staged and what will be published."""
        runner, output = self.engine.worker.runner, self.engine.core.last_schedule
        assert output is not None
        for req_id in sorted(output.finished | output.preempted):
            if req_id in self.rows:
                record.removed.append((req_id, self.rows.pop(req_id)))
        for r in (*output.new, *output.resumed):
            row = self.rows[r.req_id] = runner.req_states.req_id_to_index[r.req_id]
            blocks, resumed = [list(ids) for ids in r.block_ids], r in output.resumed
            record.new.append(
                NewRequest(
                    r.req_id, row, r.prompt_len, len(r.all_token_ids), r.num_computed_tokens, blocks,
                    r.sampling.temperature, r.seed, r.seed_given, r.sampling.max_tokens, resumed,
                )
            )  # fmt: skip
        for name, diffs in runner.staged().items():
            record.diffs += [Diff(name, diff.row, diff.start, diff.values.copy()) for diff in diffs]
        for name, table in runner.host_tables().items():
            index = np.flatnonzero(table != self.host[name])
            if len(index):
                record.publishes.append(Publish(name, index, table.reshape(-1)[index]))
                self.host[name] = table.copy()

    def step(self) -> None:
        """One turn of the engine, then everything is read from the device."""
        before = len(self.run.steps)
        self.engine.step()
        if len(self.run.steps) > before:
            self.run.live.append(self.read())
            self.run.owners.append(dict(self.engine.worker.runner.req_states.req_id_to_index))


Move = Callable[[Engine, np.random.Generator], None]


def submit(engine: Engine, rng: np.random.Generator) -> None:
    """A request whose beginning others share, mostly."""
    shared = list(range(1, 1 + int(rng.integers(0, 13))))
    prompt = shared + rng.integers(20, 61, int(rng.integers(1, 14))).tolist()
    params = SamplingParams(int(rng.integers(1, 20)), 0.7 * float(rng.integers(0, 2)), ignore_eos=bool(rng.integers(2)))
    engine.submit(prompt, params)


def abort(engine: Engine, rng: np.random.Generator) -> None:
    """Anybody."""
    if engine.scheduler.requests:
        engine.abort(str(rng.choice(sorted(engine.scheduler.requests))))


def preempt(engine: Engine, rng: np.random.Generator) -> None:
    """A running request."""
    if engine.scheduler.running:
        engine.scheduler.preempt(str(rng.choice([request.req_id for request in engine.scheduler.running])))


def reset(engine: Engine, rng: np.random.Generator) -> None:
    """Drop everything in flight."""
    engine.reset()
    assert isinstance(engine.observer, Capture)
    engine.observer.begin()


def random_run(num_steps: int, options: dict[str, Any], seed: int = 0, resets: tuple[int, ...] = ()) -> Run:
    """``num_steps`` steps among arrivals, aborts and forced preemptions; ``resets``: before which steps to reset."""
    rng = np.random.default_rng(seed)
    with Engine(MODEL, device="cpu", **SIZES | options) as engine:
        for _ in range(3):  # the recording begins in the middle of a run
            submit(engine, rng)
        for _ in range(4):
            engine.step()
        while engine.core.in_flight:  # whose output an observer would not understand
            engine.core._settle(*engine.core.in_flight.popleft())
        capture = Capture(engine)
        while len(capture.run.steps) < num_steps:
            for move, chance in ((submit, 0.35), (abort, 0.04), (preempt, 0.04)):
                if rng.random() < chance:
                    move(engine, rng)
            if len(capture.run.steps) in resets:
                reset(engine, rng)
                submit(engine, rng)
            capture.step()
        return capture.run
