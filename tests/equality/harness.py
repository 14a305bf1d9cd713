"""Run a workload on an engine and keep, in stream order, the logits behind every token: a :class:`Trace`.

The recorder adds one launch a step behind the logits segment, which clones them where the device's work runs: nothing
is read early, nothing waits, and what a race would corrupt is corrupt in the trace too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.engine.records import SchedulerStats
from mrv2lab.engine.workload import Workload
from mrv2lab.protocol import ForwardInputs, GrammarOutput, ModelRunnerOutput, SamplingParams
from mrv2lab.runner_v1 import ModelRunnerV1

CAPTURE = "test.capture"


@dataclass(frozen=True)
class Step:
    """One step with tokens, in batch order: its requests, their token counts, and what came out."""

    req_ids: tuple[str, ...]
    counts: tuple[int, ...]
    sampled: tuple[tuple[int, ...], ...]
    # [r, V] float32
    logits: torch.Tensor
    # [r] the position and the id of each row's input token, as the device had them
    positions: tuple[int, ...]
    input_ids: tuple[int, ...]


@dataclass
class Trace:
    """What a workload did. ``logits[id][k]`` is the row behind ``outputs[id].token_ids[k]``."""

    steps: list[Step]
    outputs: dict[str, RequestOutput]
    params: dict[str, SamplingParams]
    seeds: dict[str, int]
    stats: SchedulerStats
    # id -> [n, V] float32
    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    num_wasted: int = 0
    """Rows sampled for nobody."""

    @property
    def batches(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Who was in each step, in batch order, with how many tokens."""
        return [(step.req_ids, step.counts) for step in self.steps]

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Output token ids by request."""
        return {req_id: output.token_ids for req_id, output in self.outputs.items()}

    def __post_init__(self) -> None:
        rows: dict[str, dict[int, torch.Tensor]] = {req_id: {} for req_id in self.outputs}
        for step in self.steps:
            at = zip(step.req_ids, step.sampled, step.positions, step.input_ids, step.logits, strict=True)
            for req_id, sampled, position, input_id, logits in at:
                if not sampled:
                    continue
                output = self.outputs[req_id]
                known = output.prompt_token_ids + output.token_ids
                index = position + 1 - len(output.prompt_token_ids)
                if index >= len(output.token_ids):
                    self.num_wasted += 1
                    continue
                assert index >= 0, f"{req_id}: a token was sampled at position {position}, inside its prompt"
                assert index not in rows[req_id], f"{req_id}: output {index} was sampled twice"
                assert input_id == known[position], (
                    f"{req_id}: input at {position} is {input_id}, not {known[position]}"
                )
                assert sampled == (known[position + 1],), f"{req_id}: output {index} is not what was sampled"
                rows[req_id][index] = logits
        for req_id, found in rows.items():
            count = len(self.outputs[req_id].token_ids)
            assert sorted(found) == list(range(count)), f"{req_id}: logits of {sorted(found)} for {count} outputs"
            if count:
                self.logits[req_id] = torch.stack([found[index] for index in range(count)])


class _Model:
    """The runner's model, with one more launch behind the step's own logits (prompts' rows may be computed besides)."""

    def __init__(self, inner: Any, runner: Any) -> None:
        self.inner, self.runner, self.rt = inner, runner, runner.rt
        self.inputs: ForwardInputs | None = None

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        self.inputs = inputs
        hidden: torch.Tensor = self.inner.forward(inputs)
        return hidden

    def compute_logits(self, logits_indices: torch.Tensor, n: int, **order: bool) -> torch.Tensor:
        logits: torch.Tensor = self.inner.compute_logits(logits_indices, n, **order)
        if logits_indices is not self.runner.batch.logits_indices:
            return logits
        # A replayed graph calls no forward; its runner says what the graph reads.
        inputs = getattr(self.runner, "forward_inputs", None) or self.inputs
        assert inputs is not None
        reads = (logits, logits_indices, inputs.positions, inputs.input_ids)
        self.rt.run(CAPTURE, *reads, reads=reads)
        return logits


class _Future:
    """A step's output, noted when it is fetched."""

    def __init__(self, inner: Any, counts: dict[str, int], fetched: list[tuple[ModelRunnerOutput, Any]]) -> None:
        self.inner, self.counts, self.fetched = inner, counts, fetched

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self.inner.get_output()
        self.fetched.append((output, self.counts))
        return output


class _Worker:
    """The engine's worker, with the messages noted on their way in and the outputs on their way out."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seeds: dict[str, int] = {}
        self.fetched: list[tuple[ModelRunnerOutput, dict[str, int]]] = []
        self._counts: dict[str, int] = {}

    def execute_model(self, output: Any) -> bool:
        for request in output.new_reqs:
            assert self.seeds.setdefault(request.req_id, request.seed) == request.seed, "resumption keeps the seed"
        self._counts = dict(output.num_scheduled_tokens)
        return bool(self.inner.execute_model(output))

    def sample_tokens(self, *masks: GrammarOutput) -> _Future:
        return _Future(self.inner.sample_tokens(*masks), self._counts, self.fetched)


class Recorder:
    """Attached to an engine by :func:`recording`; ``trace()`` joins what was captured with what came out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.captured: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.worker = _Worker(engine.worker)
        self.params: dict[str, SamplingParams] = {}
        self.before = replace(engine.scheduler.stats)

    def capture(self, logits: torch.Tensor, indices: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        """Runs as queued work, perhaps in another thread."""
        self.captured.append((logits.float().clone(), positions[indices], ids[indices]))

    def trace(self) -> Trace:
        """What happened since the recorder was attached. Everything must have ended."""
        self.engine.rt.synchronize()
        steps = []
        for (output, counts), (logits, positions, ids) in zip(self.worker.fetched, self.captured, strict=True):
            steps.append(
                Step(
                    tuple(output.req_ids),
                    tuple(counts[req_id] for req_id in output.req_ids),
                    tuple(tuple(sampled) for sampled in output.sampled_token_ids),
                    logits.cpu(),
                    tuple(positions.tolist()),
                    tuple(ids.tolist()),
                )
            )
        outputs = {req_id: self.engine.requests[req_id] for req_id in self.params}
        stats = SchedulerStats(
            **{
                name.name: getattr(self.engine.scheduler.stats, name.name) - getattr(self.before, name.name)
                for name in fields(SchedulerStats)
            }
        )
        return Trace(steps, outputs, self.params, self.worker.seeds, stats)


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Once an engine: its runtime binds the name of the capturing segment for good."""
    recorder = Recorder(engine)
    engine.rt.register(CAPTURE, recorder.capture)
    runner, worker = engine.worker.runner, engine.core.worker
    runner.model = _Model(runner.model, runner)
    engine.core.worker = recorder.worker
    try:
        yield recorder
    finally:
        runner.model = runner.model.inner
        engine.core.worker = worker


def run_workload(
    engine: Engine,
    workload: Workload,
    *,
    aborts: Iterable[tuple[int, int]] = (),
    between: Callable[[Engine], None] | None = None,
    max_steps: int = 5000,
) -> Trace:
    """Submit the workload's arrivals at their steps, abort (step, arrival index), run to the end, and check the ends.

    ``between`` is called after every step.
    """
    arrivals = list(workload.resolve(engine.config.model.vocab_size))
    waiting, to_abort = list(arrivals), sorted(aborts)
    ids: list[str] = []
    with recording(engine) as recorder:
        step = 0
        while waiting or engine.has_work():
            while waiting and waiting[0].step <= step:
                arrival = waiting.pop(0)
                name = f"w{len(ids)}"
                ids.append(engine.submit(arrival.prompt, arrival.params, request_id=name, priority=arrival.priority))
                recorder.params[ids[-1]] = arrival.params
            while to_abort and to_abort[0][0] <= step:
                _, index = to_abort.pop(0)
                if index < len(ids) and not engine.output(ids[index]).finished:
                    engine.abort(ids[index])
            engine.step()
            if between is not None:
                between(engine)
            step += 1
            assert step < max_steps, f"the engine does not come to an end: {engine.scheduler.requests}"
        trace = recorder.trace()
    check_the_end(engine, trace)
    return trace


def check_the_end(engine: Engine, trace: Trace) -> None:
    """Nothing leaked, nobody forgotten, every wasted row counted."""
    assert all(output.finished for output in trace.outputs.values())
    runner, kv = engine.worker.runner, engine.scheduler.kv
    if isinstance(runner, ModelRunnerV1):
        batch, live = runner.input_batch, set(runner.requests)
        assert not batch.num_reqs and not batch.req_ids and not batch.generators, "a row is leaked"
        assert not any(table.np.any() for table in batch.block_table.groups), "a block row was not cleared"
    else:
        state = runner.req_states
        live = set(state.index_to_req_id)
        assert sorted([*state.free_indices, *live]) == list(range(state.max_num_reqs)), "a row is leaked or free twice"
    assert not engine.scheduler.requests and not engine.scheduler.running and not engine.scheduler.waiting
    assert not live, "the last step told the runner of everybody's end"
    assert kv.pool.num_free == kv.pool.num_usable, "a block is leaked"
    assert not kv.tables
    assert all(block.ref_cnt == 0 for block in kv.pool.blocks[1:])
    assert trace.num_wasted == trace.stats.wasted_rows, "a wasted row is not counted"
