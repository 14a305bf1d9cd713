"""What the ops that look for a *cut* share: the definition in NumPy, and helpers for kernels.

A row's cut is the last token that it keeps, in the order of falling logits and, among equal logits, rising ids: token t
stays if ``x[t] > value`` or ``x[t] == value and t <= id``. It is found without sorting the row. ``id == OFF`` says that
nothing is cut. NaN counts as -inf, and -0.0 equals 0.0.

Logits may lie in memory before their temperature: every x here is then the quotient, rounded to float32, that
``temperature`` would have put in its place (:func:`scaled`), so that the cut is the same. ``group_max`` alone holds
logits as they lie there.

Tokens weigh ``exp(x - m)``, m the row's maximum, and exactly 1 where x is m, so +inf is no special case.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit

tl: Any = None

OFF = 2**31 - 1
"""The id of a cut that keeps everything."""
GROUP = 128
"""Tokens whose maximum is remembered: 1/128 of the logits' memory."""
BLOCK = 2048
"""Tokens a program of a pass over the logits. Fixed, so that sums do not depend on the batch."""
PIVOTS = 8
"""Thresholds that one narrowing pass tries."""
BOUNDS = 6
"""Columns of ``bounds``: maximum, target weight, lower and upper (exclusive) logit, weight at and above the upper, and
the temperature by which the row's logits are yet to be divided, 1 for none."""

NEAR_TOKENS = 64
"""Tokens of a block that ``list_near`` can list."""

DONE, NARROW, SEARCH, NEAR = 0, 1, 2, 3
"""What is left to do for a row: nothing; its top-p cut lies between two known logits; everything; its top-p cut is
among the tokens listed by the round of this number, or of a greater one."""


def num_groups(vocab: int) -> int:
    """Columns of ``group_max``."""
    return cdiv(vocab, GROUP)


def num_blocks(vocab: int) -> int:
    """Columns of ``block_max``, ``block_sum``, ``block_count`` and ``sums``."""
    return cdiv(vocab, BLOCK)


# -- the definition ----------------------------------------------------------------------------------------------------
def divisor_spec(temperature: Any, index: int) -> Any:
    """float32: by what the logits of a row of ``temperature`` float32[R] are divided; 1 for greedy rows and None."""
    t = np.float32(1 if temperature is None else temperature[index])
    return t if t != 0 else np.float32(1)


def clean_spec(x: Any, t: Any = None) -> Any:
    """float32[V] tensor of any float type -> float32[V] array, divided by t, NaN as -inf and -0.0 as 0.0."""
    x = x.float().numpy()
    if t is not None and t != 1:
        x = x / np.float32(t)
    return np.where(np.isnan(x), np.float32("-inf"), x) + np.float32(0)


def weights_spec(x: Any, m: Any) -> Any:
    """float32 exp(x - m), 1 where x is m."""
    with np.errstate(invalid="ignore"):
        return np.where(x == m, np.float32(1), np.exp(x - m, dtype=np.float32))


def cut_spec(x: Any, k: int, p: float) -> tuple[Any, int]:
    """The cut (value, id) of clean float32 logits [V]: top-k, off unless 0 < k < V, then top-p of what it keeps, off
    from p = 1. Cumulative weights are float64 sums rounded to float32, and so is their product with p."""
    finite = np.flatnonzero(x > -np.inf)
    by_k = 0 < k < len(x) and k < len(finite)
    if not len(finite) or not (by_k or p < 1):
        return np.float32("-inf"), OFF
    ids = finite
    if by_k:
        least = np.partition(x, len(x) - k)[len(x) - k]
        above = np.flatnonzero(x > least)
        ids = np.concatenate([above, np.flatnonzero(x == least)[: k - len(above)]])
    ids = ids[np.argsort(-x[ids], kind="stable")]
    count = len(ids)
    if p < 1:
        cumulative = np.cumsum(weights_spec(x[ids], x[ids[0]]), dtype=np.float64).astype(np.float32)
        count = min(int(np.searchsorted(cumulative, np.float32(p) * cumulative[-1])) + 1, count)
    return x[ids[count - 1]], int(ids[count - 1])


# -- for kernels -------------------------------------------------------------------------------------------------------
@jit
def divisor(temperature, index):
    """By what the logits of a row of ``temperature`` are divided; 1 for greedy rows and None."""
    t = tl.full([], 1.0, tl.float32)
    if temperature is not None:
        t = tl.load(temperature + index)
        t = tl.where(t == 0.0, 1.0, t)
    return t


@jit
def scaled(x, t):
    """Any float type -> float32 x / t, correctly rounded."""
    x = x.to(tl.float32)
    if t != 1.0:
        x = tl.div_rn(x, t)
    return x


@jit
def clean(x):
    """Any float type -> float32, NaN as -inf and -0.0 as 0.0, whose keys would differ."""
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@jit
def order_key(x):
    """Clean float32 -> uint32 in the same order: sign bit set for positive, all bits flipped for negative numbers.
    The key of -inf is 0x007FFFFF."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def key_value(key):
    """The logit of a key."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit
def weight(x, m):
    """float32 exp(x - m), 1 where x is m."""
    return tl.where(x == m, 1.0, tl.exp(x - m))


@jit
def largest_key(keys, weights, above, target):
    """The greatest uint32 key q with ``above + sum(weights where keys >= q) >= target``, bit by bit; 0 if there is
    none. keys, weights [C], those that do not count with weight 0."""
    q = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = q | bit
        total = above + tl.sum(tl.where(keys >= trial, weights, 0.0), axis=0)
        q = tl.where(total >= target, trial, q)
        bit = bit >> 1
    return q


@jit
def ties_needed(above, target, each):
    """How many equal weights reach ``target``: the least j >= 1 with above + j each >= target."""
    return tl.maximum(tl.ceil((target - above) / each), 1.0).to(tl.int32)


@jit
def load_block(base, maxima, block, bound, t, vocab, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Token ids and clean float32 logits divided by t, both [BLOCK / GROUP, GROUP], of a block of the row at ``base``.
    Groups whose maximum (at ``maxima``) is below ``bound`` are not read and count as -inf: one mask a group, so reads
    stay wide."""
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    live = scaled(tl.load(maxima + group, mask=group < groups, other=float("-inf")), t) >= bound
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(base + token, mask=(token < vocab) & live[:, None], other=float("-inf"))
    return token, clean(scaled(x, t))
