from pathlib import Path

import numpy as np
import pytest
import torch

from mrv2lab.ops.fused_apply_write import fused_apply_write
from tests.ops.backends import (
    BACKENDS,
    CPU_BACKENDS,
    INTERPRET,
    Apply,
    caught,
    expect,
    implementation,
    mutant,
    pointer_table,
    poisoned,
)


def check(apply: Apply, num_rows: int = 3, widths: tuple[int, ...] = (5, 33), seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    tables = tuple(poisoned(num_rows, width) for width in widths)
    want = tuple(table.clone() for table in tables)
    cells = [(g, row) for g in range(len(widths)) for row in range(num_rows)]
    group_ids, rows, starts, lens, contents = [], [], [], [], []
    for k in rng.permutation(len(cells))[: len(cells) - 1]:
        g, row = cells[k]
        start = int(rng.integers(0, widths[g]))
        for j in range(start, int(rng.integers(start, widths[g] + 1))):
            contents.append(int(rng.integers(0, 1000)))
            want[g][row, j] = contents[-1]
        group_ids, rows, starts, lens = [*group_ids, g], [*rows, row], [*starts, start], [*lens, len(contents)]
    int32 = {"dtype": torch.int32}
    cu_lens = [0, *lens]
    expect(
        fused_apply_write,
        apply,
        {"tables": want},
        tables=tables,
        table_ptrs="tables",
        table_strides=torch.tensor(widths, dtype=torch.int64),
        group_ids=torch.tensor(group_ids, **int32),
        rows=torch.tensor(rows, **int32),
        starts=torch.tensor(starts, **int32),
        cu_lens=torch.tensor(cu_lens, **int32),
        contents=torch.tensor(contents, **int32),
        num_writes=len(rows),
        max_len=int(np.diff(cu_lens).max()),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(7,), (5, 33), (1, 9, 2)], ids=str)
def test_equals_brute_force(widths: tuple[int, ...], backend: str) -> None:
    check(implementation(fused_apply_write, backend), 4, widths, seed=len(widths))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_diff_of_several_blocks(backend: str) -> None:
    check(implementation(fused_apply_write, backend), 2, (2500, 3), seed=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_that_no_diff_is_for_may_be_left_out(backend: str) -> None:
    """Groups are counted through all the same."""
    table, int32 = torch.zeros(3, 4, dtype=torch.int32), {"dtype": torch.int32}
    diff = (torch.tensor(values, **int32) for values in ([1], [2], [1], [0, 2], [8, 9]))
    pointers, strides = pointer_table([table, table]), torch.tensor([1, 4])
    implementation(fused_apply_write, backend)((None, table), pointers, strides, *diff, 1, 1024)
    assert table.tolist() == [[0] * 4, [0] * 4, [0, 8, 9, 0]]


def check_ends_with_row(apply: Apply) -> None:
    """What no host stages: two diffs that are longer than what is left of their rows, one of them by more than that."""
    tables = (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32))
    diffs = ([0, 1], [1, 0], [2, 3], [0, 9, 18], range(1, 19))
    arrays = (torch.tensor(list(values), dtype=torch.int32) for values in diffs)
    apply(tables, pointer_table(tables), torch.tensor([4, 1]), *arrays, 2, 1024)
    assert [table.tolist() for table in tables] == [[[0] * 4, [0, 0, 1, 2], [0] * 4], [[0]] * 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_diff_ends_with_its_row(backend: str) -> None:
    check_ends_with_row(implementation(fused_apply_write, backend))


@pytest.mark.parametrize("backend", [INTERPRET])
def test_mutant_a_diff_that_goes_on_in_the_next_row(backend: str, tmp_path) -> None:
    """By one value, which lies within the table."""
    longer = ("column < stride", "column <= stride")
    assert caught(check_ends_with_row, implementation(mutant(fused_apply_write, *longer, tmp_path), backend))


def check_far_cells(apply: Apply, folder: Path) -> None:
    """Cell 2^32 + 5 of a table of 24 GB, of which the pages exist that are touched: in a file full of holes."""
    stride = 2**31
    table = torch.from_numpy(np.memmap(folder / "table", np.int32, "w+", shape=(3, stride)))
    diff = (torch.tensor(values, dtype=torch.int32) for values in ([0], [2], [5], [0, 1], [77]))
    apply((table,), pointer_table([table]), torch.tensor([stride]), *diff, 1, 1024)
    assert (int(table[2, 5]), int(table[0, 5])) == (77, 0)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_cells_beyond_int32(backend: str, tmp_path) -> None:
    check_far_cells(implementation(fused_apply_write, backend), tmp_path)


@pytest.mark.parametrize("backend", [INTERPRET])
def test_mutant_cells_of_int32(backend: str, tmp_path) -> None:
    """2 x 2^31 is 0 in int32: the diff lands in the first row."""
    narrow = ("tl.load(rows + w) * stride", "tl.load(rows + w) * stride.to(tl.int32)")
    apply = implementation(mutant(fused_apply_write, *narrow, tmp_path), backend)
    assert caught(lambda apply: check_far_cells(apply, tmp_path), apply)


MUTANTS = {
    "spec": [
        ("table, end = tables[group_ids[w]]", "table, end = tables[-1]"),
        ("cu_lens[w] : cu_lens[w + 1]", "cu_lens[0] : cu_lens[1]"),
    ],
    "interpret": [
        ("tl.load(table_ptrs + g)", "tl.load(table_ptrs + 1)"),
        ("tl.load(starts + w) + offset", "offset"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(fused_apply_write, *MUTANTS[backend][bug], tmp_path), backend))
