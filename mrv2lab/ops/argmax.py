"""Greedy choice: the argmax of each row of logits, in two launches, ties to the lowest token id.

The first pass takes [n, blocks] local maxima, the second reduces them; Gumbel sampling shares the second. The block
size follows from the shape of ``local_max``: whoever allocates it (:func:`num_blocks`) chooses.
NaN logits count as -inf. Rows whose ``expanded_idx_mapping`` is negative are padding: token 0, logits not read.
Counterpart in vLLM: ``v1/worker/gpu/sample/gumbel.py`` at temperature 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl: Any = None


def num_blocks(vocab: int, block: int = 4096) -> int:
    """How many columns ``local_max`` and ``local_arg`` need for blocks of ``block`` tokens (a power of two)."""
    return cdiv(vocab, block)


def block_size(vocab: int, blocks: int) -> int:
    """The power of two with which ``vocab`` tokens fill ``blocks`` blocks; ValueError if there is none."""
    block = next_power_of_2(cdiv(vocab, blocks))
    if cdiv(vocab, block) != blocks:
        raise ValueError(f"no power of two divides {vocab} tokens into {blocks} blocks; allocate with num_blocks()")
    return block


def num_warps(block: int) -> int:
    """16 tokens a thread, 1 to 8 warps."""
    return min(max(block // 512, 1), 8)


def store_block_maxima(local_max: Any, local_arg: Any, row: int, scores: Any) -> None:
    """The end of a first pass in NumPy: float32 scores [V] without NaN -> row of local_max, local_arg [n, B]."""
    blocks = local_max.shape[1]
    block = block_size(len(scores), blocks)
    padded = np.full((blocks, block), -np.inf, np.float32)
    padded.reshape(-1)[: len(scores)] = scores
    local_max.numpy()[row] = padded.max(axis=1)
    local_arg.numpy()[row] = padded.argmax(axis=1) + np.arange(blocks) * block


def argmax_blocks_spec(local_max: Any, local_arg: Any, logits: Any, expanded_idx_mapping: Any) -> None:
    """Write local_max float32[n, B] and local_arg int32[n, B], each block's best logit and its lowest token id, from
    logits [n, V] of any float type and row stride (columns adjacent). Padding rows (index < 0) write -inf and 0."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index < 0:
            local_max[row], local_arg[row] = float("-inf"), 0
            continue
        x = logits[row].float().numpy()
        store_block_maxima(local_max, local_arg, row, np.where(np.isnan(x), np.float32("-inf"), x))


@jit
def argmax_blocks_kernel(
    local_max, local_arg, logits, stride, expanded_idx_mapping, vocab, blocks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(expanded_idx_mapping + row) < 0:
        tl.store(local_max + row * blocks + block, float("-inf"))
        tl.store(local_arg + row * blocks + block, 0)
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    best, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(local_max + row * blocks + block, best)
    tl.store(local_arg + row * blocks + block, block * BLOCK + at)


@op(spec=argmax_blocks_spec, kernel=argmax_blocks_kernel, writes=("local_max", "local_arg"), numpy=False)
def argmax_blocks(kernel, local_max, local_arg, logits, expanded_idx_mapping):
    (n, blocks), vocab = local_max.shape, logits.shape[1]
    block = block_size(vocab, blocks)
    if n:
        kernel[(n, blocks)](
            local_max, local_arg, logits, logits.stride(0), expanded_idx_mapping, vocab, blocks,
            BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip


def reduce_blocks_spec(out: Any, local_max: Any, local_arg: Any) -> None:
    """Write out int64[n]: the token of each row's best block, the lowest block if several are best."""
    best = local_max.numpy().argmax(axis=1)
    out.numpy()[:] = local_arg.numpy()[np.arange(len(best)), best]


@jit
def reduce_blocks_kernel(out, local_max, local_arg, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    x = tl.load(local_max + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, best = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(local_arg + row * blocks + best).to(tl.int64))


@op(spec=reduce_blocks_spec, kernel=reduce_blocks_kernel, writes=("out",), numpy=False)
def reduce_blocks(kernel, out, local_max, local_arg):
    n, blocks = local_max.shape
    if n:
        kernel[(n,)](out, local_max, local_arg, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1)


def argmax_rows(rt: Any, out: Any, local_max: Any, local_arg: Any, logits: Any, expanded_idx_mapping: Any) -> None:
    """Both launches: out int64[n] = argmax of each row. For batches in which every temperature is 0."""
    argmax_blocks(rt, local_max, local_arg, logits, expanded_idx_mapping)
    reduce_blocks(rt, out, local_max, local_arg)
