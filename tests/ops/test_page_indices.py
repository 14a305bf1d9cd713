import numpy as np
import pytest
import torch

from mrv2lab.ops.page_indices import page_indices
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned


def check(apply: Apply, counts: tuple[int, ...] = (3, 0, 2), width: int = 6, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    r = len(counts)
    table = torch.tensor(rng.integers(1, 99, (r + 2, width)), dtype=torch.int32)
    first = [int(rng.integers(0, width - count + 1)) for count in counts]
    indptr = np.cumsum([0, *counts])
    want = poisoned(int(indptr[-1]) + 3)
    want[: indptr[-1]] = torch.cat([table[j, first[j] : first[j] + counts[j]] for j in range(r)])
    expect(
        page_indices,
        apply,
        {"indices": want},
        indices=poisoned(len(want)),
        block_table=table,
        indptr=torch.tensor(indptr, dtype=torch.int32),
        first_page=torch.tensor(first, dtype=torch.int32),
        num_reqs=r,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("counts", "width"), [((1,), 1), ((3, 0, 2), 6), ((600, 1, 257), 700)], ids=str)
def test_equals_slices(counts: tuple[int, ...], width: int, backend: str) -> None:
    check(implementation(page_indices, backend), counts, width)


MUTANTS = {
    "spec": [
        ("block_table[j, first_page[j] :", "block_table[j, 0:"),
        ("indices[indptr[j] :", "indices[indptr[j] + 1 :"),
    ],
    "interpret": [
        ("+ tl.load(first_page + j)", ""),
        ("tl.store(indices + start + offset", "tl.store(indices + offset"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(
        lambda apply: check(apply, (3, 1, 2), seed=3),
        implementation(mutant(page_indices, *MUTANTS[backend][bug], tmp_path), backend),
    )
