"""The cut of every row that is still undecided, exactly, whatever its logits: one program a row.

A top-p row whose few tokens between the bounds ``list_near`` has listed is decided from those. Where they were too many
(masses of equal or nearly equal logits) it collects them anew, and if it must, and for top-k beyond what
``cut_from_groups`` can list, the cut's key is searched over the whole row, eight thresholds a pass: at most 11 passes
for k and 11 for p. Slow, and rare.
No counterpart in vLLM, whose ``sample/top_k_top_p_triton.py`` stops after 18 iterations with an approximate pivot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import (
    BLOCK,
    BOUNDS,
    DONE,
    GROUP,
    NARROW,
    NEAR,
    NEAR_TOKENS,
    clean,
    clean_spec,
    cut_spec,
    key_value,
    largest_key,
    load_block,
    order_key,
    scaled,
    ties_needed,
    weight,
)  # fmt: skip
from mrv2lab.ops._op import jit, next_power_of_2, op

tl: Any = None


def search_cut_spec(
    cut_value: Any,
    cut_id: Any,
    status: Any,
    bounds: Any,
    candidates: Any,
    near: Any,
    near_count: Any,
    logits: Any,
    logits_rows: Any,
    idx_mapping: Any,
    group_max: Any,
    top_k: Any,
    top_p: Any,
) -> None:
    """Write cut_value and cut_id of rows whose status int32[n] is not DONE, and set it DONE.

    Arguments as in ``cut_from_groups``; bounds float32[n, 6] say where the cut of a NARROW row lies, and of one that is
    NEAR or beyond, whose tokens there ``list_near`` wrote; a SEARCH row's top-k cut lies no lower than the third."""
    for i in np.flatnonzero(status.numpy() != DONE):
        index = int(idx_mapping[int(i)])
        x = clean_spec(logits[int(logits_rows[int(i)])], bounds.numpy()[i, 5])
        cut_value[i], cut_id[i] = map(float, cut_spec(x, int(top_k[index]), float(top_p[index])))
        status[i] = DONE


@jit
def _sums_from(base, t, vocab, m, lo, step, hi, by_weight, last_key, last_id, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """float32[WAYS]: number, or weight, of the tokens whose key lies in [lo + j step, hi) and that come no later than
    token ``last_id`` of key ``last_key``."""
    way = tl.arange(0, WAYS)
    sums = tl.zeros([WAYS], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = clean(scaled(tl.load(base + token, mask=token < vocab, other=float("-inf")), t))
        key = order_key(x).to(tl.int64)
        counts = (key < hi) & ((key > last_key) | ((key == last_key) & (token <= last_id)))
        w = tl.where(counts & (token < vocab), tl.where(by_weight, weight(x, m), 1.0), 0.0)
        for j in tl.static_range(WAYS):
            total = tl.sum(tl.where(key >= lo + j * step, w, 0.0), axis=0)
            sums += tl.where(way == j, total, 0.0)
    return sums


@jit
def _search(base, t, vocab, m, lo, hi, above, target, by_weight, last_key, last_id, BLOCK: tl.constexpr):
    """The greatest key in [lo, hi) from which on the tokens weigh ``target``, and what those above it weigh. ``above``
    is the weight from hi on, below the target; that from lo on reaches it."""
    way = tl.arange(0, 8)
    above += tl.full([], 0.0, tl.float32)
    while hi - lo > 1:
        step = (hi - lo + 7) // 8
        sums = above + _sums_from(base, t, vocab, m, lo, step, hi, by_weight, last_key, last_id, BLOCK, 8)
        j = tl.max(tl.where((sums >= target) & (lo + way * step < hi), way, 0), axis=0)
        edge = lo + (j + 1) * step
        inner = (j < 7) & (edge < hi)
        above = tl.where(inner, tl.sum(tl.where(way == j + 1, sums, 0.0), axis=0), above)
        hi = tl.where(inner, edge, hi)
        lo = lo + j * step
    return lo, above


@jit
def _extent(base, t, vocab, lo, hi, BLOCK: tl.constexpr):
    """[lo, hi) without the keys at its ends that no token has: one pass that ends the search of equal logits."""
    least = hi
    greatest = lo
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = clean(scaled(tl.load(base + token, mask=token < vocab, other=float("-inf")), t))
        key = order_key(x).to(tl.int64)
        inside = (token < vocab) & (key >= lo) & (key < hi)
        least = tl.minimum(least, tl.min(tl.where(inside, key, hi), axis=0))
        greatest = tl.maximum(greatest, tl.max(tl.where(inside, key, lo), axis=0))
    return least, greatest + 1


@jit
def _nth_tie(base, t, vocab, key, need, last_key, last_id, BLOCK: tl.constexpr):
    """The need-th token of ``key``, by rising ids, or the last one if there are fewer; -1 if there is none."""
    seen = 0
    found = -1
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = clean(scaled(tl.load(base + token, mask=token < vocab, other=float("-inf")), t))
        tie = (token < vocab) & (order_key(x).to(tl.int64) == key) & ((key > last_key) | (token <= last_id))
        order = seen + tl.cumsum(tie.to(tl.int32), axis=0)
        found = tl.maximum(found, tl.max(tl.where(tie & (order <= need), token, -1), axis=0))
        seen += tl.sum(tie.to(tl.int32), axis=0)
    return found


@jit
def _decide(cut_value, cut_id, base, token, real, bounds, vocab):
    """Store the top-p cut, which is among the tokens [C] that are ``real``, ids rising."""
    m = tl.load(bounds)
    target = tl.load(bounds + 1)
    upper = tl.load(bounds + 3)
    above = tl.load(bounds + 4)
    x = clean(scaled(tl.load(base + token, mask=real, other=float("-inf")), tl.load(bounds + 5)))
    keys = tl.where(real, order_key(x), 0)
    w = tl.where(real, weight(x, m), 0.0)
    q = largest_key(keys, w, above, target)  # 0, so everything stays, if rounding left the target unreached
    tie = real & (keys == q)
    over = above + tl.sum(tl.where(keys > q, w, 0.0), axis=0)
    need = ties_needed(over, target, tl.max(tl.where(tie, w, 0.0), axis=0))
    kept = (keys > q) | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= need))
    least = tl.min(tl.where(kept, x, upper), axis=0)
    tl.store(cut_value, least)
    last = tl.max(tl.where(kept & (x == least), token, -1), axis=0)
    tl.store(cut_id, tl.where(tl.max(real.to(tl.int32), axis=0) > 0, last, vocab))


@jit
def search_cut_kernel(
    cut_value,
    cut_id,
    status,
    bounds,
    candidates,
    near,
    near_count,
    logits,
    stride,
    logits_rows,
    idx_mapping,
    group_max,
    top_k,
    top_p,
    vocab,
    groups,
    blocks,
    BLOCKS: tl.constexpr,
    NEAR_TOKENS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    COLLECT: tl.constexpr,
    GROUP: tl.constexpr,
    DONE: tl.constexpr,
    NARROW: tl.constexpr,
    NEAR: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    state = tl.load(status + i)
    if state == DONE:
        return
    index = tl.load(idx_mapping + i)
    base = logits + tl.load(logits_rows + i).to(tl.int64) * stride
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    m = tl.load(bounds + i * BOUNDS)
    target = tl.load(bounds + i * BOUNDS + 1)
    lower = tl.load(bounds + i * BOUNDS + 2)
    upper = tl.load(bounds + i * BOUNDS + 3)
    above = tl.load(bounds + i * BOUNDS + 4)
    t = tl.load(bounds + i * BOUNDS + 5)
    decided = (state == NARROW) | (state >= NEAR)
    if state == NARROW:
        found = 0
        for first in range(0, vocab, COLLECT):
            lane = first + tl.arange(0, COLLECT)
            maxima = group_max + i * groups
            _, logit = load_block(base, maxima, first // COLLECT, lower, t, vocab, groups, GROUP, COLLECT)
            logit = tl.reshape(logit, [COLLECT])
            hit = (logit >= lower) & (logit < upper)
            slot = found + tl.cumsum(hit.to(tl.int32), axis=0) - 1
            tl.store(candidates + i * CANDIDATES + slot, lane, mask=hit & (slot < CANDIDATES))
            found += tl.sum(hit.to(tl.int32), axis=0)
        tl.debug_barrier()
        decided = found <= CANDIDATES
        if decided:
            c = tl.arange(0, CANDIDATES)
            token = tl.load(candidates + i * CANDIDATES + c, mask=c < found, other=0)
            _decide(cut_value + i, cut_id + i, base, token, c < found, bounds + i * BOUNDS, vocab)
    if state >= NEAR:
        b = tl.arange(0, BLOCKS)
        slot = tl.arange(0, NEAR_TOKENS)
        count = tl.load(near_count + i * blocks + b, mask=b < blocks, other=0)
        real = slot[None, :] < count[:, None]
        at = (i * blocks + b[:, None]) * NEAR_TOKENS + slot[None, :]
        token = tl.reshape(tl.load(near + at, mask=real, other=0), [BLOCKS * NEAR_TOKENS])
        real = tl.reshape(real, [BLOCKS * NEAR_TOKENS])
        _decide(cut_value + i, cut_id + i, base, token, real, bounds + i * BOUNDS, vocab)

    if decided == 0:
        lowest = tl.full([], 0x00800000, tl.int64)  # the least finite logit's key; -inf is below
        last_key = tl.full([], 0, tl.int64)
        last_id = tl.full([], 0, tl.int32) + vocab
        lo = tl.maximum(order_key(clean(lower)).to(tl.int64), lowest)
        hi = order_key(m).to(tl.int64) + 1
        by_k = (state != NARROW) & (k > 0) & (k < vocab)
        if by_k:
            finite = tl.sum(_sums_from(base, t, vocab, m, lowest, 1, hi, False, last_key, last_id, BLOCK, 1), axis=0)
            by_k = finite > k
        if by_k:
            last_key, over = _search(base, t, vocab, m, lo, hi, 0.0, k.to(tl.float32), False, last_key, last_id, BLOCK)
            last_id = _nth_tie(base, t, vocab, last_key, k - over.to(tl.int32), last_key, last_id, BLOCK)
            tl.store(cut_value + i, key_value(last_key.to(tl.uint32)))
            tl.store(cut_id + i, last_id)
        if p < 1.0:
            if state == NARROW:
                lo, hi = _extent(base, t, vocab, lo, tl.minimum(order_key(clean(upper)).to(tl.int64), hi), BLOCK)
            else:
                lo = tl.maximum(lowest, last_key)
                above = 0.0
                total = _sums_from(base, t, vocab, m, lo, 1, hi, True, last_key, last_id, BLOCK, 1)
                target = p * tl.sum(total, axis=0)
            q, over = _search(base, t, vocab, m, lo, hi, above, target, True, last_key, last_id, BLOCK)
            value = key_value(q.to(tl.uint32))
            need = ties_needed(over, target, weight(value, m))
            tl.store(cut_value + i, value)
            tl.store(cut_id + i, _nth_tie(base, t, vocab, q, need, last_key, last_id, BLOCK))
    tl.debug_barrier()  # every thread has seen the old status
    tl.store(status + i, DONE)


@op(
    spec=search_cut_spec,
    kernel=search_cut_kernel,
    writes=("cut_value", "cut_id", "status", "candidates"),
    numpy=False,
)
def search_cut(
    kernel, cut_value, cut_id, status, bounds, candidates, near, near_count, logits, logits_rows, idx_mapping,
    group_max, top_k, top_p,
):  # fmt: skip
    (n, groups), blocks = group_max.shape, near_count.shape[1]
    if n:
        kernel[(n,)](
            cut_value, cut_id, status, bounds, candidates, near, near_count, logits, logits.stride(0), logits_rows,
            idx_mapping, group_max, top_k, top_p, logits.shape[1], groups, blocks, BLOCKS=next_power_of_2(blocks),
            NEAR_TOKENS=NEAR_TOKENS, CANDIDATES=candidates.shape[1], BLOCK=BLOCK, BOUNDS=BOUNDS, COLLECT=2 * BLOCK,
            GROUP=GROUP, DONE=DONE, NARROW=NARROW, NEAR=NEAR, num_warps=8,
        )  # fmt: skip
