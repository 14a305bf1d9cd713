"""One pass over logits that serves top-k, top-p and log-probabilities: maxima of groups, sums of blocks, a rank.

The k-th largest group maximum is a lower bound of the k-th largest logit that few logits exceed, so whoever looks for
the top k reads only groups whose maximum reaches it: here about 20 of 1,187 for k = 20. The log-sum-exp of a row is the
reduction of its blocks' (max, sum); a token's rank is the sum of its blocks' counts.
No counterpart in vLLM, whose ``sample/top_k_top_p_triton.py`` and ``torch.topk`` read whole rows several times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import BLOCK, GROUP, clean, clean_spec, divisor, divisor_spec, scaled, weight, weights_spec
from mrv2lab.ops._op import jit, op

tl: Any = None


def logit_groups_spec(
    group_max: Any,
    block_max: Any,
    block_sum: Any,
    block_count: Any,
    logits: Any,
    logits_rows: Any,
    idx_mapping: Any,
    tokens: Any,
    count: bool,
    temperature: Any,
) -> None:
    """Write float32 group_max [n, ceil(V / 128)], block_max and block_sum [n, ceil(V / 2048)]: maxima, and sums of
    exp(x - block_max) (0 for a block of -inf).

    Of ``temperature`` float32[R], read through idx_mapping (None = 1, and 0 counts as 1): x is the logit divided by it,
    but group_max holds maxima of the logits as they are.

    Row i is about row logits_rows[i] (int32[n]) of logits [N, V], any float type and row stride, columns adjacent.
    Rows with a negative logits_rows or idx_mapping (int32[n]) are padding: nothing is read or written. With ``count``
    also block_count int32[n, ceil(V / 2048)]: how many logits are at least that of the row's token (tokens int64[N],
    one a row of logits; a negative one counts 0).
    """
    vocab = logits.shape[1]
    for i, (row, index) in enumerate(zip(logits_rows.tolist(), idx_mapping.tolist(), strict=True)):
        if row < 0 or index < 0:
            continue
        x = clean_spec(logits[row])
        groups = np.full(group_max.shape[1] * GROUP, -np.inf, np.float32)
        groups[:vocab] = x
        group_max.numpy()[i] = groups.reshape(-1, GROUP).max(axis=1)
        x = clean_spec(logits[row], divisor_spec(temperature, index))
        blocks = np.full(block_max.shape[1] * BLOCK, -np.inf, np.float32)
        blocks[:vocab] = x
        blocks = blocks.reshape(-1, BLOCK)
        m = blocks.max(axis=1)
        sums = weights_spec(blocks, m[:, None]).sum(axis=1, dtype=np.float64)
        block_max.numpy()[i] = m
        block_sum.numpy()[i] = np.where(m == -np.inf, 0, sums)
        if count:
            token = int(tokens[row])
            atleast = np.zeros(blocks.size, bool)
            if token >= 0:
                atleast[:vocab] = x >= x[token]
            block_count.numpy()[i] = atleast.reshape(-1, BLOCK).sum(axis=1)


@jit
def logit_groups_kernel(
    group_max,
    block_max,
    block_sum,
    block_count,
    logits,
    stride,
    logits_rows,
    idx_mapping,
    tokens,
    temperature,
    vocab,
    groups,
    blocks,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(logits_rows + i).to(tl.int64)
    index = tl.load(idx_mapping + i)
    if (row < 0) | (index < 0):
        return
    t = divisor(temperature, index)
    group = block * ROWS + tl.arange(0, ROWS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < vocab
    x = clean(tl.load(logits + row * stride + token, mask=inside, other=float("-inf")))
    largest = tl.max(x, axis=1)
    tl.store(group_max + i * groups + group, largest, mask=group < groups)
    m = clean(scaled(tl.max(largest, axis=0), t))
    if t != 1.0:
        x = clean(tl.div_rn(x, t))
    total = tl.sum(tl.sum(weight(x, m), axis=1), axis=0)
    tl.store(block_max + i * blocks + block, m)
    tl.store(block_sum + i * blocks + block, tl.where(m == float("-inf"), 0.0, total))
    if COUNT:
        chosen = tl.load(tokens + row)
        value = clean(scaled(tl.load(logits + row * stride + chosen, mask=chosen >= 0, other=0.0), t))
        atleast = (inside & (x >= value) & (chosen >= 0)).to(tl.int32)
        tl.store(block_count + i * blocks + block, tl.sum(tl.sum(atleast, axis=1), axis=0))


@op(
    spec=logit_groups_spec,
    kernel=logit_groups_kernel,
    writes=("group_max", "block_max", "block_sum", "block_count"),
    numpy=False,
)
def logit_groups(
    kernel, group_max, block_max, block_sum, block_count, logits, logits_rows, idx_mapping, tokens, count, temperature
):  # fmt: skip
    (n, groups), blocks = group_max.shape, block_max.shape[1]
    if n:
        kernel[(n, blocks)](
            group_max, block_max, block_sum, block_count, logits, logits.stride(0), logits_rows, idx_mapping, tokens,
            temperature, logits.shape[1], groups, blocks, COUNT=bool(count), GROUP=GROUP, ROWS=BLOCK // GROUP,
            num_warps=4,
        )  # fmt: skip
