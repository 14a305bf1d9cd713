"""Raw logits to float32: exact, NaN as -inf, strides, padding rows, and nothing outside the view."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.cast_logits import cast_logits
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import randn

INF, NAN = float("inf"), float("nan")


def check(apply: Apply, rows: int = 3, vocab: int = 1000, dtype: torch.dtype = torch.float32) -> None:
    raw = randn(rows, vocab + 5, dtype=dtype, seed=vocab)
    raw[0, 2], raw[0, 3 if vocab > 1 else 2] = NAN, -INF
    whole = poisoned(rows, vocab + 3, dtype=torch.float32)
    mapping = torch.tensor([2, -1, 0], dtype=torch.int32)[:rows]
    before = raw.clone()
    apply(whole[:, 1 : vocab + 1], raw[:, 2 : vocab + 2], mapping)
    assert torch.equal(raw.nan_to_num(7), before.nan_to_num(7))
    want = poisoned(rows, vocab + 3, dtype=torch.float32)
    for row, index in enumerate(mapping.tolist()):
        if index >= 0:
            x = raw[row, 2 : vocab + 2].float()
            want[row, 1 : vocab + 1] = torch.where(x.isnan(), -INF, x)
    assert torch.equal(whole.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 7), (3, 1000), (3, 4097)])
def test_cast_logits(backend, dtype, rows, vocab):
    check(implementation(cast_logits, backend), rows, vocab, dtype)


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_full_size(backend, dtype):
    check(implementation(cast_logits, backend), 3, 151_936, dtype)


MUTANTS = {
    "spec": [("if index >= 0", "if True"), ('np.where(np.isnan(x), np.float32("-inf"), x)', "x")],
    "interpret": [
        ("    if tl.load(expanded_idx_mapping + row) < 0:\n        return\n", ""),
        ('tl.where(x == x, x, float("-inf"))', "x"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2), ids=["padding written", "NaN kept"])
def test_mutants(backend, bug, tmp_path):
    assert caught(check, implementation(mutant(cast_logits, *MUTANTS[backend][bug], tmp_path), backend))
