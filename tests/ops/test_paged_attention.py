"""paged_attention against dense float64 attention: mixed batches, GQA, poisoned blocks, odd sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mrv2lab.ops.paged_attention import paged_attention
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, randn, skip_if_unfaithful

SCALE = 0.4
SPARE = 64
"""Rows behind the batch, so that a mutant that writes past the end is caught and not a crash."""


@dataclass
class Batch:
    """Requests as (query tokens, sequence length), the last ``padding`` of them without queries."""

    requests: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    padding: int = 0


def check_batch(apply: Apply, batch: Batch) -> None:
    """Keys and values live in shuffled blocks of a pool that is NaN elsewhere; block 0 is NaN throughout."""
    (hq, hk), size = batch.heads, batch.block_size
    lengths = [length for _, length in batch.requests] + [0] * batch.padding
    queries = [count for count, _ in batch.requests] + [0] * batch.padding
    starts = torch.tensor([0, *queries]).cumsum(0)
    t = int(starts[-1])
    blocks = [-(-length // size) for length in lengths]
    width = max(blocks) + 1
    order = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)) + 1).tolist()
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)  # unused entries point nowhere
    caches = [poisoned(sum(blocks) + 1, size, hk, batch.head_dim, dtype=batch.dtype) for _ in range(2)]
    q = randn(t + SPARE, hq, batch.head_dim, dtype=batch.dtype)
    want = torch.empty(t, hq, batch.head_dim, dtype=torch.float64)
    for j, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        keys, values = (randn(length, hk, batch.head_dim, dtype=batch.dtype, seed=10 * j + s) for s in (1, 2))
        for block in range(blocks[j]):
            table[j, block] = order.pop()
            for cache, rows in zip(caches, (keys, values), strict=True):
                part = rows[block * size : (block + 1) * size]
                cache[int(table[j, block]), : len(part)] = part
        for i in range(count):
            seen = length - count + i + 1
            for head in range(hq):
                kv = head // (hq // hk)
                scores = keys[:seen, kv].double() @ q[starts[j] + i, head].double() * SCALE
                want[starts[j] + i, head] = torch.softmax(scores, 0) @ values[:seen, kv].double()
    out = poisoned(t + SPARE, hq, batch.head_dim, dtype=batch.dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    apply(out, q, *caches, table, seq_lens, starts.to(torch.int32), max([*queries, 1]), SCALE)
    assert out[:t].isfinite().all()
    assert_near(out[:t], want, times=4)
    assert out[t:].isnan().all()  # rows of no request are not written


MIXED = [(1, 9), (11, 11), (1, 1), (3, 20), (17, 21), (1, 16), (2, 2)]


def check_mixed(apply: Apply) -> None:
    check_batch(apply, Batch(MIXED[:4]))
    check_batch(apply, Batch([(1, 9), (1, 3)]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [32, 48, 64, 128])
@pytest.mark.parametrize("block_size", [8, 16])
def test_sizes(backend, head_dim, block_size):
    check_batch(implementation(paged_attention, backend), Batch(MIXED[:3], head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (2, 2), (20, 1)], ids=str)
def test_head_groups(backend, heads):
    check_batch(implementation(paged_attention, backend), Batch([(1, 9), (7, 12)], heads))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "requests",
    [
        [(5, 5)],
        [(1, 40), (1, 1), (1, 8)],
        [(1, 33), (1, 3), (1, 64), (1, 7), (1, 8), (1, 9), (1, 17)],
        MIXED,
        [(70, 70)],
        [(40, 100), (1, 70)],
        [(3, 20), (4, 4), (2, 9)],
    ],
    ids=["one prompt", "three decodes", "seven decodes", "mixed", "long prompt", "chunk and decode", "drafts"],
)
def test_batches(backend, requests):
    check_batch(implementation(paged_attention, backend), Batch(requests, heads=(2, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", [[(1, 9), (1, 3)], [(4, 9), (1, 3)]], ids=["decodes", "mixed"])
def test_padding_requests(backend, requests):
    """A graph's batch ends in requests without queries or keys (#29: their tables may hold anything)."""
    check_batch(implementation(paged_attention, backend), Batch(requests, padding=3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(backend, dtype):
    skip_if_unfaithful(backend, dtype)
    check_batch(implementation(paged_attention, backend), Batch(MIXED[:4], dtype=dtype, head_dim=64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_composition_does_not_matter(backend):
    """A decode alone, among decodes, and beside a prompt: the same row up to rounding."""
    apply = implementation(paged_attention, backend)
    cache = randn(4, 8, 1, 16)
    q = randn(8, 2, 16, seed=1)
    rows = []
    for counts, lengths in (([1], [11]), ([1, 1], [11, 24]), ([1, 7], [11, 20])):
        out = poisoned(sum(counts), 2, 16, dtype=torch.float32)
        table = torch.tensor([[2, 1, 0], [3, 1, 2]], dtype=torch.int32)[: len(counts)]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        apply(out, q[: sum(counts)], cache, cache, table, lens, starts, max(counts), SCALE)
        rows.append(out[0])
    assert_near(rows[1], rows[0].double())
    assert_near(rows[2], rows[0].double())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(lens - m + torch.arange", "(lens + torch.arange"),
        ("        scale=scale,\n", ""),
        ("row[length:] = 0 ", "pass "),
        ("used].masked_fill(past, 0)", "used]"),
        (
            "q.float().transpose(1, 2),",
            "q.float().view(b, m, -1, key_cache.shape[2], q.shape[3]).transpose(2, 3).flatten(2, 3).transpose(1, 2),",
        ),
        ("out[rows] =", "out[rows.start + 1 : rows.stop + 1] ="),
    ],
    ids=["not causal", "no scale", "NaN read", "table past the end", "head mapping", "row offset"],
)
def test_mutants_of_the_spec(old, new, tmp_path):
    assert caught(check_mixed, implementation(mutant(paged_attention, old, new, tmp_path), "spec"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<= (context + query)[:, None]", "< (context + query)[:, None]"),
        ("<= (context + query)[:, None]", "<= query[:, None]"),
        ("score_scale = scale *", "score_scale ="),
        ("kv_mask = inside[:, None] & (d < D)[None, :]", "kv_mask = (n[:, None] >= 0) & (d < D)[None, :]"),
        ("head = kv_head * GROUP + m % GROUP", "head = kv_head + (m % GROUP) * 2"),
        ("& (query < query_len)", ""),
        ("acc * shrink[:, None]", "acc"),
        ("first + BLOCK_Q, query_len), 0)", "first + 1, query_len), 0)"),
    ],
    ids=[
        "own key unseen",
        "context forgotten",
        "no scale",
        "NaN read",
        "head mapping",
        "rows past the end",
        "no rescaling",
        "keys cut",
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_mutants_of_the_kernel(old, new, tmp_path):
    pytest.importorskip("triton")
    apply = implementation(mutant(paged_attention, old, new, tmp_path), "interpret")
    long = Batch([(3, 70), (1, 9)])
    assert caught(check_mixed, apply) or caught(lambda f: check_batch(f, long), apply)
