"""V1's block tables: edits against lists, null blocks behind them, the whole rectangle in each commit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mrv2lab.runner_v1.block_table import BlockTable, MultiGroupBlockTable
from tests.runner_v1.batches import BLOCK_SIZES, MAX_LEN, PlainTable

ROWS = 4


def make() -> MultiGroupBlockTable:
    return MultiGroupBlockTable(BLOCK_SIZES, ROWS, MAX_LEN, PlainTable)


# -- literal rows ------------------------------------------------------------------------------------------------------


def test_one_table_a_group_wide_enough_for_max_model_len() -> None:
    tables = MultiGroupBlockTable((4, 5), 3, 24, PlainTable)
    assert [group.table.gpu.shape for group in tables.groups] == [(3, 6), (3, 5)]
    assert sorted(tables.tables()) == sorted(tables.host_tables()) == ["block_table.0", "block_table.1"]
    assert len(tables) == 2 and tables.block_sizes == (4, 5)


def test_append_adds_behind_and_add_replaces() -> None:
    tables = make()
    tables.add_row([[3, 4], [5]], 1)
    tables.append_row([[6], []], 1)
    assert tables[0].np[1].tolist() == [3, 4, 6, 0, 0, 0]
    assert tables[1].np[1].tolist() == [5, 0, 0]
    tables.add_row([[9], [8, 7]], 1)
    assert tables[0].np[1].tolist() == [9, 0, 0, 0, 0, 0]
    assert tables[1].np[1].tolist() == [8, 7, 0]
    assert [group.num_blocks_per_row.tolist() for group in tables.groups] == [[0, 1, 0, 0], [0, 2, 0, 0]]


def test_move_clears_its_source_and_says_how_much_it_moved() -> None:
    tables = make()
    tables.add_row([[3, 4], [5]], 2)
    tables.add_row([[9, 9, 9], []], 0)
    # 2 + 1 ids and 2 counts, int32.
    assert tables.move_row(2, 0) == 4 * (2 + 1 + 2)
    assert tables[0].np[[0, 2]].tolist() == [[3, 4, 0, 0, 0, 0], [0] * 6]


def test_swap_exchanges_rows_of_different_length() -> None:
    tables = make()
    tables.add_row([[3, 4], [5]], 0)
    tables.add_row([[6], []], 3)
    # Both rows over the longer of the two: 2 and 1 ids, and their counts.
    assert tables.swap_row(0, 3) == 2 * 4 * (2 + 1 + 2)
    assert tables[0].np[[0, 3], :2].tolist() == [[6, 0], [3, 4]]
    assert tables[1].num_blocks_per_row.tolist() == [0, 0, 0, 1]


def test_commit_sends_the_whole_rectangle_changed_or_not() -> None:
    tables = make()
    tables.add_row([[3, 4], [5]], 0)
    tables.add_row([[6], [7]], 1)
    for _ in range(3):
        tables.commit(2)
    assert [group.table.published for group in tables.groups] == [[2, 2, 2]] * 2
    assert tables.gpu[0][:2].tolist() == [[3, 4, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]
    # What is past the batch on the device is whatever was there: padded graphs must clear it themselves.
    assert tables.gpu[0][2:].unique().tolist() == [77]
    tables.append_row([[8], []], 1)
    assert tables.gpu[0][1].tolist() == [6, 0, 0, 0, 0, 0]


def test_reset_clears_every_row() -> None:
    tables = make()
    tables.add_row([[3, 4], [5]], 2)
    tables.reset()
    assert not any(group.np.any() or group.num_blocks_per_row.any() for group in tables.groups)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_changes_no_group() -> None:
    tables = make()
    tables.add_row([[1], [2, 3]], 0)
    with pytest.raises(RuntimeError, match=r"4 blocks in group 1, but max_model_len allows 3; raise max_model_len"):
        tables.append_row([[4], [5, 6]], 0)
    with pytest.raises(RuntimeError, match=r"7 blocks in group 0, but max_model_len allows 6"):
        tables.add_row([[1] * 7, []], 0)
    with pytest.raises(ValueError, match=r"for 1 KV-cache groups, but there are 2; give one list a group"):
        tables.append_row([[4]], 0)
    assert tables[0].np[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert tables[1].np[0].tolist() == [2, 3, 0]


# -- any sequence of edits against lists -------------------------------------------------------------------------------

# Hypothesis draws lists of about five where it may; what is too much shrinks to "nothing".
EDITS = st.lists(
    st.tuples(st.sampled_from("nothing add append append move swap clear".split()), st.integers(0, 2**16)),
    min_size=10,
    max_size=30,
)


def follow(script: list[tuple[str, int]]) -> None:
    tables = make()
    want: list[list[list[int]]] = [[[] for _ in BLOCK_SIZES] for _ in range(ROWS)]
    for edit, seed in script:
        draw = random.Random(seed)
        row, other = draw.sample(range(ROWS), 2)
        new = [[draw.randint(1, 99) for _ in range(draw.randint(0, 2))] for _ in BLOCK_SIZES]
        if edit == "add":
            tables.add_row(new, row)
            want[row] = new
        elif edit == "append":
            longer = [old + ids for old, ids in zip(want[row], new, strict=True)]
            if all(len(ids) <= MAX_LEN // size for ids, size in zip(longer, BLOCK_SIZES, strict=True)):
                tables.append_row(new, row)
                want[row] = longer
        elif edit == "move":
            tables.move_row(row, other)
            want[other], want[row] = want[row], [[] for _ in BLOCK_SIZES]
        elif edit == "swap":
            tables.swap_row(row, other)
            want[row], want[other] = want[other], want[row]
        elif edit == "clear":
            tables.clear_row(row)
            want[row] = [[] for _ in BLOCK_SIZES]
        for g, group in enumerate(tables.groups):
            ids = [row[g] for row in want]
            assert group.num_blocks_per_row.tolist() == list(map(len, ids))
            assert group.np.tolist() == [one + [0] * (group.max_num_blocks - len(one)) for one in ids]


@settings(max_examples=150, deadline=None)
@given(EDITS)
def test_tables_hold_the_blocks_and_null_blocks_behind_them(script: list[tuple[str, int]]) -> None:
    follow(script)


# -- mutants -----------------------------------------------------------------------------------------------------------


def move_leaves_its_source(self: BlockTable, src: int, dst: int) -> int:
    ids = self.np[src, : self.num_blocks_per_row[src]].tolist()
    self.clear_row(dst)
    self.append_row(ids, dst)
    return 0


def move_leaves_a_stale_tail(self: BlockTable, src: int, dst: int) -> int:
    count = self.num_blocks_per_row[src]
    self.np[dst, :count] = self.np[src, :count]
    self.num_blocks_per_row[dst] = count
    self.clear_row(src)
    return 0


def swap_of_the_first_rows_length(self: BlockTable, i: int, j: int) -> int:
    count = self.num_blocks_per_row[i]
    self.np[[i, j], :count] = self.np[[j, i], :count]
    self.num_blocks_per_row[[i, j]] = self.num_blocks_per_row[[j, i]]
    return 0


def append_from_column_0(self: BlockTable, block_ids: list[int], row: int) -> None:
    self.np[row, : len(block_ids)] = block_ids
    self.num_blocks_per_row[row] = len(block_ids)


def clear_the_count_only(self: BlockTable, row: int) -> None:
    self.num_blocks_per_row[row] = 0


def clear_the_ids_only(self: BlockTable, row: int) -> None:
    self.np[row] = 0


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("move_row", move_leaves_its_source),
        ("move_row", move_leaves_a_stale_tail),
        ("swap_row", swap_of_the_first_rows_length),
        ("append_row", append_from_column_0),
        ("clear_row", clear_the_count_only),
        ("clear_row", clear_the_ids_only),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, method: str, mutant: Callable[..., Any]) -> None:
    monkeypatch.setattr(BlockTable, method, mutant)

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(EDITS)
    def prop(script: list[tuple[str, int]]) -> None:
        follow(script)

    with pytest.raises((AssertionError, ValueError)):
        prop()
