import pytest
import torch

from mrv2lab.ops.checksum import checksum
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant

MASK = 2**64 - 1


def mixed(value: int, cell: int) -> int:
    """The mix in Python's own integers."""
    x = (value & MASK) ^ (((cell + 1) * 0x9E3779B97F4A7C15) & MASK)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    return x ^ (x >> 31)


def check(apply: Apply, rows: int = 3, cols: int = 1500, dtype: torch.dtype = torch.int32, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(dtype)
    table = torch.randint(limits.min, limits.max, (rows, cols), dtype=dtype, generator=generator)
    lengths = torch.tensor([(0, cols, cols + 7, 1, cols // 2)[i % 5] for i in range(rows)], dtype=torch.int32)
    sums = []
    for row, (values, n) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        total = sum(mixed(value, row * cols + column) for column, value in enumerate(values[:n])) & MASK
        sums.append(total - 2**64 if total >= 2**63 else total)
    expect(checksum, apply, {"out": sums}, table=table, lengths=lengths, out=torch.full((rows,), -7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 1024), (5, 7), (3, 2500)])
def test_equals_python_integers(rows: int, cols: int, dtype: torch.dtype, backend: str) -> None:
    check(implementation(checksum, backend), rows, cols, dtype, seed=rows)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_swap_of_two_values_shows(backend: str) -> None:
    apply = implementation(checksum, backend)
    outs = []
    for values in ([5, 6, 7], [6, 5, 7]):
        out = torch.zeros(1, dtype=torch.int64)
        apply(torch.tensor([values]), torch.tensor([3], dtype=torch.int32), out)
        outs.append(out.tolist())
    assert outs[0] != outs[1]


MUTANTS = {
    "spec": [("min(int(lengths[row]), cols)", "cols"), ("row * cols) +", "row) +")],
    "interpret": [("mask, x ^ (x >> 31), 0)", "mask, x, 0)"), ("row * cols + column", "row + column")],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(checksum, *MUTANTS[backend][bug], tmp_path), backend))
