"""List the few tokens between the bounds of a top-p cut, so that ``search_cut`` need not read the row.

Each block of 2,048 tokens has room for 64. A row with a fuller block goes back to be narrowed: masses of equal or
nearly equal logits do that. No counterpart in vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import BLOCK, BOUNDS, GROUP, NARROW, NEAR_TOKENS, clean_spec, load_block
from mrv2lab.ops._op import jit, op

tl: Any = None

CHUNK = 512
"""Tokens that a warp reads at once."""


def list_near_spec(
    near: Any, near_count: Any, status: Any, bounds: Any, logits: Any, logits_rows: Any, group_max: Any, mark: int
) -> None:
    """Write near int32[n, blocks, 64], the tokens of each block whose logit is at least the lower bound and below the
    upper one, ids rising, and near_count int32[n, blocks], for rows whose status int32[n] is ``mark``. A row with more
    than 64 in a block gets the status NARROW. The rest as in ``narrow_sums``."""
    for i in np.flatnonzero(status.numpy() == mark):
        _, _, lower, upper, _, t = bounds.numpy()[i]
        x = clean_spec(logits[int(logits_rows[int(i)])], t)
        ids = np.flatnonzero((x >= lower) & (x < upper))
        for block in range(near.shape[1]):
            found = ids[ids // BLOCK == block]
            near_count[int(i), block] = len(found)
            near.numpy()[i, block, : min(len(found), NEAR_TOKENS)] = found[:NEAR_TOKENS]
            if len(found) > NEAR_TOKENS:
                status[int(i)] = NARROW


@jit(do_not_specialize=["mark"])
def list_near_kernel(
    near,
    near_count,
    status,
    bounds,
    logits,
    stride,
    logits_rows,
    group_max,
    mark,
    vocab,
    groups,
    blocks,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    NEAR_TOKENS: tl.constexpr,
    NARROW: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    # Another block of the row may have put NARROW there: then nobody will read this list.
    if tl.load(status + i) != mark:
        return
    lower = tl.load(bounds + i * BOUNDS + 2)
    upper = tl.load(bounds + i * BOUNDS + 3)
    t = tl.load(bounds + i * BOUNDS + 5)
    base = logits + tl.load(logits_rows + i).to(tl.int64) * stride
    place = i * blocks + block
    found = 0
    for chunk in range(block * (BLOCK // CHUNK), (block + 1) * (BLOCK // CHUNK)):
        _, x = load_block(base, group_max + i * groups, chunk, lower, t, vocab, groups, GROUP, CHUNK)
        x = tl.reshape(x, [CHUNK])
        hit = (x >= lower) & (x < upper)
        slot = found + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        tl.store(near + place * NEAR_TOKENS + slot, token, mask=hit & (slot < NEAR_TOKENS))
        found += tl.sum(hit.to(tl.int32), axis=0)
    tl.store(near_count + place, found)
    if found > NEAR_TOKENS:
        tl.store(status + i, NARROW)


@op(spec=list_near_spec, kernel=list_near_kernel, writes=("near", "near_count", "status"), numpy=False)
def list_near(kernel, near, near_count, status, bounds, logits, logits_rows, group_max, mark):
    n, blocks = near_count.shape
    if n:
        kernel[(n, blocks)](
            near, near_count, status, bounds, logits, logits.stride(0), logits_rows, group_max, mark, logits.shape[1],
            group_max.shape[1], blocks, BLOCK=BLOCK, BOUNDS=BOUNDS, CHUNK=CHUNK, GROUP=GROUP,
            NEAR_TOKENS=NEAR_TOKENS, NARROW=NARROW, num_warps=1, maxnreg=80,
        )  # fmt: skip
