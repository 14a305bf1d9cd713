"""The steady batch against the rule for each request: every schedule, decision, update, counter and output alike.

Whoever reads a counter brings it up to date, so half of the runs look at few of them, now and then (``look``), and have
an account of any batch.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.config import CacheConfig, SchedulerConfig
from mrv2lab.engine import account
from mrv2lab.engine.account import Account
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.lifecycle import RequestLifecycle
from mrv2lab.engine.output_processor import OutputProcessor
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.request import Request, RequestStatus
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.engine.steady import RequestAccount, SteadyBatch, SteadyUpdates
from mrv2lab.engine.steady_outputs import SteadyOutputs
from mrv2lab.protocol import ModelRunnerOutput, OneTokenEach, SamplingParams, SchedulerOutput
from tests.engine.group_loop import GroupRunner
from tests.engine.harness import Loop, expected_output, make_request


@dataclass(frozen=True)
class Workload:
    """Few requests with long outputs, so that batches last; settings, and a seed for the requests and events."""

    asynchronous: bool = True
    policy: str = "fcfs"
    caching: bool = True
    windows: tuple[int | None, ...] = (None,)
    block_size: int = 4
    num_blocks: int = 97
    budget: int = 40
    threshold: int = 0
    max_num_reqs: int = 8
    num_requests: int = 6
    eos: bool = False
    more_stops: int = 0
    """Stop ids that nobody samples."""
    event_rate: float = 0.0
    error_rate: float = 0.0
    look: float = 1.0
    """Share of the requests, and of the outputs, that are looked at whenever there is something to see."""
    seed: int = 0


MAX_LEN = 48
AT_ONCE = {"LEAST": 1, "PATIENCE": 1, "LONGEST": 3}
"""Any batch has an account, from the start, and its members take turns soon."""


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
        cache = CacheConfig(work.num_blocks * len(work.windows), work.block_size, work.caching)
        super().__init__(config, cache, check=False)
        if work.windows != (None,):
            self.scheduler = type(self.scheduler)(config, cache, windows=work.windows)
            self.runner = GroupRunner(config, cache, work.windows, 0)
        self.trace: list[Any] = []
        self.processor = OutputProcessor(keep_finished=100)
        self.num_steady = 0
        self.num_settled = 0
        self.errors, self.looks = random.Random(work.seed), random.Random(work.seed)
        self.look = work.look
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
        output = self.processor.end(RequestUpdate(req_id, [], "abort"), len(self.trace))
        self.trace.append((output.new_token_ids, output.token_ids.copy(), self._state()))

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
        self.trace.append([o.request_id for o in outputs])
        seen = [o for o in outputs if self.looks.random() < self.look]
        self.trace.append([(list(o.new_token_ids), list(o.token_ids), o.steps) for o in seen])
        self.trace.append((list(updates), self._state()))
        return list(updates)

    def _state(self) -> Any:
        if self.scheduler._steady is None:
            assert all(request.arrears is None for request in self.scheduler.requests.values())
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
            if self.looks.random() < self.look
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
        request.stop_set |= frozenset(range(10**6, 10**6 + work.more_stops))
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
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AT_ONCE.items() if work.look < 1 else ():
            patch.setattr(account, name, value)
        fast = play(work)
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
    "windows": replace(ROOMY, caching=False, windows=(None, 6)),
    "windows-sync": replace(ROOMY, windows=(6, None), asynchronous=False),
    "block-of-one": replace(ROOMY, block_size=1, asynchronous=False),
    "stops": replace(ROOMY, eos=True, num_requests=8),
    "many-stops": replace(ROOMY, eos=True, more_stops=9, num_requests=8),
    "stops-sync": replace(ROOMY, eos=True, num_requests=8, asynchronous=False),
    "dry-pool": replace(ROOMY, num_blocks=24, num_requests=8),
    "dry-pool-sync": replace(ROOMY, num_blocks=24, num_requests=8, asynchronous=False, policy="priority"),
    "chunks": replace(ROOMY, budget=9, threshold=1, num_requests=8),
    "few-rows": replace(ROOMY, max_num_reqs=3, num_requests=8),
    "events": replace(ROOMY, event_rate=0.05, num_requests=8),
    "errors": replace(ROOMY, error_rate=0.05, num_requests=8, asynchronous=False),
}


@pytest.mark.parametrize("look", [1.0, 0.1])
@pytest.mark.parametrize("name", CASES)
def test_both_ways_alike(name: str, look: float) -> None:
    steady = settled = 0
    for seed in range(2):
        loop = compare(replace(CASES[name], look=look, seed=seed))
        steady += loop.num_steady
        settled += loop.num_settled
    assert steady > 4 and settled > 4, "batches lasted"


WORKLOADS = st.builds(
    Workload,
    asynchronous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (None, 6), (5,)]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_blocks=st.sampled_from([64, 96, 300]),
    budget=st.sampled_from([4, 9, 40]),
    threshold=st.sampled_from([0, 1, 3]),
    max_num_reqs=st.sampled_from([2, 4, 8]),
    num_requests=st.integers(1, 10),
    eos=st.booleans(),
    event_rate=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    error_rate=st.sampled_from([0.0, 0.0, 0.05]),
    look=st.sampled_from([1.0, 0.3, 0.05]),
    seed=st.integers(0, 2**16),
)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, derandomize=True)
@given(WORKLOADS)
def test_random_workloads(work: Workload) -> None:
    compare(work)


def test_updates_read_like_a_list() -> None:
    updates = SteadyUpdates(["a", "b"], np.array([1, 2]))
    plain = [RequestUpdate("a", [1], None), RequestUpdate("b", [2], None)]
    assert list(updates) == plain and updates == plain and plain == updates
    assert (updates[1], updates[-2:], len(updates), repr(updates)) == (plain[1], plain, 2, repr(plain))
    assert updates != plain[:1] and updates != [] and updates != 3
    tokens = OneTokenEach(np.array([1, 2]))
    assert list(tokens) == [[1], [2]] == tokens and tokens != [[1]] and tokens != 3
    assert (tokens[1], tokens[-1:], len(tokens), repr(tokens)) == ([2], [[2]], 2, "[[1], [2]]")
    assert type(tokens[0][0]) is int and type(updates[0].new_token_ids[0]) is int


def test_an_output_with_arrears_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality, ``repr``, copies, and an attribute that is none."""
    for name, value in (AT_ONCE | {"LONGEST": 100}).items():
        monkeypatch.setattr(account, name, value)
    outputs = [RequestOutput(f"r{i}", None, [1, 2]) for i in range(9)]
    batch = SteadyOutputs(outputs, [0] * 9)
    for step in range(1, 5):
        assert batch.step(np.arange(9) + 10 * step, step) == outputs
    plain = RequestOutput("r8", None, [1, 2], token_ids=[18, 28, 38, 48], new_token_ids=[48], steps=4)
    for read in (repr, copy.copy, copy.deepcopy, lambda output: output):
        batch.step(np.arange(9), 5)
        assert batch.is_open and outputs[8].arrears is not None
        plain.token_ids, plain.new_token_ids, plain.steps = [*plain.token_ids, 8], [8], 5
        assert read(outputs[8]) == read(plain) and outputs[8].arrears is None
    assert not hasattr(outputs[7], "token_idz") and outputs[7].arrears is not None
    batch.close()
    assert all(output.arrears is None for output in outputs)


def test_each_list_of_ids_is_a_batch_of_its_own() -> None:
    processor = OutputProcessor(keep_finished=0)
    for name in "abcd":
        processor.add(RequestOutput(name, None, [1]), SamplingParams(), None, 0)
    for step, names in enumerate((["a", "b"], ["c", "d"], ["b", "a"]), 1):
        outputs = processor.step(SteadyUpdates(names, np.array([step, 10 * step])), None, step)
        assert [output.request_id for output in outputs] == names
    assert {name: output.token_ids for name, output in processor.requests.items()} == {
        "a": [1, 30], "b": [10, 3], "c": [2], "d": [20]
    }  # fmt: skip


def test_outputs_that_somebody_reads_every_step_have_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (AT_ONCE | {"LONGEST": 100}).items():
        monkeypatch.setattr(account, name, value)
    batch = SteadyOutputs([RequestOutput(f"r{i}", None, [1]) for i in range(9)], [0] * 9)
    for step in range(1, 9):
        outputs = batch.step(np.arange(9), step)
        assert batch.is_open == (step < 2)
        assert [output.token_ids for output in outputs] == [[i] * step for i in range(9)]


# -- each bug must be seen ---------------------------------------------------------------------------------------------

# (owner, function, old text, new text, case)
MUTANTS: list[tuple[type, str, str, str, str]] = [
    (RequestLifecycle, "_finish", "self._end_steady()", "pass", "events"),
    (RequestLifecycle, "_preempt", "self._end_steady()", "pass", "events"),
    (RequestLifecycle, "_end_steady", "self._steady.end()", "pass", "events-account"),
    (Scheduler, "_find_steady", "or any(request.is_prefill_chunk for request in scheduled)", "", "chunks"),
    (Scheduler, "_schedule_steady", "bool(self._in_flight) == bool(self._promises)", "True", "events"),
    (Scheduler, "schedule", "step.num_scheduled.copy()", "step.num_scheduled", "async"),
    (Scheduler, "_schedule_steady", "step.budget -= len(steady.requests)", "pass", "few-rows"),
    (SteadyBatch, "schedule", "self._num_schedules >= self._num_steps", "False", "async"),
    (SteadyBatch, "schedule", "else ends", "else computed", "sync"),
    (SteadyBatch, "_serve", "> kv.num_free_blocks", "> 10**9", "dry-pool"),
    (SteadyBatch, "_look_ahead", ".next_hash_at)", ".next_hash_at) + 1", "async"),
    (SteadyBatch, "_serve", ">= request.next_hash_at <= request.num_tokens", "> 10**9", "sync"),
    (SteadyBatch, "count", "request.num_output_placeholders += promised", "pass", "async"),
    (SteadyBatch, "settle", "request.num_output_placeholders -= promised", "pass", "async"),
    (SteadyBatch, "settle", "self._num_settled >= self._num_steps", "False", "sync"),
    (SteadyBatch, "settle", "(tokens == stop).any()", "False", "stops"),
    (SteadyBatch, "settle", "not stops.isdisjoint(tokens.tolist())", "False", "many-stops"),
    (SteadyBatch, "settle", "self._account.begin_change()", "pass", "async-account"),
    (RequestAccount, "count", "self.begin_change()", "pass", "async-account"),
    (RequestAccount, "_give_back", "= in_flight + scheduled - settled", "= in_flight", "async-account"),
    (RequestAccount, "_give_back", "if self._is_behind else 0", "if True else 0", "sync-account"),
    (RequestAccount, "_give_back", "computed + scheduled", "computed + settled", "async-account"),
    (Account, "tokens_since", "self._caught_up.append(i)", "pass", "async-account"),
    (Account, "tokens_since", "first < last", "True", "async-account"),
    (Account, "add", "self.members[self._turn].catch_up()", "pass", "async-account"),
    (SteadyOutputs, "step", "self.begin_change()", "pass", "async-account"),
    (SteadyOutputs, "_give_back", "new[-1:]", "new[:1]", "async-account"),
    (SteadyOutputs, "_give_back", "self._step - self._starts[i]", "steps", "async-account"),
    (OutputProcessor, "_end_steady", "self._steady.close()", "pass", "stops-account"),
    (OutputProcessor, "end", "self._end_steady()", "pass", "events-account"),
    (KVCacheManager, "append_blocks", "self._let_go(request)", "pass", "windows"),
    (KVCacheManager, "append_blocks", "[] if self._slides else", "", "windows"),
    (KVCacheManager, "append_blocks", "request.num_tokens >= request.next_hash_at", "False", "async"),
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
    work = replace(CASES[case.removesuffix("-account")], look=0.1 if case.endswith("-account") else 1.0)
    assert not all(_alike(replace(work, seed=seed)) for seed in range(6)), "the mutant lived"


def _alike(work: Workload) -> bool:
    try:
        compare(work)
    except (AssertionError, AttributeError, RuntimeError, ValueError, KeyError, IndexError):
        return False
    return True
