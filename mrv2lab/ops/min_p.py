"""Drop tokens that are much less likely than the most likely one: logits below max + log(min_p) become -inf.

Two launches over [n, blocks] programs: each block's best logit, then the cut. A block whose best is below the
threshold is filled without being read again. Where no later stage needs masked logits, :func:`min_p_cut` alone finds
the threshold in one read, and the sampling pass may compare with it. Counterpart in vLLM:
``v1/worker/gpu/sample/min_p.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit, next_power_of_2, op
from mrv2lab.ops.argmax import block_size, num_warps

tl: Any = None

OFF = float("-inf")
"""log(min_p) of rows that drop nothing."""


def min_p_blocks_spec(local_max: Any, logits: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """Write local_max float32[n, B]: each block's best logit, of rows that use min-p; other rows stay as they are.

    logits [n, V] of any float type and row stride, columns adjacent, divided by the temperature; expanded_idx_mapping
    int32[n] -> row of log_min_p float32[R], < 0 = padding. NaN counts as -inf.
    """
    blocks, vocab = local_max.shape[1], logits.shape[1]
    block = block_size(vocab, blocks)
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index >= 0 and log_min_p[index] != OFF:
            padded = np.full(blocks * block, -np.inf, np.float32)
            x = logits[row].float().numpy()
            padded[:vocab] = np.where(np.isnan(x), np.float32("-inf"), x)
            local_max.numpy()[row] = padded.reshape(blocks, block).max(axis=1)


@jit
def min_p_blocks_kernel(local_max, logits, stride, expanded_idx_mapping, log_min_p, vocab, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = tl.load(expanded_idx_mapping + row)
    if index < 0:
        return
    if tl.load(log_min_p + index) == float("-inf"):
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    tl.store(local_max + row * blocks + block, tl.max(tl.where(x == x, x, float("-inf")), axis=0))


@op(spec=min_p_blocks_spec, kernel=min_p_blocks_kernel, writes=("local_max",), numpy=False)
def min_p_blocks(kernel, local_max, logits, expanded_idx_mapping, log_min_p):
    (n, blocks), vocab = local_max.shape, logits.shape[1]
    block = block_size(vocab, blocks)
    if n:
        kernel[(n, blocks)](
            local_max, logits, logits.stride(0), expanded_idx_mapping, log_min_p, vocab, blocks, BLOCK=block,
            num_warps=num_warps(block),
        )  # fmt: skip


def min_p_mask_spec(logits: Any, local_max: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """logits [n, V] below max + log(min_p), or NaN, become -inf; the sum is one float32 addition. local_max
    float32[n, B] as :func:`min_p_blocks` wrote it; the rest as there. Rows of -inf alone stay as they are."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index >= 0 and log_min_p[index] != OFF:
            threshold = local_max[row].max() + log_min_p[index]
            logits[row, ~(logits[row].float() >= threshold)] = float("-inf")


@jit
def min_p_mask_kernel(
    logits, stride, local_max, expanded_idx_mapping, log_min_p, vocab, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = tl.load(expanded_idx_mapping + row)
    if index < 0:
        return
    log_p = tl.load(log_min_p + index)
    if log_p == float("-inf"):
        return
    b = tl.arange(0, BLOCKS)
    best = tl.load(local_max + row * blocks + b, mask=b < blocks, other=float("-inf"))
    threshold = tl.max(best, axis=0) + log_p
    token = block * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), float("-inf"), logits.dtype.element_ty)
    if tl.load(local_max + row * blocks + block) < threshold:
        tl.store(logits + row * stride + token, nothing, mask=token < vocab)
        return
    raw = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    x = raw.to(tl.float32)
    # What stays is written too: a mask that differs from token to token would break up the wide stores.
    tl.store(logits + row * stride + token, tl.where(x >= threshold, raw, nothing), mask=token < vocab)


@op(spec=min_p_mask_spec, kernel=min_p_mask_kernel, writes=("logits",), numpy=False)
def min_p_mask(kernel, logits, local_max, expanded_idx_mapping, log_min_p):
    (n, blocks), vocab = local_max.shape, logits.shape[1]
    block = block_size(vocab, blocks)
    if n:
        kernel[(n, blocks)](
            logits, logits.stride(0), local_max, expanded_idx_mapping, log_min_p, vocab, blocks,
            BLOCKS=next_power_of_2(blocks), BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip


def min_p_threshold_spec(cut: Any, local_max: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """Write cut float32[n]: the least logit that each row keeps, -inf for rows without min-p and padding. local_max
    float32[n, B] as :func:`min_p_blocks` wrote it."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        used = index >= 0 and log_min_p[index] != OFF
        cut[row] = local_max[row].max() + log_min_p[index] if used else OFF


@jit
def min_p_threshold_kernel(cut, local_max, expanded_idx_mapping, log_min_p, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(expanded_idx_mapping + row)
    log_p = tl.load(log_min_p + index, mask=index >= 0, other=float("-inf"))
    threshold = log_p
    if log_p != float("-inf"):
        b = tl.arange(0, BLOCKS)
        best = tl.load(local_max + row * blocks + b, mask=b < blocks, other=float("-inf"))
        threshold = tl.max(best, axis=0) + log_p
    tl.store(cut + row, threshold)


@op(spec=min_p_threshold_spec, kernel=min_p_threshold_kernel, writes=("cut",), numpy=False)
def min_p_threshold(kernel, cut, local_max, expanded_idx_mapping, log_min_p):
    n, blocks = local_max.shape
    if n:
        kernel[(n,)](
            cut, local_max, expanded_idx_mapping, log_min_p, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1
        )  # fmt: skip


def apply_min_p(rt: Any, logits: Any, local_max: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """Both launches in place; ``local_max`` float32[n, B] is scratch."""
    min_p_blocks(rt, local_max, logits, expanded_idx_mapping, log_min_p)
    min_p_mask(rt, logits, local_max, expanded_idx_mapping, log_min_p)


def min_p_cut(rt: Any, cut: Any, local_max: Any, logits: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """Both launches that leave the logits alone: cut float32[n], the least logit that each row keeps."""
    min_p_blocks(rt, local_max, logits, expanded_idx_mapping, log_min_p)
    min_p_threshold(rt, cut, local_max, expanded_idx_mapping, log_min_p)
