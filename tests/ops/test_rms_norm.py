"""rms_norm and add_rms_norm against float64, in place, at odd widths."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mrv2lab.ops.add_rms_norm import add_rms_norm
from mrv2lab.ops.rms_norm import rms_norm
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, randn, skip_if_unfaithful

EPS = 1e-2  # large enough that a forgotten eps is seen


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check_norm(apply: Apply, t: int = 3, width: int = 80, dtype: torch.dtype = torch.float32) -> None:
    x = 0.2 * randn(t, width, dtype=dtype)
    weight = 1 + 0.5 * randn(width, dtype=dtype, seed=1)
    out = poisoned(t, width + 5, dtype=dtype)
    apply(out[:, :width], x, weight, EPS)
    assert_near(out[:, :width], norm64(x, weight))
    assert out[:, width:].isnan().all()


def check_add(apply: Apply, t: int = 3, width: int = 80, dtype: torch.dtype = torch.float32) -> None:
    x = 0.2 * randn(t, width, dtype=dtype)
    before = 0.2 * randn(t, width, dtype=dtype, seed=2)
    weight = 1 + 0.5 * randn(width, dtype=dtype, seed=1)
    total = x + before
    residual = before.clone()
    apply(x, x, residual, weight, EPS)  # in place, as the decoder calls it
    assert torch.equal(residual, total)
    assert_near(x, norm64(total, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 48, 256, 300])
def test_rms_norm(backend, width):
    check_norm(implementation(rms_norm, backend), width=width)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 48, 256, 300])
def test_add_rms_norm(backend, width):
    check_add(implementation(add_rms_norm, backend), width=width)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(backend, dtype):
    skip_if_unfaithful(backend, dtype)
    check_norm(implementation(rms_norm, backend), dtype=dtype)
    check_add(implementation(add_rms_norm, backend), dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_statistics_are_float32(backend):
    """SmolLM2's residual stream reaches 22,560, whose square overflows float16."""
    x = torch.full((1, 64), 22_560.0, dtype=torch.float16)
    implementation(rms_norm, backend)(x, x, torch.ones(64, dtype=torch.float16), 1e-5)
    assert torch.equal(x, torch.ones(1, 64, dtype=torch.float16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    implementation(rms_norm, backend)(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), EPS)
    implementation(add_rms_norm, backend)(torch.empty(0, 8), torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), EPS)


@pytest.mark.parametrize(
    ("op", "check", "old", "new"),
    [
        (rms_norm, check_norm, "keepdim=True) + eps)", "keepdim=True))"),
        (
            rms_norm,
            check_norm,
            "(wide * scale).to(x.dtype), weight, out=out",
            "(wide * scale).to(x.dtype), 1.0, out=out",
        ),
        (add_rms_norm, check_add, "    residual.add_(x)\n", ""),
        (add_rms_norm, check_add, "rms_norm_spec(out, residual,", "rms_norm_spec(out, x,"),
    ],
    ids=["no eps", "no weight", "no residual", "norm of the branch"],
)
def test_mutants_of_the_spec(op, check, old, new, tmp_path):
    assert caught(check, implementation(mutant(op, old, new, tmp_path), "spec"))


@pytest.mark.parametrize(
    ("op", "check", "old", "new"),
    [
        (rms_norm, check_norm, "axis=0) / H + eps", "axis=0) / H"),
        (add_rms_norm, check_add, "tl.store(residual + row", "tl.store(x + row"),
        (add_rms_norm, partial(check_add, t=2), "residual + row * residual_stride + col, mask", "residual + col, mask"),
    ],
    ids=["no eps", "residual not written", "row 0's residual"],
)
def test_mutants_of_the_kernel(op, check, old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check, implementation(mutant(op, old, new, tmp_path), "interpret"))
