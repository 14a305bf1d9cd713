"""Drop tokens that are much less likely than the most likely one: logits below max + log(min_p) become -inf.

Two launches over [n, blocks] programs: the best logit of each block and of each group of 128, then the cut. A group
whose best is below the threshold is filled without being read again. Where no later stage needs masked logits,
:func:`min_p_cut` alone finds the threshold in one read, and the sampling pass may compare with it. Counterpart in vLLM:
``v1/worker/gpu/sample/min_p.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import GROUP, divisor, divisor_spec, scaled
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops.argmax import block_size, num_warps

tl: Any = None

OFF = float("-inf")
"""log(min_p) of rows that drop nothing."""


def group_size(block: int) -> int:
    """Tokens of a group, of which a block has a whole number."""
    return min(block, GROUP)


def num_groups(vocab: int, blocks: int) -> int:
    """Columns of ``group_max`` beside ``blocks`` columns of ``local_max``."""
    return cdiv(vocab, group_size(block_size(vocab, blocks)))


def min_p_blocks_spec(local_max: Any, group_max: Any, logits: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """Write local_max float32[n, B] and group_max float32[n, ``num_groups(V, B)``]: the best logit of each block and of
    each group, of rows that use min-p; other rows stay as they are.

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
            groups = padded.reshape(-1, group_size(block)).max(axis=1)
            group_max.numpy()[row] = groups[: group_max.shape[1]]


@jit
def min_p_blocks_kernel(
    local_max, group_max, logits, stride, expanded_idx_mapping, log_min_p, vocab, blocks, groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = tl.load(expanded_idx_mapping + row)
    if index < 0:
        return
    if tl.load(log_min_p + index) == float("-inf"):
        return
    group = block * ROWS + tl.arange(0, ROWS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(tl.where(x == x, x, float("-inf")), axis=1)
    tl.store(group_max + row * groups + group, best, mask=group < groups)
    tl.store(local_max + row * blocks + block, tl.max(best, axis=0))


@op(spec=min_p_blocks_spec, kernel=min_p_blocks_kernel, writes=("local_max", "group_max"), numpy=False)
def min_p_blocks(kernel, local_max, group_max, logits, expanded_idx_mapping, log_min_p):
    (n, blocks), vocab = local_max.shape, logits.shape[1]
    block = block_size(vocab, blocks)
    if n:
        kernel[(n, blocks)](
            local_max, group_max, logits, logits.stride(0), expanded_idx_mapping, log_min_p, vocab, blocks,
            group_max.shape[1], ROWS=block // group_size(block), GROUP=group_size(block), num_warps=num_warps(block),
        )  # fmt: skip


def min_p_mask_spec(logits: Any, local_max: Any, group_max: Any, expanded_idx_mapping: Any, log_min_p: Any) -> None:
    """logits [n, V] below max + log(min_p), or NaN, become -inf; the sum is one float32 addition. local_max
    float32[n, B] and group_max as :func:`min_p_blocks` wrote them; the rest as there. Rows of -inf alone stay as they
    are."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index >= 0 and log_min_p[index] != OFF:
            threshold = local_max[row].max() + log_min_p[index]
            logits[row, ~(logits[row].float() >= threshold)] = float("-inf")


@jit
def min_p_mask_kernel(
    logits, stride, local_max, group_max, expanded_idx_mapping, log_min_p, vocab, blocks, groups,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
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
    group = block * ROWS + tl.arange(0, ROWS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = tl.load(group_max + row * groups + group, mask=group < groups, other=float("-inf")) >= threshold
    raw = tl.load(logits + row * stride + token, mask=(token < vocab) & live[:, None], other=float("-inf"))
    nothing = tl.full((ROWS, GROUP), float("-inf"), logits.dtype.element_ty)
    x = raw.to(tl.float32)
    # What stays is written too: a mask that differs from token to token would break up the wide stores.
    tl.store(logits + row * stride + token, tl.where(x >= threshold, raw, nothing), mask=token < vocab)


@op(spec=min_p_mask_spec, kernel=min_p_mask_kernel, writes=("logits",), numpy=False)
def min_p_mask(kernel, logits, local_max, group_max, expanded_idx_mapping, log_min_p):
    (n, blocks), vocab = local_max.shape, logits.shape[1]
    block = block_size(vocab, blocks)
    if n:
        kernel[(n, blocks)](
            logits, logits.stride(0), local_max, group_max, expanded_idx_mapping, log_min_p, vocab, blocks,
            group_max.shape[1], BLOCKS=next_power_of_2(blocks), ROWS=block // group_size(block),
            GROUP=group_size(block), num_warps=num_warps(block),
        )  # fmt: skip


def min_p_threshold_spec(cut: Any, local_max: Any, expanded_idx_mapping: Any, log_min_p: Any, temperature: Any) -> None:
    """Write cut float32[n]: the least logit that each row keeps, -inf for rows without min-p and padding. local_max
    float32[n, B] as :func:`min_p_blocks` wrote it. Of temperature float32[R] (None: of 1) the cut is that of the
    quotients, though local_max is of logits that nobody divided."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        used = index >= 0 and log_min_p[index] != OFF
        cut[row] = OFF
        if used:
            best = local_max.numpy()[row].max() / divisor_spec(temperature, index)
            cut.numpy()[row] = best + log_min_p.numpy()[index]


@jit
def min_p_threshold_kernel(
    cut, local_max, expanded_idx_mapping, log_min_p, temperature, blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(expanded_idx_mapping + row)
    log_p = tl.load(log_min_p + index, mask=index >= 0, other=float("-inf"))
    threshold = log_p
    if log_p != float("-inf"):
        b = tl.arange(0, BLOCKS)
        best = tl.load(local_max + row * blocks + b, mask=b < blocks, other=float("-inf"))
        threshold = scaled(tl.max(best, axis=0), divisor(temperature, index)) + log_p
    tl.store(cut + row, threshold)


@op(spec=min_p_threshold_spec, kernel=min_p_threshold_kernel, writes=("cut",), numpy=False)
def min_p_threshold(kernel, cut, local_max, expanded_idx_mapping, log_min_p, temperature):
    n, blocks = local_max.shape
    if n:
        kernel[(n,)](
            cut, local_max, expanded_idx_mapping, log_min_p, temperature, blocks, BLOCKS=next_power_of_2(blocks),
            num_warps=1,
        )  # fmt: skip


def apply_min_p(
    rt: Any, logits: Any, local_max: Any, group_max: Any, expanded_idx_mapping: Any, log_min_p: Any
) -> None:
    """Both launches in place; ``local_max`` and ``group_max`` are scratch, of any contents."""
    min_p_blocks(rt, local_max, group_max, logits, expanded_idx_mapping, log_min_p)
    min_p_mask(rt, logits, local_max, group_max, expanded_idx_mapping, log_min_p)


def min_p_cut(
    rt: Any,
    cut: Any,
    local_max: Any,
    group_max: Any,
    logits: Any,
    expanded_idx_mapping: Any,
    log_min_p: Any,
    temperature: Any = None,
) -> None:
    """Both launches that leave the logits alone: cut float32[n], the least logit that each row keeps, or the least
    quotient by its temperature."""
    min_p_blocks(rt, local_max, group_max, logits, expanded_idx_mapping, log_min_p)
    min_p_threshold(rt, cut, local_max, expanded_idx_mapping, log_min_p, temperature)
