"""The ids of a row's k most likely tokens, greatest first, behind the token that was chosen.

``find_cut`` has decided which k tokens they are, ties included; they lie in at most k + 1 groups, which are collected
here, and each one's column is the number of tokens in front of it. Counterpart in vLLM: ``torch.topk`` in
``sample/logprob.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import BLOCK, GROUP, clean, clean_spec, order_key
from mrv2lab.ops._op import jit, next_power_of_2, op

tl: Any = None


def topk_ids_spec(
    ids: Any,
    listed: Any,
    candidates: Any,
    logits: Any,
    logits_rows: Any,
    tokens: Any,
    tops: Any,
    group_max: Any,
    cut_value: Any,
    cut_id: Any,
) -> None:
    """Write ids int32[n, 1 + K]: the row's token (tokens int64[N], one a row of logits) in column 0, then its tops[i]
    (int32[n], <= K) most likely tokens, ties to the lowest ids, then -1, also where fewer logits are above -inf.

    A padding row (negative logits_rows or tops) is -1 throughout. The rows are ``logit_groups``', cut_value and cut_id
    ``find_cut``'s with top_k = tops and no top-p; listed int32[n, L] and candidates int32[n, C] are scratch, L and
    C > K (or L = all groups), C a power of two."""
    ids.fill_(-1)
    for i, (row, k) in enumerate(zip(logits_rows.tolist(), tops.tolist(), strict=True)):
        if row < 0 or k < 0:
            continue
        ids[i, 0] = int(tokens[row])
        x, value, last = clean_spec(logits[row]), cut_value.numpy()[i], int(cut_id[i])
        token = np.arange(len(x))
        kept = np.flatnonzero((x > -np.inf) & ((x > value) | ((x == value) & (token <= last)))) if k else token[:0]
        kept = kept[np.argsort(-x[kept], kind="stable")]
        ids.numpy()[i, 1 : 1 + len(kept)] = kept


@jit(do_not_specialize=["ids_stride", "columns"])
def topk_ids_kernel(
    ids,
    ids_stride,
    columns,
    listed,
    candidates,
    logits,
    stride,
    logits_rows,
    tokens,
    tops,
    group_max,
    cut_value,
    cut_id,
    vocab,
    groups,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(logits_rows + i).to(tl.int64)
    k = tl.load(tops + i)
    column = tl.arange(0, COLUMNS)
    out = ids + i * ids_stride
    if (row < 0) | (k <= 0):
        asked = (row >= 0) & (k >= 0)
        first_id = tl.load(tokens + row, mask=asked, other=-1).to(tl.int32)
        tl.store(out + column, tl.where(column == 0, first_id, -1), mask=column < columns)
        return
    value = tl.load(cut_value + i)
    last = tl.load(cut_id + i)
    base = logits + row * stride

    group = tl.arange(0, GROUPS)
    largest = tl.load(group_max + i * groups + group, mask=group < groups, other=float("-inf"))
    take = (largest > float("-inf")) & ((largest > value) | ((largest == value) & (group * GROUP <= last)))
    at = tl.cumsum(take.to(tl.int32), axis=0) - 1
    tl.store(listed + i * LISTED + at, group, mask=take & (at < LISTED))
    num_listed = tl.minimum(tl.sum(take.to(tl.int32), axis=0), LISTED)
    tl.debug_barrier()

    found = 0
    lane = tl.arange(0, ROWS * GROUP)
    for first in range(0, num_listed, ROWS):
        place = first + lane // GROUP
        g = tl.load(listed + i * LISTED + place, mask=place < num_listed, other=0)
        token_of_lane = g * GROUP + lane % GROUP
        real = (place < num_listed) & (token_of_lane < vocab)
        x = clean(tl.load(base + token_of_lane, mask=real, other=float("-inf")))
        hit = (x > float("-inf")) & ((x > value) | ((x == value) & (token_of_lane <= last)))
        slot = found + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(candidates + i * CANDIDATES + slot, token_of_lane, mask=hit & (slot < CANDIDATES))
        found += tl.sum(hit.to(tl.int32), axis=0)
    found = tl.minimum(found, columns - 1)
    tl.debug_barrier()

    # They are in the order of ids, so of equal logits the earlier candidate goes first.
    c = tl.arange(0, COLUMNS)
    token = tl.load(candidates + i * CANDIDATES + c, mask=c < found, other=0)
    key = order_key(clean(tl.load(base + token, mask=c < found, other=float("-inf"))))
    rank = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, found, CHUNK):
        d = first + tl.arange(0, CHUNK)
        rival = tl.load(candidates + i * CANDIDATES + d, mask=d < found, other=0)
        theirs = order_key(clean(tl.load(base + rival, mask=d < found, other=float("-inf"))))
        before = (theirs[None, :] > key[:, None]) | ((theirs[None, :] == key[:, None]) & (d[None, :] < c[:, None]))
        rank += tl.sum((before & (d < found)[None, :]).to(tl.int32), axis=1)
    tl.store(out + 1 + rank, token, mask=c < found)
    tl.store(out + column, -1, mask=(column > found) & (column < columns))
    tl.store(out, tl.load(tokens + row).to(tl.int32))


@op(spec=topk_ids_spec, kernel=topk_ids_kernel, writes=("ids", "listed", "candidates"), numpy=False)
def topk_ids(kernel, ids, listed, candidates, logits, logits_rows, tokens, tops, group_max, cut_value, cut_id):
    (n, columns), groups = ids.shape, group_max.shape[1]
    most = max(candidates.shape[1], next_power_of_2(columns))  # not the step's columns: it would compile anew
    if n:
        kernel[(n,)](
            ids, ids.stride(0), columns, listed, candidates, logits, logits.stride(0), logits_rows, tokens, tops,
            group_max, cut_value, cut_id, logits.shape[1], groups, GROUPS=next_power_of_2(groups),
            LISTED=listed.shape[1], CANDIDATES=candidates.shape[1], COLUMNS=most, GROUP=GROUP,
            ROWS=BLOCK // (2 * GROUP), CHUNK=max(2048 // most, 1), num_warps=4,
        )  # fmt: skip
