"""In-place temperature: exact quotients, untouched rows, strides."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.temperature import apply_temperature
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant


def check(apply: Apply, rows: int = 5, vocab: int = 1000, dtype: torch.dtype = torch.float32) -> None:
    """Rows 0.7, 0, 1, padding, 2 (fewer rows: the first of them); column padding stays."""
    made = torch.Generator().manual_seed(vocab)
    whole = (torch.randn(rows, vocab + 3, generator=made) * 5).to(dtype)
    whole[0, 1] = float("-inf")
    before = whole.clone()
    warm = 0.7 if dtype == torch.float32 else 0.25  # exact in half precision whatever the rounding
    temperature = torch.tensor([2.0, 1.0, 0.0, warm, 3.0])
    mapping = torch.tensor([3, 2, 1, -1, 0], dtype=torch.int32)[:rows]
    apply(whole[:, 1 : vocab + 1], mapping, temperature)
    want = before.clone()
    want[0, 1 : vocab + 1] = (before[0, 1 : vocab + 1].double() / temperature[3].double()).to(dtype)
    if rows == 5:
        want[4, 1 : vocab + 1] /= 2
    assert torch.equal(whole, want)  # float64 division, rounded again, is the correctly rounded float32 quotient


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 7), (5, 1000), (5, 2049)])
def test_apply_temperature(backend, dtype, rows, vocab):
    check(implementation(apply_temperature, backend), rows, vocab, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_gpu_rounds_as_the_spec(dtype):
    made = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 5000, generator=made) * 5).to(dtype)
    mapping, temperature = torch.randperm(64, generator=made).int(), torch.rand(64, generator=made) * 2 + 0.01
    other = logits.clone()
    implementation(apply_temperature, "spec")(logits, mapping, temperature)
    implementation(apply_temperature, "triton")(other, mapping, temperature)
    assert torch.equal(logits, other)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits[row].float() / t", "logits[row].float() * (1 / t)"),
        ("t = temperature[index]\n        if", "t = temperature[row]\n        if"),
        ("if index >= 0 and t", "if t"),
        ("and t != 0 and", "and"),
        ("logits[row].float() / t", "logits[row].float() / t.half()"),
    ],
    ids=["reciprocal", "row instead of index", "padding scaled", "zero divides", "half precision"],
)
def test_mutants(old, new, tmp_path):
    assert caught(check, implementation(mutant(apply_temperature, old, new, tmp_path), "spec"))
