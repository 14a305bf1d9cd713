"""The cut of top-k and top-p from the few groups whose maximum can matter, one small program a row.

All logits of at least t, the want-th largest group maximum, lie in the groups whose maximum reaches t: about ``want``
of them, and hardly more logits. Top-k takes want = k. Top-p alone takes the 256 largest groups and hopes that they hold
the probability p, as the peaked rows of language models do. What does not fit (``listed``, ``candidates``; masses of
equal logits) or does not suffice is marked in ``status`` for ``narrow_cut`` and ``search_cut``.
Counterpart in vLLM: ``sample/top_k_top_p_triton.py`` (a pivot search over whole rows).
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._cut import (
    BOUNDS,
    DONE,
    GROUP,
    NARROW,
    OFF,
    SEARCH,
    clean,
    clean_spec,
    cut_spec,
    divisor,
    divisor_spec,
    key_value,
    largest_key,
    order_key,
    scaled,
    ties_needed,
    weight,
)  # fmt: skip
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl: Any = None

NUCLEUS_GROUPS = 256
"""Groups that top-p alone looks at; at most a quarter of all, and what ``listed`` holds."""


def cut_from_groups_spec(
    cut_value: Any,
    cut_id: Any,
    status: Any,
    bounds: Any,
    listed: Any,
    candidates: Any,
    logits: Any,
    logits_rows: Any,
    idx_mapping: Any,
    group_max: Any,
    block_max: Any,
    block_sum: Any,
    top_k: Any,
    top_p: Any,
    temperature: Any,
) -> None:
    """Write the cut of each row, cut_value float32[n] and cut_id int32[n] (OFF: nothing is cut), and status int32[n].

    The rows are ``logit_groups``' (and what it wrote: group_max, block_max, block_sum); top_k int32[R] and top_p
    float32[R] are read through idx_mapping int32[n], as temperature is, which is that of ``logit_groups``. Top-k is off
    unless 0 < k < V, top-p from 1 on. The definition is ``_cut.cut_spec``, by which the spec decides every row. A
    kernel that leaves a row undecided says so in its status: NARROW with bounds float32[n, 6] around its top-p cut, or
    SEARCH with a lower bound of its top-k cut. listed int32[n, L] and candidates int32[n, C], C a power of two, are its
    scratch; k > L is left to the search.
    """
    cut_id.fill_(OFF)
    cut_value.fill_(float("-inf"))
    status.fill_(DONE)
    for i, (row, index) in enumerate(zip(logits_rows.tolist(), idx_mapping.tolist(), strict=True)):
        if row >= 0 and index >= 0:
            x = clean_spec(logits[row], divisor_spec(temperature, index))
            cut_value[i], cut_id[i] = map(float, cut_spec(x, int(top_k[index]), float(top_p[index])))


@jit
def cut_from_groups_kernel(
    cut_value,
    cut_id,
    status,
    bounds,
    listed,
    candidates,
    logits,
    stride,
    logits_rows,
    idx_mapping,
    group_max,
    block_max,
    block_sum,
    top_k,
    top_p,
    temperature,
    vocab,
    groups,
    blocks,
    nucleus,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LISTED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
    DONE: tl.constexpr,
    NARROW: tl.constexpr,
    SEARCH: tl.constexpr,
    OFF: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    tl.store(cut_value + i, float("-inf"))
    tl.store(cut_id + i, OFF)
    tl.store(status + i, DONE)
    row = tl.load(logits_rows + i).to(tl.int64)
    index = tl.load(idx_mapping + i)
    if (row < 0) | (index < 0):
        return
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    by_k = (k > 0) & (k < vocab)
    by_p = p < 1.0
    t_of_row = divisor(temperature, index)
    group = tl.arange(0, GROUPS)
    largest = tl.load(group_max + i * groups + group, mask=group < groups, other=float("-inf"))
    largest = clean(scaled(largest, t_of_row))
    m = tl.max(largest, axis=0)
    if (m == float("-inf")) | ((by_k == 0) & (by_p == 0)):
        return
    tl.store(bounds + i * BOUNDS, m)
    tl.store(bounds + i * BOUNDS + 5, t_of_row)
    if by_k & (k > LISTED) & (groups > LISTED):
        tl.store(status + i, SEARCH)
        tl.store(bounds + i * BOUNDS + 2, float("-inf"))
        return

    want = tl.where(by_k, k, nucleus)
    group_keys = order_key(largest)
    lowest = tl.full([], 0x00800000, tl.uint32)  # the least finite logit's; -inf is below
    ones = tl.where(largest > float("-inf"), 1.0, 0.0)
    t = tl.maximum(largest_key(group_keys, ones, 0.0, want.to(tl.float32)), lowest)
    whole = t == lowest  # every finite logit is a candidate
    take = group_keys >= t
    num_listed = tl.sum(take.to(tl.int32), axis=0)
    at = tl.cumsum(take.to(tl.int32), axis=0) - 1
    tl.store(listed + i * LISTED + at, group, mask=take & (at < LISTED))
    fits = num_listed <= LISTED
    tl.debug_barrier()

    found = 0
    base = logits + row * stride
    lane = tl.arange(0, ROWS * GROUP)
    if fits:
        for first in range(0, num_listed, ROWS):
            place = first + lane // GROUP
            g = tl.load(listed + i * LISTED + place, mask=place < num_listed, other=0)
            token_of_lane = g * GROUP + lane % GROUP
            real = (place < num_listed) & (token_of_lane < vocab)
            raw = tl.load(base + token_of_lane, mask=real, other=float("-inf"))
            hit = order_key(clean(scaled(raw, t_of_row))) >= t
            slot = found + tl.cumsum(hit.to(tl.int32), axis=0) - 1
            tl.store(candidates + i * CANDIDATES + slot, token_of_lane, mask=hit & (slot < CANDIDATES))
            found += tl.sum(hit.to(tl.int32), axis=0)
        fits = found <= CANDIDATES
    tl.debug_barrier()

    total = 0.0
    if by_p & (by_k == 0):
        b = tl.arange(0, BLOCKS)
        bm = tl.load(block_max + i * blocks + b, mask=b < blocks, other=float("-inf"))
        total = tl.sum(tl.load(block_sum + i * blocks + b, mask=b < blocks, other=0.0) * weight(bm, m), axis=0)
    above = 0.0
    upper = float("inf")
    decided = fits
    if fits:
        c = tl.arange(0, CANDIDATES)
        token = tl.load(candidates + i * CANDIDATES + c, mask=c < found, other=0)
        x = clean(scaled(tl.load(base + token, mask=c < found, other=float("-inf")), t_of_row))
        keys = tl.where(c < found, order_key(x), 0)
        kept = c < found
        cut = by_p | (by_k & ((found > k) | (whole == 0)))
        if by_k & (found > k):
            q = largest_key(keys, tl.where(kept, 1.0, 0.0), 0.0, k.to(tl.float32))
            tie = keys == q
            need = k - tl.sum((keys > q).to(tl.int32), axis=0)
            kept = (keys > q) | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= need))
        if by_p:
            w = tl.where(kept, weight(x, m), 0.0)
            sum_of_kept = tl.sum(w, axis=0)
            total = tl.where(by_k | whole, sum_of_kept, total)
            target = p * total
            if sum_of_kept >= target:
                q = largest_key(keys, w, 0.0, target)
                tie = kept & (keys == q)
                over = tl.sum(tl.where(keys > q, w, 0.0), axis=0)
                need = ties_needed(over, target, tl.max(tl.where(tie, w, 0.0), axis=0))
                kept = kept & ((keys > q) | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= need)))
            else:
                decided = by_p == 0
                above = sum_of_kept
                upper = tl.min(tl.where(kept, x, float("inf")), axis=0)
        if decided & cut:
            least = tl.min(tl.where(kept, x, float("inf")), axis=0)
            tl.store(cut_value + i, least)
            tl.store(cut_id + i, tl.max(tl.where(kept & (x == least), token, -1), axis=0))
    if decided == 0:
        tl.store(status + i, tl.where(by_k | (m == float("inf")), SEARCH, NARROW))
        # Tokens below `lower` weigh less than (1 - p) of the total even if all V of them lay there.
        lower = m + tl.log((1.0 - p) * total / vocab) - 0.1
        lower = tl.where(by_k, key_value(t), lower)  # k groups reach t
        state = bounds + i * BOUNDS
        tl.store(state + 1, p * total)
        tl.store(state + 2, lower)
        tl.store(state + 3, upper)
        tl.store(state + 4, above)


@op(
    spec=cut_from_groups_spec,
    kernel=cut_from_groups_kernel,
    writes=("cut_value", "cut_id", "status", "bounds", "listed", "candidates"),
    numpy=False,
)
def cut_from_groups(
    kernel, cut_value, cut_id, status, bounds, listed, candidates, logits, logits_rows, idx_mapping, group_max,
    block_max, block_sum, top_k, top_p, temperature,
):  # fmt: skip
    (n, groups), blocks = group_max.shape, block_max.shape[1]
    vocab = logits.shape[1]
    if vocab <= candidates.shape[1]:
        nucleus = groups + 1  # more than there are: every logit is a candidate
    else:
        nucleus = min(NUCLEUS_GROUPS, listed.shape[1], cdiv(groups, 4))
    if n:
        kernel[(n,)](
            cut_value, cut_id, status, bounds, listed, candidates, logits, logits.stride(0), logits_rows, idx_mapping,
            group_max, block_max, block_sum, top_k, top_p, temperature, vocab, groups, blocks,
            nucleus, GROUPS=next_power_of_2(groups), BLOCKS=next_power_of_2(blocks),
            LISTED=listed.shape[1], CANDIDATES=candidates.shape[1], GROUP=GROUP, ROWS=8, BOUNDS=BOUNDS, DONE=DONE,
            NARROW=NARROW, SEARCH=SEARCH, OFF=OFF, num_warps=4,
            enable_fp_fusion=False,  # every lane must have the same total: they branch on it, and share shuffles
        )  # fmt: skip
