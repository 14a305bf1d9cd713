"""Narrow the logits between which a top-p cut lies, for rows whose nucleus is too wide for ``cut_from_groups``.

A round tries eight thresholds between the bounds at once: their weights are summed by blocks over the whole row
(``narrow_sums``), and the two thresholds around p's share of the total become the bounds (``narrow_choose``). Two
rounds shrink the gap 81 times, to about 30 logits in a block of a normal row; three 729 times. Rows of another status
cost an empty program.
No counterpart in vLLM, whose ``sample/top_k_top_p_triton.py`` searches one pivot at a time in one program a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import BLOCK, BOUNDS, GROUP, NARROW, PIVOTS, clean_spec, load_block, weights_spec
from mrv2lab.ops._op import jit, next_power_of_2, op

tl: Any = None

CHUNK = 512
"""Tokens that a warp weighs at once."""


def _pivots_spec(maximum: float, lower: float, upper: float) -> Any:
    """float32[8], evenly spaced inside the bounds; the upper one may be infinite, the maximum is not."""
    low, high = np.float32(lower), np.minimum(np.float32(upper), np.float32(maximum))
    return low + (high - low) * (np.arange(1, PIVOTS + 1, dtype=np.float32) * np.float32(1 / (PIVOTS + 1)))


def narrow_sums_spec(sums: Any, status: Any, bounds: Any, logits: Any, logits_rows: Any, group_max: Any) -> None:
    """Write sums float32[n, blocks, 8] of rows whose status int32[n] is NARROW: the weight of each block's logits from
    each pivot up to the upper bound. bounds float32[n, 6], logits, logits_rows and group_max as in ``_cut``."""
    for i in np.flatnonzero(status.numpy() == NARROW):
        m, _, lower, upper, _, t = bounds.numpy()[i]
        x = clean_spec(logits[int(logits_rows[int(i)])], t)
        inside = np.where(x < upper, weights_spec(x, m), 0)
        padded = np.zeros((PIVOTS, sums.shape[1] * BLOCK))
        padded[:, : len(x)] = np.where(x >= _pivots_spec(m, lower, upper)[:, None], inside, 0)
        sums.numpy()[i] = padded.reshape(PIVOTS, -1, BLOCK).sum(axis=2).T


@jit
def _pivots(m, lower, upper, PIVOTS: tl.constexpr):
    """As in the spec, bit for bit in every kernel: launch with ``enable_fp_fusion=False``, else a logit between two
    roundings of one pivot would be weighed on both sides or on none."""
    share = (tl.arange(0, PIVOTS) + 1).to(tl.float32) * (1.0 / (PIVOTS + 1))
    return lower + (tl.minimum(upper, m) - lower) * share


@jit
def narrow_sums_kernel(
    sums,
    status,
    bounds,
    logits,
    stride,
    logits_rows,
    group_max,
    vocab,
    groups,
    blocks,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PIVOTS: tl.constexpr,
    NARROW: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(status + i) != NARROW:
        return
    m = tl.load(bounds + i * BOUNDS)
    lower = tl.load(bounds + i * BOUNDS + 2)
    upper = tl.load(bounds + i * BOUNDS + 3)
    t = tl.load(bounds + i * BOUNDS + 5)
    base = logits + tl.load(logits_rows + i).to(tl.int64) * stride
    way = tl.arange(0, PIVOTS)
    pivots = _pivots(m, lower, upper, PIVOTS)
    found = tl.zeros([PIVOTS], tl.float32)
    # One warp, whose sums need no barrier; a block of it is four loads.
    for chunk in range(block * (BLOCK // CHUNK), (block + 1) * (BLOCK // CHUNK)):
        _, x = load_block(base, group_max + i * groups, chunk, lower, t, vocab, groups, GROUP, CHUNK)
        x = tl.reshape(x, [CHUNK])
        w = tl.where(x < upper, tl.exp(x - m), 0.0)
        for j in tl.static_range(PIVOTS):
            pivot = tl.sum(tl.where(way == j, pivots, 0.0), axis=0)
            total = tl.sum(tl.where(x >= pivot, w, 0.0), axis=0)
            found += tl.where(way == j, total, 0.0)
    tl.store(sums + (i * blocks + block) * PIVOTS + way, found)


@op(spec=narrow_sums_spec, kernel=narrow_sums_kernel, writes=("sums",), numpy=False)
def narrow_sums(kernel, sums, status, bounds, logits, logits_rows, group_max):
    n, blocks = sums.shape[:2]
    if n:
        kernel[(n, blocks)](
            sums, status, bounds, logits, logits.stride(0), logits_rows, group_max, logits.shape[1],
            group_max.shape[1], blocks, BLOCK=BLOCK, BOUNDS=BOUNDS, CHUNK=CHUNK, GROUP=GROUP, PIVOTS=PIVOTS,
            NARROW=NARROW, num_warps=1, maxnreg=72, enable_fp_fusion=False,
        )  # fmt: skip


def narrow_choose_spec(bounds: Any, status: Any, sums: Any, mark: int) -> None:
    """Move the bounds float32[n, 6] of rows whose status int32[n] is NARROW to the pivots around the cut, from sums
    float32[n, blocks, 8] of ``narrow_sums``, and set their status to ``mark``."""
    for i in np.flatnonzero(status.numpy() == NARROW):
        m, target, lower, upper, above, _ = bounds.numpy()[i]
        pivots = _pivots_spec(m, lower, upper)
        weights = above + sums.numpy()[i].sum(axis=0, dtype=np.float64).astype(np.float32)
        reached = int((weights >= target).sum())
        if reached:
            bounds[i, 2] = float(pivots[reached - 1])
        if reached < PIVOTS:
            bounds[i, 3], bounds[i, 4] = float(pivots[reached]), float(weights[reached])
        status[int(i)] = mark


@jit(do_not_specialize=["mark"])
def narrow_choose_kernel(
    bounds, status, sums, mark, blocks, BLOCKS: tl.constexpr, BOUNDS: tl.constexpr, PIVOTS: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    if tl.load(status + i) != NARROW:
        return
    m = tl.load(bounds + i * BOUNDS)
    target = tl.load(bounds + i * BOUNDS + 1)
    lower = tl.load(bounds + i * BOUNDS + 2)
    upper = tl.load(bounds + i * BOUNDS + 3)
    above = tl.load(bounds + i * BOUNDS + 4)
    b = tl.arange(0, BLOCKS)
    way = tl.arange(0, PIVOTS)
    at = (i * blocks + b[:, None]) * PIVOTS + way[None, :]
    totals = above + tl.sum(tl.load(sums + at, mask=b[:, None] < blocks, other=0.0), axis=0)
    # Sums of more non-negative terms may round below those of fewer by an ulp; counting the reached ones is unmoved.
    reached = tl.sum((totals >= target).to(tl.int32), axis=0)
    pivots = _pivots(m, lower, upper, PIVOTS)
    tl.debug_barrier()  # every thread has read the bounds and the status
    tl.store(status + i, mark)
    if reached > 0:
        tl.store(bounds + i * BOUNDS + 2, tl.sum(tl.where(way == reached - 1, pivots, 0.0), axis=0))
    if reached < PIVOTS:
        tl.store(bounds + i * BOUNDS + 3, tl.sum(tl.where(way == reached, pivots, 0.0), axis=0))
        tl.store(bounds + i * BOUNDS + 4, tl.sum(tl.where(way == reached, totals, 0.0), axis=0))


@op(spec=narrow_choose_spec, kernel=narrow_choose_kernel, writes=("bounds", "status"), numpy=False)
def narrow_choose(kernel, bounds, status, sums, mark):
    n, blocks = sums.shape[:2]
    if n:
        kernel[(n,)](
            bounds, status, sums, mark, blocks, BLOCKS=next_power_of_2(blocks), BOUNDS=BOUNDS, PIVOTS=PIVOTS,
            NARROW=NARROW, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
