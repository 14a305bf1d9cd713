"""A runner without a model, and a core loop that checks the scheduler's promises after every schedule.

The fake runner keeps rows as MRV2 does and a KV cache whose slots hold a hash of the prefix they stand for, so that a
wrong prefix hit, a block reused too early or a table out of step shows as an ``AssertionError`` where it is read.
Tokens are a function of (request id, index), so every schedule of a request must give the same text.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mrv2lab.config import CacheConfig, SchedulerConfig, SpecConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.projections import project_mrv2
from mrv2lab.engine.request import Request, RequestStatus
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.protocol import ModelRunnerOutput, RequestData, SamplingParams, SchedulerOutput

EOS = 0
WRONG_DRAFT = 999


def token_at(req_id: str, index: int) -> int:
    """Output ``index`` of a request: 0 (EOS) one time in 16."""
    return zlib.crc32(f"{req_id}/{index}".encode()) % 16


def expected_output(request: Request) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens.append(token_at(request.req_id, len(tokens)))
        if tokens[-1] in request.stop_set:
            break
    return tokens


def drafts_for(req_id: str, index: int, count: int) -> list[int]:
    """Drafts for outputs ``index``...: the first few are right, how many depends on (request, index)."""
    right = zlib.crc32(f"{req_id}/{index}/accept".encode()) % (count + 1)
    return [token_at(req_id, index + i) if i < right else WRONG_DRAFT for i in range(count)]


@dataclass
class Row:
    prompt_len: int
    tokens: list[int]
    computed: int
    table: list[int]
    chain: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def chain_to(self, length: int) -> list[int]:
        for position in range(len(self.chain), length):
            parent = self.chain[-1] if self.chain else 0
            self.chain.append(hash((parent, self.tokens[position])))
        return self.chain


class FakeRunner:
    """Executes neutral scheduler outputs at once, in order, like a device behind one stream."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, num_spec: int = 0, check_kv: bool = True) -> None:
        self.config, self.block_size, self.num_spec, self.check_kv = config, cache.block_size, num_spec, check_kv
        self.rows: dict[str, Row] = {}
        self.kv: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        message = project_mrv2(output)
        for req_id in message.removed_req_ids:
            self.rows.pop(req_id, None)
        for data in message.new_reqs:
            self._add(data)
        cached = message.cached_reqs
        assert set(cached.new_block_ids) <= set(cached.req_ids)
        for req_id, computed, num_output in zip(
            cached.req_ids, cached.num_computed_tokens.tolist(), cached.num_output_tokens.tolist(), strict=True
        ):
            row = self.rows[req_id]
            assert computed >= row.computed, "the scheduler's count is an upper bound"
            assert num_output >= len(row.tokens) - row.prompt_len
            if not self.num_spec:
                assert computed == row.computed
                assert num_output == len(row.tokens) - row.prompt_len
            row.table += cached.new_block_ids.get(req_id, ([],))[0]
        assert len(self.rows) <= self.config.max_num_reqs

        # As on the device, the whole batch writes its KV before anyone reads.
        plans = {r: self._write(r, n, output) for r, n in message.num_scheduled_tokens.items()}
        sampled: dict[str, list[int]] = {}
        for req_id, (end, new_tokens) in plans.items():
            row = self.rows[req_id]
            if self.check_kv:
                for position, value in enumerate(row.chain[:end]):
                    slot = (row.table[position // self.block_size], position % self.block_size)
                    assert self.kv.get(slot) == value, f"{req_id}: KV of position {position} is not its own"
            row.computed = end
            row.drafts = drafts_for(req_id, len(row.tokens) - row.prompt_len, self.num_spec)
            sampled[req_id] = new_tokens
        # MRV2 sorts its batch: the order is the runner's own.
        req_ids = sorted(sampled)
        return ModelRunnerOutput(output.step, req_ids, [sampled[r] for r in req_ids])

    def _add(self, data: RequestData) -> None:
        assert data.req_id not in self.rows, "removal goes first"
        assert data.num_computed_tokens < len(data.all_token_ids), "one token must be computed"
        row = Row(data.prompt_len, list(data.all_token_ids), data.num_computed_tokens, list(data.block_ids[0]))
        self.rows[data.req_id] = row

    def _write(self, req_id: str, n: int, output: SchedulerOutput) -> tuple[int, list[int]]:
        row, start = self.rows[req_id], self.rows[req_id].computed
        drafts = output.scheduled_draft_tokens.get(req_id, [])
        known = start + n - len(drafts)
        assert start < known <= len(row.tokens), f"{req_id}: {known} known tokens asked of {len(row.tokens)}"
        assert start + n <= self.config.max_model_len
        slots = min(start + n + self.num_spec, self.config.max_model_len)
        assert slots <= len(row.table) * self.block_size, f"{req_id}: {slots} slots needed, table {row.table}"
        new_tokens: list[int] = []
        if known == len(row.tokens):
            proposed = row.drafts[: len(drafts)]
            if drafts and drafts[0] != -1:
                assert drafts == proposed
            index = len(row.tokens) - row.prompt_len
            for draft in [*proposed, None]:
                new_tokens.append(token_at(req_id, index + len(new_tokens)))
                if draft != new_tokens[-1]:
                    break
        else:
            assert not drafts
        end = known + max(len(new_tokens) - 1, 0)
        row.tokens += new_tokens
        if self.check_kv:
            chain = row.chain_to(end)
            for position in range(start, start + n):
                slot = (row.table[position // self.block_size], position % self.block_size)
                assert slot[0] != 0, "the null block is nobody's"
                self.kv[slot] = chain[position] if position < end else -1
        return end, new_tokens


class Loop:
    """The core loop of v1.md 1.7, sync (depth 1) or async (depth 2), with every promise checked."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_spec: int = 0,
        check: bool = True,
        check_kv: bool = True,
    ) -> None:
        kind = AsyncScheduler if config.async_scheduling else Scheduler
        self.scheduler = kind(config, cache, SpecConfig(num_spec))
        self.runner = FakeRunner(config, cache, num_spec, check_kv)
        self.depth = config.max_concurrent_steps
        self.check = check
        self.queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: list[SchedulerOutput] = []
        self.text: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.admitted: set[str] = set()
        self._tables: dict[Request, list[int]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)
        self.text[request.req_id] = []
        self.reasons.pop(request.req_id, None)

    def abort(self, req_id: str) -> None:
        self.reasons[req_id] = str(self.scheduler.abort(req_id).finish_reason)

    def busy(self) -> bool:
        return self.scheduler.has_work() or bool(self.queue)

    def step(self) -> None:
        if self.scheduler.has_work() and len(self.queue) < self.depth:
            output = self.scheduler.schedule()
            self.outputs.append(output)
            if self.check:
                check_output(self.scheduler, output)
                self._check_append_only()
            self.queue.append((output, self.runner.execute(output)))
            if self.check:
                running = {r.req_id: self.scheduler.kv.block_ids(r)[0] for r in self.scheduler.running}
                assert running == {req_id: row.table for req_id, row in self.runner.rows.items()}
            if len(self.queue) < self.depth:
                return
        if self.queue:
            self.update()

    def update(self) -> None:
        output, result = self.queue.popleft()
        for req_id, tokens, reason in self.scheduler.update_from_output(output, result):
            self.text[req_id] += tokens
            if reason is not None:
                self.reasons[req_id] = reason
        if self.depth == 1:
            self.scheduler.update_draft_token_ids({r: row.drafts for r, row in self.runner.rows.items()})
        if self.check:
            check_pool(self.scheduler)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.busy():
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.decisions}")

    def _check_append_only(self) -> None:
        kv = self.scheduler.kv
        now = {r: kv.block_ids(r)[0] for r in self.scheduler.running}
        preempted = self.outputs[-1].preempted
        for request, table in self._tables.items():
            if request in now and request.req_id not in preempted:
                assert now[request][: len(table)] == table, f"{request}: its table changed under it"
        self._tables = now


def check_output(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """The invariants of v1.md 1.4 on a schedule."""
    config, keys = scheduler.config, output.num_scheduled_tokens
    total = sum(keys.values())
    assert total == output.total_num_scheduled_tokens <= config.max_num_batched_tokens
    assert all(n > 0 for n in keys.values())
    assert len(scheduler.running) <= config.max_num_reqs
    groups = [r.req_id for r in output.new] + [r.req_id for r in output.resumed] + output.continued.req_ids
    assert sorted(groups) == sorted(keys), "new, continued and resumed partition the keys"
    running = {r.req_id for r in scheduler.running}
    assert set(keys) <= running
    assert output.unscheduled == running - set(keys)
    for data in output.new + output.resumed:
        assert data.num_computed_tokens <= len(data.all_token_ids) - 1
    assert all(len(data.all_token_ids) == data.prompt_len for data in output.new)
    for request in scheduler.running:
        drafts = len(output.scheduled_draft_tokens.get(request.req_id, ()))
        assert request.num_computed_tokens <= request.num_tokens + request.num_output_placeholders + drafts
        assert request.num_stale_output_tokens == 0, "re-admitted before its output had drained"
        assert request.num_confirmed_tokens >= 0
    for request in scheduler.waiting:
        assert request.req_id not in scheduler.kv.tables
        assert request.num_computed_tokens == 0
        assert request.num_stale_output_tokens == request.num_in_flight_tokens
    check_pool(scheduler)


def check_pool(scheduler: Scheduler) -> None:
    """Each reference is counted, each free block is in the list once, and only published blocks are shared."""
    pool, held = scheduler.kv.pool, dict[int, int]()
    for tables in scheduler.kv.tables.values():
        ids = [block.block_id for table in tables for block in table]
        assert len(set(ids)) == len(ids), "a block twice in one request"
        for block_id in ids:
            held[block_id] = held.get(block_id, 0) + 1
    assert held == {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt}
    for block_id, count in held.items():
        assert count == 1 or pool.blocks[block_id].key is not None, "an unpublished block is shared"
    free = [block.block_id for block in pool.free_list]
    assert len(set(free)) == len(free) == pool.num_free
    assert set(free) == {block.block_id for block in pool.blocks[1:]} - set(held)
    keyed = [block for block in pool.blocks if block.key is not None]
    assert pool.num_cached == len(keyed)
    for table in (table for tables in scheduler.kv.tables.values() for table in tables):
        published = [block.key is not None for block in table]
        assert published == sorted(published, reverse=True), "published blocks are a prefix of the table"


def pool_state(scheduler: Scheduler) -> Any:
    """Everything an allocation may change."""
    pool = scheduler.kv.pool
    return (
        [(block.ref_cnt, block.key) for block in pool.blocks],
        [block.block_id for block in pool.free_list],
        {r: [[b.block_id for b in table] for table in tables] for r, tables in scheduler.kv.tables.items()},
        [(r.num_slots, r.next_hash_at) for r in scheduler.requests.values()],
    )


def watch_failed_allocations(scheduler: Scheduler) -> list[int]:
    """Check that an allocation that fails changes nothing; returns a list that grows by one for each failure."""
    allocate, failures = scheduler.kv.allocate_slots, list[int]()

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = pool_state(scheduler)
        result = allocate(*args, **kwargs)
        if result is None:
            failures.append(len(failures))
            assert pool_state(scheduler) == before, "a failed allocation had a side effect"
        return result

    scheduler.kv.allocate_slots = checked  # type: ignore[method-assign]
    return failures


def make_request(req_id: str, prompt: list[int] | int, max_tokens: int = 4, **kwargs: Any) -> Request:
    """A request that also stops at EOS if asked to (``eos=True``); a prompt given by its length counts up from 1."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    eos = (EOS,) if kwargs.pop("eos", False) else ()
    return Request(req_id, tokens, SamplingParams(max_tokens=max_tokens), eos_token_ids=eos, **kwargs)


def statuses(scheduler: Scheduler) -> dict[str, RequestStatus]:
    return {req_id: request.status for req_id, request in scheduler.requests.items()}
