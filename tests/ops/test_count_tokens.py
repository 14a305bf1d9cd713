"""Penalty counts: rebuilt from the known tokens at (re)admission, advanced by accepted tokens only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.count_tokens import count_history, count_sampled, zero_counts
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant

R, L, V = 5, 40, 75
WORDS = 3


def int32(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def bits(*tokens: int) -> list[int]:
    words = np.zeros(WORDS, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32).tolist()


def stale(*shape: int, seed: int = 0) -> torch.Tensor:
    return int32(np.random.default_rng(seed).integers(1, 1000, shape))


def check_zero(apply: Apply) -> None:
    mask, counts = stale(R, WORDS), stale(R, V)
    want_mask, want_counts = mask.clone(), counts.clone()
    for row in (3, 0):
        want_mask[row], want_counts[row] = 0, 0
    expect(
        zero_counts,
        apply,
        {"prompt_bin_mask": want_mask, "output_bin_counts": want_counts},
        rows=int32([3, 0]),
        prompt_bin_mask=mask,
        output_bin_counts=counts,
    )


def check_by_hand(apply: Apply) -> None:
    """Prompt 0, 31, 31, 32, 74; outputs 31, 74, 74, 8; what lies behind prefill_len is stale. Row 1: a prompt alone."""
    tokens = torch.full((R, L), 9, dtype=torch.int32)
    tokens[4, :9] = int32([0, 31, 31, 32, 74, 31, 74, 74, 8])
    tokens[1, :2] = int32([5, 64])
    counts, mask = torch.zeros(R, V, dtype=torch.int32), torch.zeros(R, WORDS, dtype=torch.int32)
    want_counts, want_mask = counts.clone(), mask.clone()
    want_counts[4, 31], want_counts[4, 74], want_counts[4, 8] = 1, 2, 1
    want_mask[4], want_mask[1] = int32(bits(0, 31, 32, 74)), int32(bits(5, 64))
    expect(
        count_history,
        apply,
        {"prompt_bin_mask": want_mask, "output_bin_counts": want_counts},
        rows=int32([4, 1]),
        all_token_ids=tokens,
        prompt_len=int32([1, 2, 1, 1, 5]),
        prefill_len=int32([3, 2, 3, 3, 9]),
        prompt_bin_mask=mask,
        output_bin_counts=counts,
        longest=9,
    )


def check_history(apply: Apply, length: int = 40, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-1, V + 2, (R, length))  # ids that are nobody too
    prompt = rng.integers(1, length, R)
    prefill = np.minimum(prompt + rng.integers(0, length, R), length)
    rows = rng.permutation(R)[:3]
    counts, want_mask = np.zeros((R, V), np.int32), np.zeros((R, WORDS), np.int32)
    for row in rows:
        known = [t for t in tokens[row, : prompt[row]] if 0 <= t < V]
        want_mask[row] = bits(*known)
        for token in tokens[row, prompt[row] : prefill[row]]:
            if 0 <= token < V:
                counts[row, token] += 1
    expect(
        count_history,
        apply,
        {"prompt_bin_mask": want_mask, "output_bin_counts": counts},
        rows=int32(rows),
        all_token_ids=int32(tokens),
        prompt_len=int32(prompt),
        prefill_len=int32(prefill),
        prompt_bin_mask=torch.zeros(R, WORDS, dtype=torch.int32),
        output_bin_counts=torch.zeros(R, V, dtype=torch.int32),
        longest=int(prefill[rows].max()),
    )


def check_sampled(apply: Apply) -> None:
    """Batch rows: two accepted of three, a gone request, none, no user, three of the same token."""
    counts = stale(R, V)
    want = counts.clone()
    want[3, 7] += 1
    want[3, 8] += 1
    want[1, 74] += 3
    expect(
        count_sampled,
        apply,
        {"output_bin_counts": want},
        idx_mapping=int32([3, -1, 0, 2, 1]),
        sampled_tokens=torch.tensor([[7, 8, 9], [1, 1, 1], [4, 4, 4], [5, 5, 5], [74, 74, 74]]),
        num_sampled=int32([2, 3, 0, 3, 3]),
        repetition_penalty=torch.tensor([1, 1, 1, 1.5, 1]),
        frequency_penalty=torch.tensor([0.5, 0, 0, 0, 1]),
        presence_penalty=torch.tensor([0, -0.5, 0, 0, 0]),
        output_bin_counts=counts,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero(backend):
    check_zero(implementation(zero_counts, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_history_by_hand(backend):
    check_by_hand(implementation(count_history, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 40, 1025])
def test_history(backend, length):
    check_history(implementation(count_history, backend), max(length, 2), seed=length)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sampled(backend):
    check_sampled(implementation(count_sampled, backend))


@pytest.mark.gpu
def test_tokens_in_pinned_memory():
    tokens = torch.zeros(1, 8, dtype=torch.int32).pin_memory()
    tokens[0, :3] = int32([1, 2, 2])
    counts, mask = (torch.zeros(1, n, dtype=torch.int32) for n in (V, WORDS))
    one, three = int32([1]), int32([3])
    implementation(count_history, "triton")(int32([0]), tokens, one, three, mask, counts, 3)
    assert counts[0, :4].tolist() == [0, 0, 2, 0]


def check_far_row(apply: Apply) -> None:
    """Row 30,000 of a table of 151,936 columns begins behind 2^31 elements: memory that exists only where written."""
    try:
        memory = torch.from_numpy(np.zeros((30_001, 151_936), np.int32))
    except MemoryError:
        pytest.skip("18 GB cannot be reserved here, not even unwritten")
    row = int32([30_000])
    tables = [torch.ones(30_001) * value for value in (1.0, 0.5, 0.0)]
    apply(row, torch.tensor([[5]]), int32([1]), *tables, memory)
    assert memory[30_000, 5] == 1


@pytest.mark.parametrize("backend", ["spec", BACKENDS[1]])
def test_offsets_beyond_2_to_31(backend):
    check_far_row(implementation(count_sampled, backend))


MUTANTS = {
    "spec": [
        (zero_counts, check_zero, "    prompt_bin_mask[rows] = 0\n", ""),
        (zero_counts, check_zero, "output_bin_counts[rows] = 0", "output_bin_counts[:] = 0"),
        (count_history, check_by_hand, "tokens[prompt_len[row] :])", "tokens)"),
        (count_history, check_by_hand, ": prefill_len[row]]", ":]"),
        (count_history, check_by_hand, "np.add.at(output_bin_counts[row], outputs, 1)",
         "output_bin_counts[row, outputs] += 1"),
        (count_history, check_history, "(part >= 0) & ", ""),
        (count_sampled, check_sampled, ", : num_sampled[i]]", "]"),
        (count_sampled, check_sampled, "if row < 0 or ", "if "),
        (count_sampled, check_sampled, " and presence_penalty[row] == 0)", ")"),
        (count_sampled, check_sampled, "if row < 0 or (repetition_penalty[row] == 1 and", "if row < 0 or (False and"),
    ],
    "interpret": [
        (zero_counts, check_zero, "mask=token < words)", "mask=token < words - 1)"),
        (count_history, check_by_hand, "mask=known & in_prompt)", "mask=known)"),
        (count_history, check_by_hand, "mask=i < length, other=-1)", "mask=i < 10, other=-1)"),
        (count_history, check_by_hand, "tl.atomic_add(output_bin_counts + row * vocab + token, 1, mask=known & (i >= "
         "tl.load(prompt_len + row)))",
         "tl.store(output_bin_counts + row * vocab + token, 1, mask=known & (i >= tl.load(prompt_len + row)))"),
        (count_sampled, check_sampled, "j < tl.load(num_sampled + i), other=-1", "j < 3, other=-1"),
        (count_sampled, check_sampled, "if off & (tl.load(presence_penalty + row) == 0.0):", "if off:"),
        (count_sampled, check_far_row, "row = tl.load(idx_mapping + i).to(tl.int64)\n    if row < 0",
         "row = tl.load(idx_mapping + i)\n    if row < 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "bug"),
    [pytest.param(backend, i, marks=getattr(backend, "marks", ())) for backend in CPU_BACKENDS
     for i in range(len(MUTANTS[getattr(backend, "values", [backend])[0]]))],
)  # fmt: skip
def test_mutants(backend, bug, tmp_path):
    backend = getattr(backend, "values", [backend])[0]
    op, check, old, new = MUTANTS[backend][bug]
    assert caught(check, implementation(mutant(op, old, new, tmp_path), backend))
