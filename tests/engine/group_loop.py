"""The checking core loop over several KV-cache groups: one pool, one hash a slot, each window read from its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrv2lab.config import CacheConfig, SchedulerConfig, SpecConfig
from mrv2lab.engine.projections import project_mrv2
from mrv2lab.engine.request import Request
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.protocol import ModelRunnerOutput, RequestData, SchedulerOutput
from tests.engine.harness import FakeRunner, Loop, Row


@dataclass
class GroupRow(Row):
    """A row with a table a group; ``table`` is the first one."""

    tables: list[list[int]] = field(default_factory=list)


class GroupRunner(FakeRunner):
    """Keeps each table as the device does: appended to, with stale ids where the scheduler nulled entries."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, windows: Sequence[int | None], num_spec: int
    ) -> None:
        super().__init__(config, cache, num_spec, check_kv=False)
        self.windows = windows
        # (block, offset) -> the group and the hash of the prefix: groups share the pool and the memory
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        message = project_mrv2(output)
        starts = {data.req_id: data.num_computed_tokens for data in message.new_reqs}
        ends = {r: row.computed for r, row in self.rows.items()} | starts
        for req_id, blocks in message.cached_reqs.new_block_ids.items():
            row = self.rows[req_id]
            assert isinstance(row, GroupRow)
            assert len({len(ids) for ids in blocks}) == 1, "tables stay equally long"
            for table, ids in zip(row.tables[1:], blocks[1:], strict=True):
                table += ids
        result = super().execute(output)
        live = message.num_scheduled_tokens
        for req_id, n in live.items():  # the whole batch writes before anyone reads
            self._write_slots(req_id, ends[req_id], n)
        for req_id in live:
            self._read_slots(req_id, ends[req_id])
        return result

    def _add(self, data: RequestData) -> None:
        tables = [list(ids) for ids in data.block_ids]
        tokens = list(data.all_token_ids)
        self.rows[data.req_id] = GroupRow(data.prompt_len, tokens, data.num_computed_tokens, tables[0], tables=tables)

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def _write_slots(self, req_id: str, start: int, n: int) -> None:
        row = self.rows[req_id]
        assert isinstance(row, GroupRow)
        chain = row.chain_to(row.computed)
        for g, table in enumerate(row.tables):
            for position in range(start, start + n):
                slot = self._slot(table, position)
                assert slot[0] != 0, "the null block is nobody's"
                self.slots[slot] = g, chain[position] if position < row.computed else -1

    def _read_slots(self, req_id: str, start: int) -> None:
        """What the step's first query sees, and its later ones."""
        row = self.rows[req_id]
        assert isinstance(row, GroupRow)
        for g, (window, table) in enumerate(zip(self.windows, row.tables, strict=True)):
            first = 0 if window is None else max(start - window + 1, 0)
            for position in range(first, row.computed):
                found = self.slots.get(self._slot(table, position))
                assert found == (g, row.chain[position]), f"{req_id}: group {g}, position {position} holds {found}"


class GroupLoop(Loop):
    """``Loop`` with windows; its checks for one full group are replaced."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, windows: Sequence[int | None], num_spec: int = 0
    ) -> None:
        super().__init__(config, cache, num_spec, check=False)
        self.scheduler = type(self.scheduler)(config, cache, SpecConfig(num_spec), windows)
        self.runner = GroupRunner(config, cache, windows, num_spec)

    def step(self) -> None:
        super().step()
        check_groups(self.scheduler)


def check_groups(scheduler: Scheduler) -> None:
    """Every reference is counted, the null block is nobody's, nulls stand in front, and nothing needed is nulled."""
    kv, held = scheduler.kv, dict[int, int]()
    null = kv.pool.null_block
    assert null.ref_cnt == 0 and null.key is None
    for req_id, tables in kv.tables.items():
        request: Request = scheduler.requests[req_id]
        position = request.num_computed_tokens - request.num_output_placeholders
        assert len({len(table) for table in tables}) == 1
        ids: list[int] = []
        for group, table in zip(kv.groups, tables, strict=True):
            nulls = [block is null for block in table]
            assert nulls == sorted(nulls, reverse=True), "a gap behind the window's start"
            assert sum(nulls) <= group.first_needed(max(position, request.num_cached_tokens)), f"{req_id}: needed"
            ids += [block.block_id for block in table if block is not null]
        assert len(set(ids)) == len(ids), "a block twice in one request"
        for block_id in ids:
            held[block_id] = held.get(block_id, 0) + 1
    assert held == {block.block_id: block.ref_cnt for block in kv.pool.blocks if block.ref_cnt}
    free = [block.block_id for block in kv.pool.free_list]
    assert sorted([*free, *held]) == list(range(1, len(kv.pool.blocks))), "a block leaked, or is free and held"


def finish(loop: GroupLoop, requests: list[Request]) -> Any:
    """Add all, run to the end; the texts."""
    for request in requests:
        loop.add(request)
    loop.run()
    assert loop.scheduler.kv.num_free_blocks == loop.scheduler.kv.pool.num_usable, "a block leaked"
    return loop.text
