"""One step's attention inputs over a shuffled pool, poisoned wherever no query may look."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mrv2lab.config import CacheConfig, EngineConfig, KVGroup, ModelConfig, RunnerConfig, SchedulerConfig
from mrv2lab.protocol import CommonAttentionMetadata
from mrv2lab.runtime.base import Runtime

BLOCK = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16

CONFIG = EngineConfig(
    model=ModelConfig(
        vocab_size=16,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=16,
        max_position_embeddings=64,
    ),
    cache=CacheConfig(64, BLOCK),
    scheduler=SchedulerConfig(max_num_reqs=8, max_num_batched_tokens=64, max_model_len=64),
    runner=RunnerConfig(device="cpu"),
)


@dataclass
class Step:
    """``requests`` are (queries, length). q, out: [t, Hq, D]; caches [blocks, BLOCK, Hk, D]."""

    common: CommonAttentionMetadata
    q: torch.Tensor
    out: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    want: torch.Tensor
    """[t, Hq, D] float64, from dense attention."""


def make_step(
    rt: Runtime,
    requests: list[tuple[int, int]],
    window: int | None = None,
    *,
    seed: int = 0,
    shape: tuple[int, int, int, int] = (HEADS, KV_HEADS, HEAD_DIM, BLOCK),
    dtype: torch.dtype = torch.float32,
    strict: bool = True,
) -> Step:
    """NaN stands before the window, behind the end and in the null block. Not ``strict``: a block that the window
    reaches at all holds its own values, as it does in an engine, where blocks are let go whole."""
    heads, kv_heads, head_dim, block = shape
    generator = torch.Generator().manual_seed(seed)
    scale = head_dim**-0.5
    counts = [n for n, _ in requests]
    needed = [-(-length // block) for _, length in requests]
    ids = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    caches = [torch.full((len(ids) + 1, block, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    table = torch.full((len(requests), max(needed) + 1), ids.pop(), dtype=torch.int32)  # stale everywhere else
    q = torch.randn(sum(counts), heads, head_dim, generator=generator).to(dtype)
    wants, row = [], 0
    for j, (n, length) in enumerate(requests):
        blocks = [ids.pop() for _ in range(needed[j])]
        first = 0 if window is None else max(length - n - window + 1, 0)
        dense = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        held = torch.arange(first if strict else first // block * block, length)
        for cache, values in zip(caches, dense, strict=True):
            cache[torch.tensor(blocks, dtype=torch.long)[held // block], held % block] = values[held]
        # Before the window the table's entries are stale too.
        table[j, first // block : needed[j]] = torch.tensor(blocks[first // block :], dtype=torch.int32)
        keys, values = dense.double().repeat_interleave(heads // kv_heads, 2)
        position = torch.arange(length - n, length).view(n, 1, 1)
        seen = torch.arange(length) <= position
        if window is not None:
            seen &= torch.arange(length) > position - window
        scores = torch.einsum("mhd,nhd->mhn", q[row : row + n].double(), keys) * scale
        wants.append(torch.einsum("mhn,nhd->mhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values))
        row += n
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lengths = np.array([length for _, length in requests], np.int32)
    adopt = rt.adopt
    common = CommonAttentionMetadata(
        query_start_loc=adopt(torch.from_numpy(starts.copy()), "query_start_loc"),
        query_start_loc_np=starts,
        seq_lens=adopt(torch.from_numpy(lengths.copy()), "seq_lens"),
        seq_lens_np_upper_bound=lengths,
        num_reqs=len(requests),
        num_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=int(lengths.max()),
        block_table=adopt(table, "block_table"),
        slot_mapping=adopt(torch.full((sum(counts),), -1), "slot_mapping"),
    )
    key_cache, value_cache = (adopt(cache, name) for cache, name in zip(caches, ("k", "v"), strict=True))
    return Step(common, adopt(q, "q"), adopt(torch.full_like(q, 7), "out"), key_cache, value_cache, torch.cat(wants))


def group(window: int | None) -> KVGroup:
    """A group of layer 0."""
    return KVGroup(window, (0,))
