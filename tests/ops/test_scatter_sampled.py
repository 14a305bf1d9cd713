import pytest
import torch

from mrv2lab.ops.scatter_sampled import scatter_sampled
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant


def check(apply: Apply, count: int = 2) -> None:
    """Batch [prefill, B, C] of 3 + 1 + 1 tokens; last step's batch was [A, C, B] with tokens 70, 71, 72."""
    expect(
        scatter_sampled,
        apply,
        {"input_ids": [10, 11, 12, 72, 71 if count == 2 else -1, -7777]},
        token_indices=torch.tensor([*[3, 4][:count], -7777]),
        prev_rows=torch.tensor([*[2, 1][:count], -7777]),
        prev_sampled=torch.tensor([[70], [71], [72]]),
        input_ids=torch.tensor([10, 11, 12, -1, -1, -7777], dtype=torch.int32),
        count=count,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 2])
def test_holes_get_their_requests_tokens(count: int, backend: str) -> None:
    check(implementation(scatter_sampled, backend), count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wide_source_and_several_blocks(backend: str) -> None:
    count = 300
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    sampled = torch.arange(2 * count).view(count, 2) + 1000
    expect(
        scatter_sampled,
        implementation(scatter_sampled, backend),
        {"input_ids": [*(2 * rows + 1000).tolist(), 5]},
        token_indices=torch.arange(count),
        prev_rows=rows,
        prev_sampled=sampled,
        input_ids=torch.full((count + 1,), 5, dtype=torch.int32),
        count=count,
    )


MUTANTS = {
    "spec": [
        ("prev_sampled[prev_rows[:count], 0]", "prev_sampled[:count, 0]"),
        ("input_ids[token_indices[:count]] =", "input_ids[prev_rows[:count]] ="),
    ],
    "interpret": [
        ("prev_sampled + row * stride", "prev_sampled + i * stride"),
        ("tl.store(input_ids + tl.load(token_indices + i, mask=mask, other=0)", "tl.store(input_ids + row"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    old, new = MUTANTS[backend][bug]
    assert caught(check, implementation(mutant(scatter_sampled, old, new, tmp_path), backend))
