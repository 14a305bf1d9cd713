"""small_mm, small_mm_silu and the norm that reads partial sums, against float64."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.small_mm import small_mm, split_len
from mrv2lab.ops.small_mm_silu import small_mm_silu
from mrv2lab.ops.sum_add_rms_norm import sum_add_rms_norm
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, randn, skip_if_unfaithful
from tests.ops.test_rms_norm import EPS, norm64
from tests.slow import mostly_slow

TILE = (16, 16, 16, 4, 2)


def check_mm(
    apply: Apply,
    t: int = 19,
    k: int = 72,
    n: int = 21,
    splits: int = 2,
    dtype: torch.dtype = torch.float32,
    tile: tuple[int, ...] = TILE,
) -> None:
    """Partial sums of the right columns, in float32 unless there is one; nothing else is written."""
    x, weight = randn(t + 1, k + 8, dtype=dtype)[:t, :k], randn(n, k, dtype=dtype, seed=1)
    whole = poisoned(splits, t + 1, n + 3, dtype=torch.float32 if splits > 1 else dtype)
    apply(whole[:, :t, :n], x, weight, tile)
    length = split_len(k, splits, tile[2])
    for s in range(splits):
        part = slice(s * length, (s + 1) * length)
        assert_near(whole[s, :t, :n].to(dtype), x[:, part].double() @ weight[:, part].double().t(), times=2)
    assert whole[:, :, n:].isnan().all()
    assert whole[:, t:].isnan().all()


def check_silu(
    apply: Apply,
    t: int = 19,
    k: int = 72,
    n: int = 21,
    dtype: torch.dtype = torch.float32,
    tile: tuple[int, ...] = TILE,
) -> None:
    x, weight = randn(t, k, dtype=dtype), 0.2 * randn(2 * n, k, dtype=dtype, seed=1)
    whole = poisoned(t + 1, n + 3, dtype=dtype)
    apply(whole[:t, :n], x, weight, tile)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    assert_near(whole[:t, :n], gate / (1 + (-gate).exp()) * up, times=4)
    assert whole[:, n:].isnan().all()
    assert whole[t:].isnan().all()


def check_sum(apply: Apply, splits: int = 3, width: int = 80, dtype: torch.dtype = torch.float32) -> None:
    parts = 0.2 * randn(splits, 5, width)[:, :3]
    before, weight = 0.2 * randn(3, width, dtype=dtype, seed=2), 1 + 0.5 * randn(width, dtype=dtype, seed=1)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    want = total.to(dtype) + before
    residual, out = before.clone(), poisoned(3, width, dtype=dtype)
    apply(out, parts, residual, weight, EPS)
    assert torch.equal(residual, want)  # rounded where add_rms_norm rounds
    assert_near(out, norm64(want, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("t", "k", "n"), mostly_slow([(19, 72, 21), (16, 64, 16), (1, 20, 5)], 1))
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_small_mm(splits, t, k, n, backend):
    check_mm(implementation(small_mm, backend), t, k, n, splits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("t", "k", "n"), mostly_slow([(19, 72, 21), (16, 64, 16), (1, 20, 5)], 1))
def test_small_mm_silu(t, k, n, backend):
    check_silu(implementation(small_mm_silu, backend), t, k, n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("splits", "width"), [(1, 48), (2, 1), (4, 300)])
def test_sum_add_rms_norm(splits, width, backend):
    check_sum(implementation(sum_add_rms_norm, backend), splits, width)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(dtype, backend):
    skip_if_unfaithful(backend, dtype)
    check_mm(implementation(small_mm, backend), dtype=dtype)
    check_mm(implementation(small_mm, backend), dtype=dtype, splits=1)
    check_silu(implementation(small_mm_silu, backend), dtype=dtype)
    check_sum(implementation(sum_add_rms_norm, backend), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize(
    "tile", [(16, 32, 128, 4, 3), (64, 32, 64, 4, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4, True)]
)
@pytest.mark.parametrize("t", [5, 64, 200])
def test_model_width(t, tile):
    """The shapes of Qwen3-0.6B, tensor cores of either kind."""
    check_mm(implementation(small_mm, "triton"), t, 1024, 4096, 1, torch.bfloat16, tile)
    check_mm(implementation(small_mm, "triton"), t, 3072, 1024, 4, torch.bfloat16, tile)
    check_mm(implementation(small_mm, "triton"), t, 2048, 1000, 3, torch.bfloat16, tile)
    check_silu(implementation(small_mm_silu, "triton"), t, 1024, 3072, torch.bfloat16, tile)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    none, weight = torch.empty(0, 32), torch.empty(8, 32)
    implementation(small_mm, backend)(torch.empty(2, 0, 8), none, weight, TILE)
    implementation(small_mm_silu, backend)(torch.empty(0, 4), none, weight, TILE)
    implementation(sum_add_rms_norm, backend)(none, torch.empty(2, 0, 32), none, weight[0], EPS)


@pytest.mark.parametrize(
    ("op", "check", "backend", "old", "new"),
    [
        (small_mm, check_mm, "spec", "weight[:, columns]", "weight[:, : x[:, columns].shape[1]]"),
        (small_mm, check_mm, "interpret", "k = split * LENGTH + start", "k = 0 * split * LENGTH + start"),
        (small_mm, check_mm, "interpret", "mask=(k < K)", "mask=(k < K - 1)"),
        (small_mm, check_mm, "interpret", "b = load_columns(weight_rows, k", "b = load_columns(weight_rows, k - start"),
        (small_mm, check_mm, "interpret", "mask=(m < t)[:, None]", "mask=(m < t + 1)[:, None]"),
        (small_mm_silu, check_silu, "interpret", "up_row = gate_row + I", "up_row = gate_row + I - 1"),
        (small_mm_silu, check_silu, "interpret", "(m < t)[:, None] & (n < I)", "(m < t)[:, None] & (n < I + 1)"),
        (sum_add_rms_norm, check_sum, "spec", "for part in parts[1:]", "for part in parts[2:]"),
        (sum_add_rms_norm, check_sum, "interpret", "range(SPLITS - 1)", "range(SPLITS - 2)"),
        (sum_add_rms_norm, check_sum, "interpret", "part += parts_stride_s", "part += parts_stride_t"),
    ],
)
def test_mutants(op, check, backend, old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check, implementation(mutant(op, old, new, tmp_path), backend))
