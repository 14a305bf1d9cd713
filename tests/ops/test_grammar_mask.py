"""The grammar's bitmask on raw logits: bits by hand, odd vocabularies, types, strides, rows that have no mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.grammar_mask import grammar_mask
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, implementation, mutant
from tests.ops.floats import randn
from tests.sample import oracle

INF = float("inf")


def int32(*words: int) -> list[int]:
    return np.array(words, np.uint32).view(np.int32).tolist()


def check_by_hand(apply: Apply) -> None:
    """V = 35: word 0 allows 0, 31 and nothing between, word 1 allows 32 and 34; its other bits mean nothing."""
    logits = torch.arange(35.0).repeat(3, 1)
    mask = torch.tensor([int32(0x80000001, 0xFFFFFFF5), int32(0, 0)], dtype=torch.int32)
    apply(logits, mask, torch.tensor([2, -1], dtype=torch.int32))
    assert torch.equal(logits[:2], torch.arange(35.0).repeat(2, 1))
    assert torch.nonzero(logits[2] > -INF)[:, 0].tolist() == [0, 31, 32, 34]
    assert logits[2, [0, 31, 32, 34]].tolist() == [0, 31, 32, 34]


def check(apply: Apply, vocab: int = 1000, dtype: torch.dtype = torch.float32) -> None:
    rng = np.random.default_rng(vocab)
    whole = randn(4, vocab + 3, dtype=dtype)
    whole[:, 1] = float("nan")
    before = whole.clone()
    words = -(-vocab // 32)
    mask = torch.tensor(rng.integers(-(2**31), 2**31, (3, words + 1)), dtype=torch.int32)[:, :words]
    mapping = [3, -1, 0]
    apply(whole[:, 1 : vocab + 1], mask, torch.tensor(mapping, dtype=torch.int32))
    for i, row in enumerate(mapping):
        if row >= 0:
            forbidden = torch.from_numpy(~oracle.allowed_by_mask(mask[i].numpy(), vocab))
            before[row, 1 : vocab + 1][forbidden] = -INF
    assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    check_by_hand(implementation(grammar_mask, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("vocab", [1, 7, 32, 1000, 4097])
def test_grammar_mask(backend, dtype, vocab):
    check(implementation(grammar_mask, backend), vocab, dtype)


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_full_size(backend, dtype):
    check(implementation(grammar_mask, backend), 151_936, dtype)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nobody(backend):
    logits = randn(1, 5)
    before = logits.clone()
    implementation(grammar_mask, backend)(logits, torch.empty(0, 1).int(), torch.empty(0).int())
    assert torch.equal(logits, before)


MUTANTS = {
    "spec": [
        ('bitorder="little"', 'bitorder="big"'),
        ("bits == 0", "bits == 1"),
        ("if row >= 0", "if True"),
        ("logits[row, bits", "logits[0, bits"),
    ],
    "interpret": [
        ("(token % 32)", "(31 - token % 32)"),
        ("& 1) == 0", "& 1) == 1"),
        ("if row < 0:\n        return\n", "row = tl.maximum(row, 0)\n"),
        ("logits + row * stride + token", "logits + i * stride + token"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(4), ids=["bit order", "inverted", "skipped row masked", "mapping ignored"])
def test_mutants(backend, bug, tmp_path):
    buggy = implementation(mutant(grammar_mask, *MUTANTS[backend][bug], tmp_path), backend)
    assert caught(check, buggy)
    assert caught(check_by_hand, buggy)
