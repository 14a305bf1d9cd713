"""The steady batch against the rule for each request: every schedule, decision, update, counter and output alike."""

from __future__ import annotations

import inspect
import random
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.config import CacheConfig, SchedulerConfig
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.lifecycle import RequestLifecycle
from mrv2lab.engine.output_processor import OutputProcessor
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.request import Request, RequestStatus
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.engine.steady import SteadyBatch, SteadyUpdates
from mrv2lab.protocol import ModelRunnerOutput, SchedulerOutput
from tests.engine.harness import Loop, expected_output, make_request


@dataclass(frozen=True)
class Workload:
    """Few requests with long outputs, so that batches last; settings, and a seed for the requests and events."""

    asynchronous: bool = True
    policy: str = "fcfs"
    caching: bool = True
    block_size: int = 4
    num_blocks: int = 97
    budget: int = 40
    threshold: int = 0
    max_num_reqs: int = 8
    num_requests: int = 6
    eos: bool = False
    event_rate: float = 0.0
    error_rate: float = 0.0
    seed: int = 0


MAX_LEN = 48


class RecordingLoop(Loop):
    """Writes down whatever anybody could see of a step."""

    def __init__(self, work: Workload) -> None:
        config = SchedulerConfig(
            max_num_reqs=work.max_num_reqs,
            max_num_batched_tokens=work.budget,
            max_model_len=MAX_LEN,
            policy=work.policy,  # type: ignore[arg-type]
            long_prefill_token_threshold=work.threshold,
            async_scheduling=work.asynchronous,
        )
        super().__init__(config, CacheConfig(work.num_blocks, work.block_size, work.caching), check=False)
        self.trace: list[Any] = []
        self.processor = OutputProcessor(keep_finished=100)
        self.num_steady = 0
        self.num_settled = 0
        self.errors = random.Random(work.seed)
        self.error_rate = work.error_rate
        self.disturb: Callable[[], None] = lambda: None
        self._schedule, self._settle = self.scheduler.schedule, self.scheduler.update_from_output
        self.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self.scheduler.update_from_output = self.settle  # type: ignore[method-assign, assignment]

    def add(self, request: Request) -> None:
        super().add(request)
        output = RequestOutput(request.req_id, None, request.prompt_token_ids)
        self.processor.add(output, request.sampling, None, len(self.trace))

    def abort(self, req_id: str) -> None:
        super().abort(req_id)
        self.processor.end(RequestUpdate(req_id, [], "abort"), len(self.trace))

    def schedule(self) -> SchedulerOutput:
        steady = self.scheduler._steady
        output = self._schedule()
        self.num_steady += steady is not None and self.scheduler._steady is steady
        told = output.continued
        words = replace(output, continued=told.req_ids.copy()), told.num_computed_tokens.tolist()  # type: ignore[arg-type]
        self.trace.append(
            (words, told.num_output_tokens.tolist(), told.new_block_ids, list(output.num_scheduled_tokens))
        )
        self.trace.append((list(self.scheduler.decisions), self._state()))
        return output

    def settle(self, schedule: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        if result.req_ids and self.errors.random() < self.error_rate:
            result = replace(result, errors={self.errors.choice(result.req_ids): "boom"})
        self.disturb()
        updates = self._settle(schedule, result)
        self.num_settled += isinstance(updates, SteadyUpdates)
        outputs = self.processor.step(updates, result, len(self.trace))
        self.trace.append([(o.request_id, list(o.new_token_ids), list(o.token_ids), o.steps) for o in outputs])
        self.trace.append((list(updates), self._state()))
        return list(updates)

    def _state(self) -> Any:
        counters = [
            (
                request.req_id,
                request.status,
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_output_placeholders,
                request.num_stale_output_tokens,
                request.num_tokens,
                request.is_prefill_chunk,
                request.all_token_ids.copy(),
                request.spec_token_ids,
                request.block_hashes.copy(),
            )
            for request in self.scheduler.requests.values()
        ]
        running = [request.req_id for request in self.scheduler.running]
        pool, tables = self.scheduler.kv.pool, self.scheduler.kv.tables.values()
        held = [[block.block_id for block in table] for tables_of_one in tables for table in tables_of_one]
        free, keys = [block.block_id for block in pool.free_list], [block.key for block in pool.blocks]
        return counters, running, held, free, keys, repr(self.scheduler.stats)


def play(work: Workload) -> RecordingLoop:
    rng = random.Random(work.seed)
    loop = RecordingLoop(work)
    todo = []
    for i in range(work.num_requests):
        shared = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(0, 8)]
        prompt = shared + [rng.randint(1, 15) for _ in range(rng.randint(1, 8))]
        priority, arrival = rng.randint(0, 2), rng.choice([0, 0, 0, 9, 25])
        request = make_request(f"r{i}", prompt, rng.choice([8, 30, 30, 32]), eos=work.eos, priority=priority)
        todo.append((arrival, request))
    requests = [request for _, request in todo]
    todo.sort(key=lambda pair: pair[0])
    touched = False

    def disturb() -> None:
        nonlocal touched
        if rng.random() < work.event_rate and loop.scheduler.requests:
            touched = True
            request = rng.choice(list(loop.scheduler.requests.values()))
            if rng.random() < 0.3:
                loop.abort(request.req_id)
            elif request.status is RequestStatus.RUNNING:
                loop.scheduler.preempt(request.req_id)

    loop.disturb = disturb
    for step in range(1_000):
        while todo and todo[0][0] <= step:
            loop.add(todo.pop(0)[1])
        disturb()
        if rng.random() < work.event_rate:
            while loop.queue:
                loop.update()
        if not todo and not loop.busy():
            break
        loop.step()
    else:
        raise AssertionError("never done")
    if not touched and not work.error_rate:
        assert all(loop.text[r.req_id] == expected_output(r) for r in requests)
    return loop


def compare(work: Workload) -> RecordingLoop:
    """Both ways, step by step; returns the loop with steady batches."""
    fast = play(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_find_steady", lambda self, scheduled, output: None)
        plain = play(work)
    assert not plain.num_steady and not plain.num_settled
    assert len(fast.trace) == len(plain.trace)
    for step, (ours, theirs) in enumerate(zip(fast.trace, plain.trace, strict=True)):
        if ours != theirs:  # without a diff, which costs a second
            raise AssertionError(f"entry {step} differs:\n{ours}\n{theirs}")
    return fast


ROOMY = Workload(num_requests=4)
CASES = {
    "async": ROOMY,
    "sync": replace(ROOMY, asynchronous=False),
    "no-caching": replace(ROOMY, caching=False),
    "block-of-one": replace(ROOMY, block_size=1, asynchronous=False),
    "stops": replace(ROOMY, eos=True, num_requests=8),
    "stops-sync": replace(ROOMY, eos=True, num_requests=8, asynchronous=False),
    "dry-pool": replace(ROOMY, num_blocks=24, num_requests=8),
    "dry-pool-sync": replace(ROOMY, num_blocks=24, num_requests=8, asynchronous=False, policy="priority"),
    "chunks": replace(ROOMY, budget=9, threshold=1, num_requests=8),
    "few-rows": replace(ROOMY, max_num_reqs=3, num_requests=8),
    "events": replace(ROOMY, event_rate=0.05, num_requests=8),
    "errors": replace(ROOMY, error_rate=0.05, num_requests=8, asynchronous=False),
}


@pytest.mark.parametrize("name", CASES)
def test_both_ways_alike(name: str) -> None:
    steady = settled = 0
    for seed in range(2):
        loop = compare(replace(CASES[name], seed=seed))
        steady += loop.num_steady
        settled += loop.num_settled
    assert steady > 4 and settled > 4, "batches lasted"


WORKLOADS = st.builds(
    Workload,
    asynchronous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_blocks=st.sampled_from([64, 96, 300]),
    budget=st.sampled_from([4, 9, 40]),
    threshold=st.sampled_from([0, 1, 3]),
    max_num_reqs=st.sampled_from([2, 4, 8]),
    num_requests=st.integers(1, 10),
    eos=st.booleans(),
    event_rate=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    error_rate=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**16),
)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, derandomize=True)
@given(WORKLOADS)
def test_random_workloads(work: Workload) -> None:
    compare(work)


def test_updates_read_like_a_list() -> None:
    updates = SteadyUpdates(["a", "b"], [[1], [2]])
    plain = [RequestUpdate("a", [1], None), RequestUpdate("b", [2], None)]
    assert list(updates) == plain and updates == plain and plain == updates
    assert (updates[1], updates[-2:], len(updates), repr(updates)) == (plain[1], plain, 2, repr(plain))
    assert updates != plain[:1] and updates != [] and updates != 3


# -- each bug must be seen ---------------------------------------------------------------------------------------------

# (owner, function, old text, new text, case)
MUTANTS: list[tuple[type, str, str, str, str]] = [
    (RequestLifecycle, "_finish", "self._steady = None", "pass", "events"),
    (RequestLifecycle, "_preempt", "self._steady = None", "pass", "events"),
    (Scheduler, "_find_steady", "or any(request.is_prefill_chunk for request in scheduled)", "", "chunks"),
    (Scheduler, "_schedule_steady", "bool(self._in_flight) != bool(self._promises)", "False", "events"),
    (Scheduler, "_schedule_steady", "step.budget -= len(steady.requests)", "pass", "few-rows"),
    (SteadyBatch, "schedule", "self._num_schedules >= self._num_steps", "False", "async"),
    (SteadyBatch, "schedule", "else computed + 1", "else computed", "sync"),
    (SteadyBatch, "_serve", "> kv.num_free_blocks", "> 10**9", "dry-pool"),
    (SteadyBatch, "_look_ahead", ".next_hash_at)", ".next_hash_at) + 1", "async"),
    (SteadyBatch, "count", "request.num_output_placeholders += 1", "pass", "async"),
    (SteadyBatch, "settle", "request.num_output_placeholders -= 1", "pass", "async"),
    (SteadyBatch, "settle", "self._num_settled >= self._num_steps", "False", "sync"),
    (SteadyBatch, "settle", "not self._stop_ids.isdisjoint(tokens)", "False", "stops"),
    (KVCacheManager, "append_block", "request.num_tokens >= request.next_hash_at", "False", "async"),
    (OutputProcessor, "_look_up", "req_ids is not self._steady_ids", "not self._steady_ids", "stops"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new", "case"), MUTANTS)
def test_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str, case: str
) -> None:
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    namespace: dict[str, Any] = dict(vars(sys.modules[function.__module__]))
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), name, "exec"), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    assert not all(_alike(replace(CASES[case], seed=seed)) for seed in range(6)), "the mutant lived"


def _alike(work: Workload) -> bool:
    try:
        compare(work)
    except (AssertionError, RuntimeError, ValueError, KeyError, IndexError):
        return False
    return True
