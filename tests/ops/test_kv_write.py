"""kv_write: every slot where it belongs, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.kv_write import kv_write
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant
from tests.ops.floats import randn

NUM_BLOCKS = 5


def check(
    apply: Apply,
    block_size: int = 8,
    heads: int = 2,
    head_dim: int = 12,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
) -> None:
    shape = (2, NUM_BLOCKS + 2, block_size, heads, head_dim)  # a guard block before and behind each cache
    pools = torch.full((shape[1], shape[0], *shape[2:]) if interleaved else shape, 7.0, dtype=dtype)
    if interleaved:  # keys and values of a block side by side
        pools = pools.transpose(0, 1)
    key_cache, value_cache = pools[:, 1:-1]
    qkv = randn(6, 4 * heads * head_dim, dtype=dtype)
    k, v = qkv[:, -2 * heads * head_dim : -heads * head_dim], qkv[:, -heads * head_dim :]
    slots = [
        block_size * 3,
        -1,
        1,
        block_size * NUM_BLOCKS - 1,
        -1,
        block_size * 2,
    ]  # distinct: order within a launch is undefined
    want_pools = pools.clone()
    want = want_pools[:, 1:-1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            for cache, rows in zip(want, (k, v), strict=True):
                cache[slot // block_size, slot % block_size] = rows[token].reshape(heads, head_dim)
    apply(key_cache, value_cache, k, v, torch.tensor(slots))
    assert torch.equal(pools, want_pools)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 32), (3, 64), (1, 2)])
def test_kv_write(backend, block_size, heads, head_dim):
    check(implementation(kv_write, backend), block_size, heads, head_dim)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_layouts(backend):
    check(implementation(kv_write, backend), interleaved=True)
    check(implementation(kv_write, backend), dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no tokens", "all skipped"])
def test_nothing_to_write(backend, slots):
    cache = torch.full((2, 8, 1, 4), float("nan"))
    rows = torch.zeros(len(slots), 4)
    implementation(kv_write, backend)(cache, cache, rows, rows, torch.tensor(slots, dtype=torch.int64))
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("backend", "old", "new"),
    [
        ("spec", "slot_mapping >= 0", "slot_mapping >= -1"),
        ("spec", "(value_cache, v)", "(value_cache, k)"),
        ("interpret", "tl.where(slot >= 0", "tl.where(slot >= -1"),
        ("interpret", "tl.store(value_cache", "tl.store(key_cache"),
        ("interpret", "(slot % BLOCK_SIZE) * WIDTH", "(slot % BLOCK_SIZE)"),
    ],
    ids=["slot -1 written", "k for v", "slot -1 written (kernel)", "values over keys", "inside a block"],
)
def test_mutants(backend, old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check, implementation(mutant(kv_write, old, new, tmp_path), backend))
