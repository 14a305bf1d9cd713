"""Random schedules: the invariants of v1.md 1.4 and the text of every request, and bugs that they must catch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.config import CacheConfig, SchedulerConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.request import Request, RequestStatus
from mrv2lab.engine.scheduler import Scheduler
from tests.engine.harness import Loop, expected_output, make_request, watch_failed_allocations
from tests.slow import mostly_slow


@dataclass(frozen=True)
class Workload:
    """Settings, and a seed from which the requests and events are drawn."""

    asynchronous: bool = True
    num_spec: int = 0
    policy: str = "fcfs"
    caching: bool = True
    reserve: bool = True
    block_size: int = 4
    spare_blocks: int = 0
    budget: int = 12
    threshold: int = 0
    max_num_reqs: int = 8
    num_requests: int = 12
    event_rate: float = 0.0
    seed: int = 0


MAX_LEN = 32


def run(work: Workload) -> Loop:
    """Run ``work`` to the end with every check on; each request must give its own text or have been aborted."""
    rng = random.Random(work.seed)
    requests = []
    for i in range(work.num_requests):
        # Half of the prompts share a prefix.
        shared = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(0, 8)]
        prompt = shared + [rng.randint(1, 15) for _ in range(rng.randint(1, 10))]
        priority, arrival = rng.randint(0, 2), rng.randint(0, 12)
        request = make_request(f"r{i}", prompt, rng.randint(1, 10), eos=True, priority=priority, arrival_time=arrival)
        requests.append(request)
    requests.sort(key=lambda request: request.arrival_time)
    # A pool for about three requests of the twelve, and always for one with all its drafts.
    longest = min(max(r.max_total_tokens for r in requests) + 3 * work.num_spec, MAX_LEN)
    blocks = 1 + max(-(-longest // work.block_size), 3 * 12 // work.block_size) + work.spare_blocks
    config = SchedulerConfig(
        max_num_reqs=work.max_num_reqs,
        max_num_batched_tokens=work.budget,
        max_model_len=MAX_LEN,
        policy=work.policy,  # type: ignore[arg-type]
        long_prefill_token_threshold=work.threshold,
        reserve_full_sequence=work.reserve,
        async_scheduling=work.asynchronous,
    )
    loop = Loop(config, CacheConfig(blocks, work.block_size, work.caching), work.num_spec)
    watch_failed_allocations(loop.scheduler)
    aborted: set[str] = set()
    todo = list(requests)
    for step in range(2_000):
        while todo and todo[0].arrival_time <= step:
            loop.add(todo.pop(0))
        if rng.random() < work.event_rate and loop.scheduler.requests:
            _disturb(loop, rng, aborted)
        if not todo and not loop.busy():
            break
        loop.step()
    else:
        raise AssertionError(f"{list(loop.scheduler.requests.values())} never finished")
    for request in requests:
        text, full = loop.text[request.req_id], expected_output(request)
        assert text == request.output_token_ids
        assert text == (full[: len(text)] if request.req_id in aborted else full), request
        assert loop.reasons[request.req_id] == request.finish_reason
        assert (request.finish_reason == "abort") == (request.req_id in aborted)
        assert (request.num_in_flight_tokens, request.num_stale_output_tokens) == (0, 0)
    assert loop.scheduler.kv.num_free_blocks == blocks - 1, "a block leaked"
    assert not loop.runner.rows, "a row leaked"
    return loop


def _disturb(loop: Loop, rng: random.Random, aborted: set[str]) -> None:
    request = rng.choice(list(loop.scheduler.requests.values()))
    what = rng.choice(["abort", "preempt", "preempt", "reset"])
    if what == "abort":
        loop.abort(request.req_id)
        aborted.add(request.req_id)
    elif what == "preempt" and request.status is RequestStatus.RUNNING:
        loop.scheduler.preempt(request.req_id)
    elif what == "reset" and rng.random() < 0.3:
        assert loop.scheduler.reset_prefix_cache(preempt_running=True)


WORKLOADS = st.builds(
    Workload,
    asynchronous=st.booleans(),
    num_spec=st.integers(0, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    reserve=st.booleans(),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.sampled_from([0, 1, 5, 40]),
    budget=st.sampled_from([1, 3, 8, 12, 40]),
    threshold=st.sampled_from([0, 1, 3]),
    max_num_reqs=st.sampled_from([1, 3, 8]),
    num_requests=st.integers(1, 12),
    event_rate=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(WORKLOADS)
def test_random_schedules(work: Workload) -> None:
    run(work)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(WORKLOADS)
def test_many_random_schedules(work: Workload) -> None:
    run(work)


@pytest.mark.parametrize("num_spec", mostly_slow([0, 2, 1, 3], 2))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_preemption_storm(asynchronous: bool, policy: str, num_spec: int) -> None:
    """A pool for 3 of 12 requests."""
    preemptions = 0
    for seed in range(3):
        loop = run(Workload(asynchronous, num_spec, policy, caching=False, reserve=False, budget=40, seed=seed))
        preemptions += loop.scheduler.stats.num_preemptions
    assert preemptions > 3


def test_the_text_does_not_depend_on_the_schedule() -> None:
    base = Workload(event_rate=0.0, seed=5)
    runs = [dataclasses.replace(base, asynchronous=a, budget=b) for a in (False, True) for b in (1, 3, 16)]
    texts = [run(work).text for work in runs]
    assert all(text == texts[0] for text in texts)


# -- each bug must be caught by the same runs --------------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def _patch(owner: type, name: str, value: Any) -> Mutation:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def _wrong_free(self: KVCacheManager, request: Request, num_valid_tokens: int | None = None) -> None:
    self.tables.pop(request.req_id, None)


def _free_twice(self: KVCacheManager, request: Request, num_valid_tokens: int | None = None) -> None:
    for table in self.tables.get(request.req_id, ()):
        self.pool.free(reversed(table))
    _honest_free(self, request, num_valid_tokens)


_honest_free = KVCacheManager.free
_honest_lookup = KVCacheManager.get_computed_blocks
_honest_allocate = KVCacheManager.allocate_slots
_honest_cache = KVCacheManager.cache_blocks
_honest_preempted = Request.preempted
_honest_preempt = Scheduler._preempt
_honest_count = Scheduler._count_scheduled
_honest_data = Scheduler._request_data


def _forget_stale(self: Request) -> None:
    _honest_preempted(self)
    self.num_stale_output_tokens = 0


def _drop_spec(self: Request) -> None:
    _honest_preempted(self)
    self.num_computed_tokens = self.num_tokens // 2


def _silent_preempt(self: Scheduler, request: Request) -> None:
    _honest_preempt(self, request)
    self._preempted.discard(request.req_id)


def _side_effect(self: KVCacheManager, *args: Any, **kwargs: Any) -> Any:
    result = _honest_allocate(self, *args, **kwargs)
    if result is None and self.pool.num_free:
        self.pool.free(self.pool.allocate(1))
        self.pool.free_list.append(self.pool.free_list.popleft())
    return result


def _prompt_only(self: Scheduler, request: Request) -> Any:
    data = _honest_data(self, request)
    return dataclasses.replace(data, all_token_ids=request.prompt_token_ids)


def _replace_table(self: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Deduplicate on insert, as a table that is not append-only would."""
    _honest_cache(self, request, num_tokens)
    for table in self.tables[request.req_id]:
        for i, block in enumerate(table):
            first = self.pool.lookup(block.key) if block.key else None
            if first is not None and first is not block:
                self.pool.touch([first])
                self.pool.free([block])
                table[i] = first


def _publish_ahead(self: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Everything known, computed or not."""
    _honest_cache(self, request, len(self.tables[request.req_id][0]) * self.block_size)


STORM = Workload(caching=False, reserve=False, budget=40)
SHARED = Workload(budget=40, spare_blocks=4)
# Every prompt grows by one token a step, so that equal prefixes are computed twice at the same time.
SIDE_BY_SIDE = Workload(budget=40, spare_blocks=4, reserve=False, block_size=2, threshold=1)

MUTANTS: dict[str, tuple[Mutation, Workload]] = {
    "blocks_never_freed": (_patch(KVCacheManager, "free", _wrong_free), SHARED),
    "free_twice": (_patch(KVCacheManager, "free", _free_twice), SHARED),
    "failed_allocation_has_a_side_effect": (_patch(KVCacheManager, "allocate_slots", _side_effect), STORM),
    "lookahead_forgotten": (
        _patch(KVCacheManager, "allocate_slots", lambda self, r, n, k=0, *rest: _honest_allocate(self, r, n, 0, *rest)),
        Workload(num_spec=3),
    ),
    "placeholders_never_promised": (_patch(AsyncScheduler, "_count_scheduled", _honest_count), SHARED),
    "placeholders_never_taken_back": (_patch(AsyncScheduler, "_promises", 0), SHARED),
    "rejections_forgotten": (_patch(Scheduler, "_on_rejected", lambda self, r, n: None), Workload(num_spec=3)),
    "rejected_placeholders_forgotten": (
        _patch(AsyncScheduler, "_on_rejected", Scheduler._on_rejected),
        Workload(num_spec=3),
    ),
    "readmitted_before_drained": (_patch(Request, "preempted", _forget_stale), STORM),
    "computed_kept_over_preemption": (_patch(Request, "preempted", _drop_spec), STORM),
    "preemption_not_told": (_patch(Scheduler, "_preempt", _silent_preempt), STORM),
    "resumed_with_the_prompt_only": (_patch(Scheduler, "_request_data", _prompt_only), STORM),
    "table_not_append_only": (_patch(KVCacheManager, "cache_blocks", _replace_table), SIDE_BY_SIDE),
    "published_before_scheduled": (_patch(KVCacheManager, "cache_blocks", _publish_ahead), SIDE_BY_SIDE),
    "hash_without_parent": (
        lambda monkeypatch: monkeypatch.setattr(
            "mrv2lab.engine.request.hash_block", lambda parent, tokens: bytes(tokens)
        ),
        Workload(block_size=1, spare_blocks=20),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate, work = MUTANTS[name]
    for seed in range(8):
        run(dataclasses.replace(work, seed=seed))
    mutate(monkeypatch)
    caught = 0
    for seed in range(8):
        try:
            run(dataclasses.replace(work, seed=seed))
        except (AssertionError, RuntimeError, ValueError, KeyError, IndexError):
            caught += 1
    assert caught, "the mutant lived"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_stress_leaks_nothing(asynchronous: bool) -> None:
    """4,000 steps of random arrival, abort and preemption; ids are used again and again."""
    rng = random.Random(7)
    config = SchedulerConfig(16, 48, 64, async_scheduling=asynchronous)
    loop = Loop(config, CacheConfig(40, 4), num_spec=1, check=False, check_kv=False)
    done = 0
    for step in range(4_000):
        live = loop.scheduler.requests
        for _ in range(rng.randint(0, 2)):
            req_id = f"r{rng.randint(0, 40)}"
            if req_id not in live and len(live) < 30:
                prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 20))]
                loop.add(make_request(req_id, prompt, rng.randint(1, 20), eos=True))
                done += 1
        if live and rng.random() < 0.1:
            loop.abort(rng.choice(list(live)))
        running = [r.req_id for r in loop.scheduler.running]
        if running and rng.random() < 0.1:
            loop.scheduler.preempt(rng.choice(running))
        loop.step()
        if step % 100 == 0:
            assert len(loop.runner.rows) <= 16
    loop.run()
    assert done > 1_000
    assert loop.scheduler.kv.num_free_blocks == 39
    assert not loop.runner.rows
    assert not loop.scheduler.requests
    assert not loop.scheduler.running
    assert len(loop.scheduler.waiting) == 0
    assert loop.scheduler.num_steps_in_flight == 0
    assert loop.scheduler.kv.pool.num_cached <= 39
