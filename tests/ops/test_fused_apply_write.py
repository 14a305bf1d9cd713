import numpy as np
import pytest
import torch

from mrv2lab.ops.fused_apply_write import fused_apply_write
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned


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


MUTANTS = {
    "spec": [
        ("tables[group_ids[w]]", "tables[-1]"),
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
