import numpy as np
import pytest
import torch

from mrv2lab.ops.apply_write import apply_write
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned, run


def staged(diffs: list[tuple[int, int, list]], dtype: torch.dtype = torch.int32) -> dict[str, object]:
    """The op's arguments for a list of (row, start, values)."""
    lens = [len(values) for _, _, values in diffs]
    return {
        "rows": torch.tensor([row for row, _, _ in diffs], dtype=torch.int32),
        "starts": torch.tensor([start for _, start, _ in diffs], dtype=torch.int32),
        "cu_lens": torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32),
        "contents": torch.tensor([x for _, _, values in diffs for x in values], dtype=dtype),
        "num_writes": len(diffs),
        "max_len": max(lens, default=0),
    }


def check(apply: Apply, num_writes: int = 3, dtype: torch.dtype = torch.int32, width: int = 37, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    table = poisoned(num_writes + 2, width, dtype=dtype)
    want = table.clone()
    diffs = []
    for row in rng.permutation(num_writes + 2)[:num_writes].tolist():
        start = int(rng.integers(0, width))
        values = rng.integers(0, 1000, rng.integers(0, width - start + 1)).tolist()
        diffs.append((row, start, values))
        for j, value in enumerate(values):
            want[row, start + j] = value
    table, want = table.nan_to_num(-1), want.nan_to_num(-1)
    expect(apply_write, apply, {"table": want}, table=table, **staged(diffs, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("num_writes", [1, 3, 7])
def test_equals_brute_force(num_writes: int, dtype: torch.dtype, backend: str) -> None:
    check(implementation(apply_write, backend), num_writes, dtype, seed=num_writes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_diff_of_several_blocks_beside_short_ones(backend: str) -> None:
    check(implementation(apply_write, backend), num_writes=3, width=2100, seed=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_value_a_row(backend: str) -> None:
    table = torch.tensor([1, 2, 3, 4], dtype=torch.int64)
    args = staged([(3, 0, [2**40]), (0, 0, [-5])], torch.int64)
    run(apply_write, (table.view(4, 1), *args.values()), backend)
    assert table.tolist() == [-5, 2, 3, 2**40]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_design_documents_example(backend: str) -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    args = staged([(2, 3, [3, 1, 2]), (0, 1, [-1, -2, -5])])
    run(apply_write, (table, *args.values()), backend)
    assert table.tolist() == [[0, -1, -2, -5, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 1, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_staged_writes_nothing(backend: str) -> None:
    expect(apply_write, implementation(apply_write, backend), {}, table=poisoned(2, 3), **staged([]))


@pytest.mark.gpu
def test_a_table_in_pinned_memory() -> None:
    table = poisoned(5, 1500).pin_memory()
    args = staged([(4, 200, list(range(1300))), (1, 0, [7])])
    run(apply_write, (table, *args.values()), "triton")
    assert table[4].tolist() == [*poisoned(200).tolist(), *range(1300)]
    assert table[1, :2].tolist() == [7, table[0, 0]]


MUTANTS = {
    "spec": [
        ("starts[w] : starts[w] + len(values)", "0 : len(values)"),
        ("cu_lens[w] : cu_lens[w + 1]", "cu_lens[0] : cu_lens[1]"),
    ],
    "interpret": [
        ("mask = offset < length", "mask = offset < length - 1"),
        ("tl.load(contents + begin + offset", "tl.load(contents + offset"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(apply_write, *MUTANTS[backend][bug], tmp_path), backend))
