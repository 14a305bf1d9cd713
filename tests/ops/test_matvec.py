"""The matrix-vector kernels against float64: odd widths, odd row counts, views, nothing written beside the result."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.gather_matvec import gather_matvec
from mrv2lab.ops.matvec_add import matvec_add
from mrv2lab.ops.norm_matvec import norm_matvec
from mrv2lab.ops.norm_matvec_silu import norm_matvec_silu
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, randn, skip_if_unfaithful
from tests.ops.test_rms_norm import EPS, norm64
from tests.slow import mostly_slow

TILE = (2, 1)
# (tokens, K, N): K inside the last chunk, N no multiple of the tile; K one whole chunk; more chunks
SHAPES = [(3, 200, 7), (1, 128, 4), (2, 520, 3)]


def guarded(t: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned output [t, n] inside a buffer with columns and a row behind it."""
    whole = poisoned(t + 1, n + 3, dtype=dtype)
    return whole, whole[:t, :n]


def untouched(whole: torch.Tensor, t: int, n: int) -> bool:
    return bool(whole[:, n:].isnan().all() and whole[t:].isnan().all())


def check_norm(apply: Apply, t: int = 3, k: int = 200, n: int = 7, dtype: torch.dtype = torch.float32) -> None:
    x, norm = 0.2 * randn(t + 1, k + 8, dtype=dtype)[:t, :k], 1 + 0.5 * randn(k, dtype=dtype, seed=1)
    weight = randn(n, k, dtype=dtype, seed=2)
    whole, out = guarded(t, n, dtype)
    before = x.clone()
    apply(out, x, norm, weight, EPS, TILE)
    assert_near(out, norm64(before, norm) @ weight.double().t(), times=2)
    assert untouched(whole, t, n)
    assert torch.equal(x, before)


def check_silu(apply: Apply, t: int = 3, k: int = 200, n: int = 7, dtype: torch.dtype = torch.float32) -> None:
    x, norm = 0.2 * randn(t, k, dtype=dtype), 1 + 0.5 * randn(k, dtype=dtype, seed=1)
    weight = 0.2 * randn(2 * n, k, dtype=dtype, seed=2)
    whole, out = guarded(t, n, dtype)
    apply(out, x, norm, weight, EPS, TILE)
    gate, up = (norm64(x, norm) @ weight.double().t()).chunk(2, dim=-1)
    assert_near(out, gate / (1 + (-gate).exp()) * up, times=4)
    assert untouched(whole, t, n)


def check_add(apply: Apply, t: int = 3, k: int = 200, n: int = 7, dtype: torch.dtype = torch.float32) -> None:
    x, weight = randn(t, k, dtype=dtype), 0.1 * randn(n, k, dtype=dtype, seed=2)
    whole, residual = guarded(t, n, dtype)
    residual.copy_(randn(t, n, dtype=dtype, seed=3))
    want = residual.double() + x.double() @ weight.double().t()
    apply(residual, x, weight, TILE)
    assert_near(residual, want, times=2)
    assert untouched(whole, t, n)


def check_gather(apply: Apply, t: int = 3, k: int = 200, n: int = 7, dtype: torch.dtype = torch.float32) -> None:
    x, weight = randn(9, k, dtype=dtype), randn(n, k, dtype=dtype, seed=2)
    indices = torch.tensor([8, 0, 5])[:t]
    whole, out = guarded(t, n, dtype)
    apply(out, x, indices, weight, TILE)
    assert_near(out, x[indices].double() @ weight.double().t(), times=2)
    assert untouched(whole, t, n)


CHECKS = {
    "norm_matvec": (norm_matvec, check_norm),
    "norm_matvec_silu": (norm_matvec_silu, check_silu),
    "matvec_add": (matvec_add, check_add),
    "gather_matvec": (gather_matvec, check_gather),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("t", "k", "n"), mostly_slow(SHAPES, 1))
@pytest.mark.parametrize("name", CHECKS)
def test_matvec(name, t, k, n, backend):
    op, check = CHECKS[name]
    check(implementation(op, backend), t, k, n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CHECKS)
def test_half_precision(name, dtype, backend):
    skip_if_unfaithful(backend, dtype)
    op, check = CHECKS[name]
    check(implementation(op, backend), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("tile", [(1, 1), (4, 1), (8, 4)])
@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_model_width(name, t, tile, monkeypatch):
    """The shapes of Qwen3-0.6B, with other tiles."""
    monkeypatch.setattr("tests.ops.test_matvec.TILE", tile)
    op, check = CHECKS[name]
    check(implementation(op, "triton"), min(t, 3), 1024, 301, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    none, weight = torch.empty(0, 8), torch.empty(4, 8)
    implementation(norm_matvec, backend)(torch.empty(0, 4), none, weight[0], weight, EPS, TILE)
    implementation(norm_matvec_silu, backend)(torch.empty(0, 2), none, weight[0], weight, EPS, TILE)
    implementation(matvec_add, backend)(torch.empty(0, 4), none, weight, TILE)
    indices = torch.empty(0, dtype=torch.int64)
    implementation(gather_matvec, backend)(torch.empty(0, 4), none, indices, weight, TILE)


@pytest.mark.parametrize(
    ("name", "backend", "old", "new"),
    [
        ("norm_matvec", "spec", "rms_norm_spec(normed, x", "rms_norm_spec(normed, x * x"),
        ("norm_matvec", "interpret", "tl.minimum(m, t - 1)", "0 * tl.minimum(m, t - 1)"),
        ("norm_matvec", "interpret", "tl.where(m < t, N, 0)", "tl.where(m < t + 1, N, 0)"),
        ("norm_matvec", "interpret", "first = tl.program_id(0) * ROWS", "first = tl.program_id(0) * 1"),
        ("norm_matvec_silu", "interpret", "load_tile(weight, I, first", "load_tile(weight, 0 * I, first"),
        ("norm_matvec_silu", "interpret", "silu_times(gate, up", "silu_times(up, gate"),
        ("matvec_add", "spec", "residual.add_(", "residual.copy_("),
        ("matvec_add", "interpret", "(before + product", "(0 * before + product"),
        ("gather_matvec", "spec", "x[indices]", "x[: len(indices)]"),
        ("gather_matvec", "interpret", "x + index * x_stride", "x + i * x_stride"),
    ],
)
def test_mutants(name, backend, old, new, tmp_path):
    pytest.importorskip("triton")
    op, check = CHECKS[name]
    assert caught(check, implementation(mutant(op, old, new, tmp_path), backend))
