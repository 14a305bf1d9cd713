import numpy as np
import pytest
import torch

from mrv2lab.ops.gather_block_tables import gather_block_tables
from tests.ops.backends import (
    BACKENDS,
    CPU_BACKENDS,
    POISON,
    Apply,
    caught,
    expect,
    implementation,
    mutant,
    pointer_table,
    poisoned,
    run,
)


def check(apply: Apply, num_reqs: int = 3, num_rows: int = 5, widths: tuple[int, ...] = (4, 9), seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    R = num_rows + 3
    tables = tuple(torch.tensor(rng.integers(1, 99, (R, width)), dtype=torch.int32) for width in widths)
    num_blocks = torch.tensor(np.array([rng.integers(0, width + 1, R) for width in widths]), dtype=torch.int32)
    rows = rng.permutation(R)[:num_reqs].tolist()
    want = []
    for g, width in enumerate(widths):
        live = [tables[g][row, : num_blocks[g, row]].tolist() for row in rows]
        lines = [ids + [POISON] * (width - len(ids)) for ids in live]
        lines += [[0] * width] * (num_rows - num_reqs) + [[POISON] * width] * (R - num_rows)
        want.append(torch.tensor(lines))
    expect(
        gather_block_tables,
        apply,
        {"input_tables": tuple(want)},
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        num_blocks=num_blocks,
        tables=tables,
        table_ptrs="tables",
        input_tables=tuple(poisoned(R, width) for width in widths),
        input_ptrs="input_tables",
        table_strides=torch.tensor(widths, dtype=torch.int64),
        num_reqs=num_reqs,
        num_rows=num_rows,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_reqs", "num_rows", "widths"),
    [(1, 1, (5,)), (3, 5, (4, 9)), (7, 7, (1, 3)), (1, 3, (1100, 2, 7))],
    ids=str,
)
def test_equals_brute_force(num_reqs: int, num_rows: int, widths: tuple[int, ...], backend: str) -> None:
    check(implementation(gather_block_tables, backend), num_reqs, num_rows, widths, seed=num_reqs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_larger_batch_do_not_stay_behind(backend: str) -> None:
    """Row 29 of reference/mrv2.md 4.3: a batch of 8, then 2 under a graph of 8 requests; rows 2..7 must be null."""
    table = torch.arange(1, 25, dtype=torch.int32).view(8, 3)
    input_table = poisoned(8, 3)
    num_blocks = torch.full((1, 8), 3, dtype=torch.int32)
    for num_reqs in (8, 2):
        args = (
            torch.arange(8, dtype=torch.int32).flip(0).contiguous()[:num_reqs],
            num_blocks,
            (table,),
            pointer_table((table,)),
            (input_table,),
            pointer_table((input_table,)),
            torch.tensor([3]),
            num_reqs,
            8,
        )
        run(gather_block_tables, args, backend)
    assert input_table.tolist() == [[22, 23, 24], [19, 20, 21]] + [[0, 0, 0]] * 6


MUTANTS = {
    "spec": [
        ("input_table[num_reqs:num_rows] = 0", "input_table[num_reqs + 1 : num_rows] = 0"),
        ("table[row, : counts[row]]", "table[i, : counts[row]]"),
    ],
    "interpret": [
        ("tl.load(num_blocks + g * count_stride + row)", "tl.load(num_blocks + row)"),
        ("mask=offset < stride", "mask=offset < stride - 1"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(gather_block_tables, *MUTANTS[backend][bug], tmp_path), backend))
