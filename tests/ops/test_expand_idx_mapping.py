import pytest
import torch

from mrv2lab.ops.expand_idx_mapping import expand_idx_mapping
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned


def check(apply: Apply, rows: tuple[int, ...] = (5, 0, 9), num_logits: tuple[int, ...] = (2, 1, 3)) -> None:
    pairs = [(row, j) for row, count in zip(rows, num_logits, strict=True) for j in range(count)]
    cu_num_logits = torch.tensor([0, *num_logits]).cumsum(0).to(torch.int32)
    tail = poisoned(40)
    expect(
        expand_idx_mapping,
        apply,
        {
            "expanded_idx_mapping": [*(row for row, _ in pairs), *tail.tolist()],
            "expanded_local_pos": [*(j for _, j in pairs), *tail.tolist()],
        },
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        cu_num_logits=cu_num_logits,
        expanded_idx_mapping=poisoned(len(pairs) + 40),
        expanded_local_pos=poisoned(len(pairs) + 40),
        num_reqs=len(rows),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "num_logits"),
    [((3,), (1,)), ((5, 0, 9), (2, 1, 3)), ((6, 5, 4, 3, 2, 1, 0), (1, 1, 4, 1, 33, 2, 70)), ((1, 2), (0, 2))],
    ids=["one", "three", "seven", "a request without logits"],
)
def test_equals_brute_force(rows: tuple[int, ...], num_logits: tuple[int, ...], backend: str) -> None:
    check(implementation(expand_idx_mapping, backend), rows, num_logits)


MUTANTS = {
    "spec": [("= idx_mapping[i]", "= i"), ("np.arange(end - start)", "0")],
    "interpret": [("mask = offset < length", "mask = offset <= length"), ("tl.load(idx_mapping + i)", "i")],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(expand_idx_mapping, *MUTANTS[backend][bug], tmp_path), backend))
