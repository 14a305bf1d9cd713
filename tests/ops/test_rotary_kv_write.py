"""rotary_kv_write against the two ops that it fuses, which have their own tests against float64."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.kv_write import kv_write
from mrv2lab.ops.rotary import rotary
from mrv2lab.ops.rotary_kv_write import FEW_TOKENS, rotary_kv_write
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant
from tests.ops.floats import assert_near, randn, skip_if_unfaithful
from tests.ops.test_rotary import EPS, table
from tests.slow import mostly_slow

NUM_BLOCKS = 5
HEADS = [((3, 1), 48), ((8, 4), 32), ((1, 1), 2), ((9, 3), 64), ((2, 2), 16)]


def check(
    apply: Apply,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 24,
    norm: bool = True,
    dtype: torch.dtype = torch.float32,
    t: int = 4,
    block_size: int = 8,
) -> None:
    """Slots out of order, one of them -1, a guard block on either side of each cache."""
    hq, hk = heads
    positions = torch.arange(t) * 3 % 10
    slots = torch.arange(t).flip(0) * 7 % (NUM_BLOCKS * block_size) if t <= 4 else torch.arange(t).flip(0)
    slots[1] = -1
    cos, sin = table(10, head_dim)
    qkv = randn(t, (hq + 2 * hk) * head_dim, dtype=dtype)
    weights = [1 + 0.5 * randn(head_dim, dtype=dtype, seed=s) if norm else None for s in (1, 2)]
    blocks = max(NUM_BLOCKS, t // block_size + 1)
    pools = torch.full((2, blocks + 2, block_size, hk, head_dim), 7.0, dtype=dtype)
    want, want_pools = qkv.clone(), pools.clone()
    q, k, v = want.split([hq * head_dim, hk * head_dim, hk * head_dim], dim=1)
    rotary.execute("spec", (q, k, positions, cos, sin, *weights, EPS))
    kv_write.execute("spec", (*want_pools[:, 1:-1], k, v, slots))
    apply(qkv, *pools[:, 1:-1], positions, slots, cos, sin, *weights, EPS)
    assert_near(qkv, want.double(), times=1)
    assert_near(pools.flatten(2), want_pools.flatten(2).double(), times=1)
    assert torch.equal(pools == 7.0, want_pools == 7.0)
    assert torch.equal(qkv[:, (hq + hk) * head_dim :], want[:, (hq + hk) * head_dim :])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(("heads", "head_dim"), mostly_slow(HEADS, 2))
def test_rotary_kv_write(backend, norm, heads, head_dim):
    check(implementation(rotary_kv_write, backend), heads, head_dim, norm, t=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_block_size(backend, block_size):
    check(implementation(rotary_kv_write, backend), block_size=block_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(backend, dtype):
    skip_if_unfaithful(backend, dtype)
    check(implementation(rotary_kv_write, backend), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_tokens(backend):
    """A program a token."""
    check(implementation(rotary_kv_write, backend), t=FEW_TOKENS + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    cos, sin = table(4, 8)
    none, cache = torch.empty(0, dtype=torch.int64), torch.zeros(2, 8, 1, 8)
    implementation(rotary_kv_write, backend)(torch.empty(0, 24), cache, cache, none, none, cos, sin, None, None, EPS)


@pytest.mark.parametrize(
    ("backend", "old", "new"),
    [
        ("spec", "kv_write_spec(key_cache, value_cache, k, v", "kv_write_spec(key_cache, value_cache, v, k"),
        ("spec", "rotary_spec(qkv[:, :k_start], k,", "rotary_spec(qkv[:, :k_start], v,"),
        ("interpret", "tl.where(slot >= 0, HQ + HK, 0)", "tl.where(slot >= -1, HQ + HK, 0)"),
        ("interpret", "tl.where(slot >= 0, HK, 0)", "tl.where(slot >= -1, HK, 0)"),
        ("interpret", "tl.store(key_at, first", "tl.store(key_at, a"),
        ("interpret", "(head - HQ)[:, None]", "(head * 0)[:, None]"),
        ("interpret", "_norm_half(a, scale, ka, dtype)", "_norm_half(a, scale, qa, dtype)"),
        ("interpret", "(HQ + HK + head)[:, None]", "(HQ + head)[:, None]"),
        ("interpret", "cos + position * HALF", "cos + row * HALF"),
    ],
)
def test_mutants(backend, old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check, implementation(mutant(rotary_kv_write, old, new, tmp_path), backend))
