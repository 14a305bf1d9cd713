"""Batches for the attention ops: keys and values in shuffled blocks of a pool that is NaN elsewhere, and the float64
answer. Blocks out of every query's window are given back, so that the table has the null block in their place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.backends import poisoned
from tests.ops.floats import randn

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
    window: int = 0


@dataclass
class Inputs:
    """Arguments of the ops, by their names there."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    # [t, Hq, D] float64; NaN for a request of length 0, whose rows nobody writes
    want: torch.Tensor


def inputs(batch: Batch) -> Inputs:
    """Block 0 is NaN throughout; the table's entries past a request's end point nowhere."""
    (hq, hk), size, window = batch.heads, batch.block_size, batch.window
    lengths = [length for _, length in batch.requests] + [0] * batch.padding
    queries = [count for count, _ in batch.requests] + [0] * batch.padding
    starts = torch.tensor([0, *queries]).cumsum(0)
    t = int(starts[-1])
    blocks = [-(-length // size) for length in lengths]
    order = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)) + 1).tolist()
    table = torch.full((len(lengths), max(blocks) + 1), 2**30, dtype=torch.int32)
    key_cache, value_cache = (poisoned(sum(blocks) + 1, size, hk, batch.head_dim, dtype=batch.dtype) for _ in "kv")
    q = randn(t + SPARE, hq, batch.head_dim, dtype=batch.dtype)
    want = torch.empty(t, hq, batch.head_dim, dtype=torch.float64)
    for j, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        keys, values = (randn(length, hk, batch.head_dim, dtype=batch.dtype, seed=10 * j + s) for s in (1, 2))
        reach = max(0, length - count + 1 - window) if window else 0
        for block in range(blocks[j]):
            table[j, block] = order.pop() if (block + 1) * size > reach else 0
            if table[j, block]:
                for cache, rows in ((key_cache, keys), (value_cache, values)):
                    part = rows[block * size : (block + 1) * size]
                    cache[int(table[j, block]), : len(part)] = part
        for i in range(count):
            end = length - count + i + 1
            begin = max(0, end - window) if window else 0
            mine = keys[begin:end].double().repeat_interleave(hq // hk, 1)
            scores = torch.einsum("nhd,hd->hn", mine, q[starts[j] + i].double()) * SCALE
            mine = values[begin:end].double().repeat_interleave(hq // hk, 1)
            want[starts[j] + i] = (
                torch.einsum("hn,nhd->hd", torch.softmax(scores, 1), mine) if end > 0 else float("nan")
            )
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    caches = (key_cache, value_cache)
    return Inputs(q, caches, table, seq_lens, starts.to(torch.int32), max([*queries, 1]), want)
