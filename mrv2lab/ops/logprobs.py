"""Log-probabilities of chosen tokens, and of whole rows for who asked for the vocabulary: never [n, V] of them.

A log-probability is ``(x - m) - log(sum of exp(x - m))``; the row's maximum m and its sum come from the blocks of
``logit_groups``. Counterpart in vLLM: ``sample/logprob.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import clean, clean_spec, weight, weights_spec
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl: Any = None


def _values_spec(x: Any, block_max: Any, block_sum: Any, as_logits: bool) -> Any:
    """float32: of logits x of one row, from its blocks' maxima and sums."""
    if as_logits:
        return x
    m = block_max.max()
    total = np.float32((block_sum * weights_spec(block_max, m)).sum(dtype=np.float64)) if m > -np.inf else np.float32(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(x == -np.inf, x, np.where(x == m, np.float32(0), x - m) - np.log(total))


def token_logprobs_spec(
    values: Any,
    ranks: Any,
    ids: Any,
    logits: Any,
    logits_rows: Any,
    block_max: Any,
    block_sum: Any,
    block_count: Any,
    as_logits: bool,
) -> None:
    """Write values float32[n, 1 + K], the log-probability (``as_logits``: the logit) of ids int32[n, 1 + K], -inf where
    the id is -1, and ranks int32[n]: how many logits are at least that of column 0, itself counted; 0 for padding.

    logits [N, V] and logits_rows int32[n] as in ``logit_groups``, which wrote block_max, block_sum and block_count of
    the same rows. A token of -inf has -inf.
    """
    values.fill_(float("-inf"))
    ranks.fill_(0)
    for i, row in enumerate(logits_rows.tolist()):
        given = ids.numpy()[i] >= 0
        if row < 0 or not given.any():
            continue
        x = clean_spec(logits[row])[ids.numpy()[i][given]]
        values.numpy()[i][given] = _values_spec(x, block_max.numpy()[i], block_sum.numpy()[i], as_logits)
        ranks[i] = int(block_count[i].sum()) if given[0] else 0


@jit
def row_total(block_max, block_sum, i, blocks, BLOCKS: tl.constexpr):
    """Maximum m of row i and the sum of its exp(x - m).

    Launch with ``enable_fp_fusion=False``: a product fused into the exchange between lanes is rounded in one lane of a
    pair alone, their sums differ by an ulp, and equal logits get different log-probabilities, by which the host orders.
    """
    b = tl.arange(0, BLOCKS)
    maxima = tl.load(block_max + i * blocks + b, mask=b < blocks, other=float("-inf"))
    m = tl.max(maxima, axis=0)
    total = tl.sum(tl.load(block_sum + i * blocks + b, mask=b < blocks, other=0.0) * weight(maxima, m), axis=0)
    return m, total


@jit
def log_probability(x, m, total):
    """Of clean logits x; -inf stays."""
    return tl.where(x == float("-inf"), x, tl.where(x == m, 0.0, x - m) - tl.log(total))


@jit(do_not_specialize=["columns"])
def token_logprobs_kernel(
    values,
    ranks,
    ids,
    columns,
    logits,
    stride,
    logits_rows,
    block_max,
    block_sum,
    block_count,
    blocks,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AS_LOGITS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(logits_rows + i).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    token = tl.load(ids + i * columns + column, mask=column < columns, other=-1)
    token = tl.where(row >= 0, token, -1)
    chosen = tl.max(tl.where(column == 0, token, -1), axis=0)
    x = clean(tl.load(logits + row * stride + token, mask=token >= 0, other=float("-inf")))
    if not AS_LOGITS:
        m, total = row_total(block_max, block_sum, i, blocks, BLOCKS)
        x = log_probability(x, m, total)
    tl.store(values + i * columns + column, x, mask=column < columns)
    b = tl.arange(0, BLOCKS)
    rank = tl.sum(tl.load(block_count + i * blocks + b, mask=b < blocks, other=0), axis=0)
    tl.store(ranks + i, tl.where(chosen >= 0, rank, 0))


@op(spec=token_logprobs_spec, kernel=token_logprobs_kernel, writes=("values", "ranks"), numpy=False)
def token_logprobs(kernel, values, ranks, ids, logits, logits_rows, block_max, block_sum, block_count, as_logits):
    (n, columns), blocks = ids.shape, block_max.shape[1]
    if n:
        kernel[(n,)](
            values, ranks, ids, columns, logits, logits.stride(0), logits_rows, block_max, block_sum, block_count,
            blocks, BLOCKS=next_power_of_2(blocks), COLUMNS=next_power_of_2(max(columns, 64)),
            AS_LOGITS=bool(as_logits), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def row_logprobs_spec(
    out: Any, logits: Any, logits_rows: Any, which: Any, block_max: Any, block_sum: Any, as_logits: bool
) -> None:
    """Write out float32[w, V], device, pinned or UVA: every token's log-probability (``as_logits``: logit), in the
    order of token ids. Row j is entry which[j] (int32[w]) of logits_rows int32[n], block_max and block_sum, as in
    ``token_logprobs``. Negative rows are padding and stay untouched."""
    for j, i in enumerate(which.tolist()):
        row = int(logits_rows[i]) if i >= 0 else -1
        if row >= 0:
            x = clean_spec(logits[row])
            out.numpy()[j] = _values_spec(x, block_max.numpy()[i], block_sum.numpy()[i], as_logits)


@jit
def row_logprobs_kernel(
    out,
    out_stride,
    logits,
    stride,
    logits_rows,
    which,
    block_max,
    block_sum,
    vocab,
    blocks,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AS_LOGITS: tl.constexpr,
):
    j = tl.program_id(0).to(tl.int64)
    i = tl.load(which + j).to(tl.int64)
    row = tl.load(logits_rows + i, mask=i >= 0, other=-1).to(tl.int64)
    if row < 0:
        return
    token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = clean(tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")))
    if not AS_LOGITS:
        m, total = row_total(block_max, block_sum, i, blocks, BLOCKS)
        x = log_probability(x, m, total)
    tl.store(out + j * out_stride + token, x, mask=token < vocab)


@op(spec=row_logprobs_spec, kernel=row_logprobs_kernel, writes=("out",), numpy=False)
def row_logprobs(kernel, out, logits, logits_rows, which, block_max, block_sum, as_logits):
    (w, vocab), blocks = out.shape, block_max.shape[1]
    if w:
        kernel[(w, cdiv(vocab, 1024))](
            out, out.stride(0), logits, logits.stride(0), logits_rows, which, block_max, block_sum, vocab, blocks,
            BLOCKS=next_power_of_2(blocks), COLUMNS=1024, AS_LOGITS=bool(as_logits), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
