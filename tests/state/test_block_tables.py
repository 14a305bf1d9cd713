"""Block tables: appended, overwritten, gathered in batch order, and nothing stale behind the batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.state import BlockTables
from tests.runtime.machines import Steps, log, marks

SAFE = ["barrier", "pinned_copy", "uva_pool"]


def make_tables(rt: Runtime, sizes: tuple[int, ...] = (4,), policy: Any = None, tokens: int = 128) -> BlockTables:
    return BlockTables(
        rt,
        policy or POLICIES["uva_pool"](rt),
        block_sizes=sizes,
        max_num_reqs=8,
        max_model_len=128,
        max_num_batched_tokens=tokens,
    )


def indices(rt: Runtime, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return rt.adopt(torch.tensor(values, dtype=dtype), "indices")


def row_of(rt: Runtime, tables: BlockTables, row: int, g: int = 0) -> list[int]:
    values: list[int] = rt.read(tables.row_tables[g].gpu)[row, : tables.num_blocks.np[g, row]].tolist()
    return values


def gathered(rt: Runtime, tables: BlockTables, rows: list[int], padded: int = 0) -> torch.Tensor:
    (table,) = tables.gather(indices(rt, rows), len(rows), padded or len(rows))
    return rt.read(table)


def test_new_requests_overwrite_and_running_ones_append(rt: Runtime) -> None:
    tables = make_tables(rt, (4, 8))
    tables.append_block_ids(3, ([5, 6], [7]), overwrite=True)
    tables.apply_staged_writes()
    tables.append_block_ids(3, ([8], [9, 10]), overwrite=False)
    tables.append_block_ids(3, ([11], []), overwrite=False)
    tables.apply_staged_writes()
    assert (row_of(rt, tables, 3), row_of(rt, tables, 3, 1)) == ([5, 6, 8, 11], [7, 9, 10])
    tables.append_block_ids(3, ([1], []), overwrite=True)  # the row has a new owner
    tables.apply_staged_writes()
    assert (row_of(rt, tables, 3), row_of(rt, tables, 3, 1)) == ([1], [])
    assert rt.read(tables.num_blocks.gpu)[:, 3].tolist() == [1, 0]


def test_all_groups_go_in_one_launch(rt: Runtime) -> None:
    tables = make_tables(rt, (4, 8, 16))
    log(rt).clear()
    for row in range(8):
        tables.append_block_ids(row, ([row], [row, row], [row]), overwrite=True)
    assert {name: len(diffs) for name, diffs in tables.staged().items()} == {f"block_table.{g}": 8 for g in range(3)}
    tables.apply_staged_writes()
    assert [mark.name for mark in marks(rt, "kernel")] == ["fused_apply_write"]
    assert tables.staged() == {}
    log(rt).clear()
    tables.apply_staged_writes()
    assert log(rt).marks == []


def test_a_row_holds_max_model_len_and_no_more(cpu: CpuRuntime) -> None:
    tables = make_tables(cpu, (4, 16))
    tables.append_block_ids(0, (list(range(1, 32)), [1]), overwrite=True)
    tables.append_block_ids(0, ([32], []), overwrite=False)
    before = tables.staged()
    for ids, overwrite, total, g in (
        (([33], []), False, 33, 0),
        (([], [1] * 8), False, 9, 1),
        (([1] * 33, []), True, 33, 0),
    ):
        with pytest.raises(
            RuntimeError, match=f"row 0 would hold {total} blocks in group {g}, but max_model_len allows"
        ):
            tables.append_block_ids(0, ids, overwrite=overwrite)
    with pytest.raises(ValueError, match="shorter"):
        tables.append_block_ids(0, ([33],), overwrite=True)
    assert tables.num_blocks.np[:, 0].tolist() == [32, 1]
    assert {name: len(diffs) for name, diffs in tables.staged().items()} == {name: len(d) for name, d in before.items()}


def listed(tables: BlockTables) -> dict[str, list[Any]]:
    return {
        name: [(diff.row, diff.start, diff.values.tolist()) for diff in diffs]
        for name, diffs in tables.staged().items()
    }


def check_extends(cpu: CpuRuntime) -> None:
    """Blocks of several rows at once, one each or several, against rows that got them one by one."""
    choose = random.Random(3)
    one, other = make_tables(cpu, (4, 16)), make_tables(cpu, (4, 16))
    for tables in (one, other):
        for row in range(8):
            tables.append_block_ids(row, ([100 + row], [200 + row]), overwrite=True)
        tables.apply_staged_writes()
    for sizes in ((1, 1), (2, 1), (1, 0), (3, 0), (0, 0)):
        rows = choose.sample(range(8), 5)
        ids = [tuple([choose.randrange(1, 99) for _ in range(size)] for size in sizes) for _ in rows]
        if sizes == (3, 0):
            ids[2] = ([], [7])
        one.extend_block_ids(np.array(rows, np.int32), ids)
        for row, lists in zip(rows, ids, strict=True):
            other.append_block_ids(row, lists, overwrite=False)
        assert listed(one) == listed(other)
        for tables in (one, other):
            tables.apply_staged_writes()
        assert (one.num_blocks.np == other.num_blocks.np).all()
        assert all(row_of(cpu, one, row, g) == row_of(cpu, other, row, g) for row in range(8) for g in (0, 1))


def test_many_rows_get_blocks_at_once(cpu: CpuRuntime) -> None:
    check_extends(cpu)


def test_of_many_rows_one_that_is_full_stages_nothing(cpu: CpuRuntime) -> None:
    tables = make_tables(cpu, (4, 16))
    tables.append_block_ids(5, ([1], list(range(1, 9))), overwrite=True)
    tables.apply_staged_writes()
    rows = np.array([2, 5], np.int32)
    with pytest.raises(RuntimeError, match="row 5 would hold 9 blocks in group 1, but max_model_len allows 8"):
        tables.extend_block_ids(rows, [([1], [2]), ([3], [4])])
    with pytest.raises(ValueError, match="1 lists of blocks for 2"):
        tables.extend_block_ids(rows, [([1],), ([3],)])
    with pytest.raises(ValueError, match="longer"):
        tables.extend_block_ids(rows, [([1],), ([3], [4])])
    assert tables.staged() == {}
    assert tables.num_blocks.np.sum() == 9


def test_mutant_blocks_that_are_not_counted(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = BlockTables.extend_block_ids

    def forgetful(self: BlockTables, rows: Any, block_ids: Any) -> None:
        before = self.num_blocks.np.copy()
        honest(self, rows, block_ids)
        self.num_blocks.np[:, rows[-1]] = before[:, rows[-1]]

    monkeypatch.setattr(BlockTables, "extend_block_ids", forgetful)
    with pytest.raises(AssertionError):
        check_extends(cpu)


def test_an_owner_that_left_before_the_apply_leaves_nothing(cpu: CpuRuntime) -> None:
    tables = make_tables(cpu)
    tables.append_block_ids(0, ([1, 2, 3],), overwrite=True)
    tables.append_block_ids(0, ([9],), overwrite=True)
    tables.apply_staged_writes()
    assert row_of(cpu, tables, 0) == [9]


@pytest.mark.parametrize("policy", SAFE)
def test_random_steps_equal_a_model(rt: Runtime, policy: str) -> None:
    choose, transfers = random.Random(5), POLICIES[policy](rt)
    tables, steps = make_tables(rt, (8, 16), transfers), Steps(rt, transfers)
    model: dict[int, tuple[list[int], list[int]]] = {}
    kept = []
    for _ in range(25):
        with steps.step():
            for row in choose.sample(range(8), choose.randrange(1, 5)):
                ids = tuple([choose.randrange(1, 99) for _ in range(choose.randrange(3))] for _ in range(2))
                fresh = row not in model or choose.random() < 0.3 or len(model[row][0]) > 13 or len(model[row][1]) > 5
                tables.append_block_ids(row, ids, overwrite=fresh)
                model[row] = tuple([] if fresh else list(old) for old in model.get(row, ([], [])))  # type: ignore[assignment]
                for old, more in zip(model[row], ids, strict=True):
                    old.extend(more)
            tables.apply_staged_writes()
            rows = choose.sample(sorted(model), min(len(model), choose.randrange(1, 9)))
            inputs = tables.gather(indices(rt, rows), len(rows), len(rows))
            copies = [rt.empty(tuple(one.shape), torch.int32, name="kept") for one in inputs]
            for copy, one in zip(copies, inputs, strict=True):
                rt.run("copy", copy, one, reads=(one,), writes=(copy,))
            kept.append((copies, [[list(ids) for ids in model[row]] for row in rows]))
    for copies, right in kept:
        for g, copy in enumerate(copies):
            values = rt.read(copy)
            for i, ids in enumerate(right):
                assert values[i, : len(ids[g])].tolist() == ids[g]


def test_rows_left_by_a_larger_batch_are_cleared(rt: Runtime) -> None:
    """mrv2.md 4.3 #29: a batch of 8, then 2 under an 8-request graph: rows 2..7 read the null block."""
    tables = make_tables(rt)
    for row in range(8):
        tables.append_block_ids(row, ([row + 1] * 3,), overwrite=True)
    tables.apply_staged_writes()
    assert gathered(rt, tables, list(range(8)))[:, :3].tolist() == [[row + 1] * 3 for row in range(8)]
    two = gathered(rt, tables, [5, 1], padded=8)
    assert two[:2, :3].tolist() == [[6] * 3, [2] * 3]
    assert two[2:].tolist() == [[0] * 32] * 6
    gathered(rt, tables, list(range(8)))
    gathered(rt, tables, [3])  # not padded: the fixed table is cleared all the same
    assert rt.read(tables.input_tables[0])[1:].abs().sum() == 0
    tables.reset()
    rt.raw(tables.input_tables[0]).fill_(7)
    gathered(rt, tables, [3])
    assert rt.read(tables.input_tables[0])[1:].abs().sum() == 0


def test_no_stale_slot_behind_the_tokens(rt: Runtime) -> None:
    """mrv2.md 4.3 #22: 100 tokens, then 5 padded to 8: slots[5:T] are all -1."""
    tables = make_tables(rt)
    tables.append_block_ids(2, (list(range(1, 26)),), overwrite=True)
    tables.append_block_ids(6, ([30, 31],), overwrite=True)
    tables.apply_staged_writes()
    positions = indices(rt, list(range(128)), torch.int64)
    slots = tables.compute_slot_mappings(indices(rt, [2]), indices(rt, [0, 100]), positions, 1)
    assert rt.read(slots)[0].tolist() == [*range(4, 104), *[-1] * 28]
    slots = tables.compute_slot_mappings(indices(rt, [6]), indices(rt, [0, 5]), positions, 1)
    assert rt.read(slots)[0].tolist() == [120, 121, 122, 123, 124] + [-1] * 123


def test_slots_of_two_groups(rt: Runtime) -> None:
    """Appendix A3 in group 0; group 1 has another block size."""
    tables = make_tables(rt, (16, 4))
    tables.append_block_ids(1, ([7, 3, 9], [1, 2, 3, 4, 5]), overwrite=True)
    tables.apply_staged_writes()
    slots = tables.compute_slot_mappings(
        indices(rt, [1]), indices(rt, [0, 3]), indices(rt, [15, 16, 17], torch.int64), 1
    )
    assert rt.read(slots)[:, :4].tolist() == [[127, 48, 49, -1], [19, 20, 21, -1]]


def test_addresses_never_change(rt: Runtime) -> None:
    tables = make_tables(rt)

    def addresses() -> list[int]:
        return [t.data_ptr() for t in (*tables.input_tables, tables.slot_mappings, tables.row_tables[0].gpu)]

    before = addresses()
    for row in range(8):
        tables.append_block_ids(row, ([1] * 30,), overwrite=True)
        tables.apply_staged_writes()
        rt.synchronize()
        (table,) = tables.gather(indices(rt, [row]), 1, 1)
        assert table.data_ptr() == before[0]
    assert addresses() == before


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_mutant_a_gather_that_forgets_the_larger_batch(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = BlockTables.gather

    def forgetful(self: BlockTables, idx_mapping: torch.Tensor, num_reqs: int, padded: int) -> Any:
        self._num_dirty_rows = 0
        return gather(self, idx_mapping, num_reqs, padded)

    monkeypatch.setattr(BlockTables, "gather", forgetful)
    with pytest.raises(AssertionError):
        test_rows_left_by_a_larger_batch_are_cleared(cpu)


def test_mutant_a_new_owner_that_appends(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    append = BlockTables.append_block_ids
    monkeypatch.setattr(
        BlockTables, "append_block_ids", lambda self, row, ids, overwrite: append(self, row, ids, overwrite=False)
    )
    with pytest.raises(AssertionError):
        test_new_requests_overwrite_and_running_ones_append(cpu)


def test_mutant_slots_without_a_tail(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mrv2lab.ops.slot_mapping import slot_mapping

    spec = slot_mapping.spec

    def no_tail(*args: Any) -> None:
        slots, kept = args[7], np.array(args[7])
        spec(*args)
        end = args[1][args[8]]
        slots[:, end:] = kept[:, end:]

    monkeypatch.setattr(slot_mapping, "spec", no_tail)
    with pytest.raises(AssertionError):
        test_no_stale_slot_behind_the_tokens(cpu)
