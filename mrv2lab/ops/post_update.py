"""Advance the requests' state after sampling: the only writer of total_len, num_computed_tokens and last_sampled_tokens
during decode.

``post_update`` appends the k sampled tokens to the row and adds ``query_len - num_rejected`` to num_computed_tokens,
which keeps ``num_computed == total_len - 1`` for a decoding request. A negative row (its request is gone) is skipped.
Tokens past column L - 1 are dropped: a step in flight when its request ends must not write into the next row. What else
a subsystem counts per sampled token (penalty bins) is its own op over the same ``sampled_tokens`` and ``num_sampled``.
``post_update_num_computed`` is for steps that sample nothing here (pooling, a pipeline rank that is not the last).
Counterparts in vLLM: ``post_update`` and ``post_update_num_computed_tokens`` in ``v1/worker/gpu/input_batch.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl: Any = None


# idx_mapping         [r] int32
# query_start_loc     [>= r + 1] int32
# sampled_tokens      [r, K + 1] int64, the first num_sampled of each row are valid
# num_sampled         [r] int32
# num_rejected        [r] int32
# all_token_ids       [R, L] int32, device or UVA
# last_sampled_tokens [R] int64
# total_len           [R] int32
# num_computed_tokens [R] int32
def post_update_spec(
    idx_mapping,
    query_start_loc,
    sampled_tokens,
    num_sampled,
    num_rejected,
    all_token_ids,
    last_sampled_tokens,
    total_len,
    num_computed_tokens,
    num_reqs,
):
    for i in range(num_reqs):
        row, k = idx_mapping[i], num_sampled[i]
        if row < 0:
            continue
        if k > 0:
            room = all_token_ids[row, total_len[row] : total_len[row] + k]
            room[:] = sampled_tokens[i, : len(room)]
            last_sampled_tokens[row] = sampled_tokens[i, k - 1]
            total_len[row] += k
        num_computed_tokens[row] += query_start_loc[i + 1] - query_start_loc[i] - num_rejected[i]


@jit
def post_update_kernel(
    idx_mapping,
    query_start_loc,
    sampled_tokens,
    sampled_stride,
    num_sampled,
    num_rejected,
    all_token_ids,
    token_stride,
    max_model_len,
    last_sampled_tokens,
    total_len,
    num_computed_tokens,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(idx_mapping + i)
    if row < 0:
        return
    k = tl.load(num_sampled + i)
    if k > 0:
        length = tl.load(total_len + row)
        sampled = sampled_tokens + i.to(tl.int64) * sampled_stride
        j = tl.arange(0, BLOCK)
        mask = (j < k) & (length + j < max_model_len)
        tokens = tl.load(sampled + j, mask=mask, other=0)
        tl.store(all_token_ids + row.to(tl.int64) * token_stride + length + j, tokens.to(tl.int32), mask=mask)
        tl.store(last_sampled_tokens + row, tl.load(sampled + k - 1))
        tl.store(total_len + row, length + k)
    query_len = tl.load(query_start_loc + i + 1) - tl.load(query_start_loc + i)
    computed = tl.load(num_computed_tokens + row) + query_len - tl.load(num_rejected + i)
    tl.store(num_computed_tokens + row, computed)


@op(
    spec=post_update_spec,
    kernel=post_update_kernel,
    writes=("all_token_ids", "last_sampled_tokens", "total_len", "num_computed_tokens"),
)
def post_update(
    kernel,
    idx_mapping,
    query_start_loc,
    sampled_tokens,
    num_sampled,
    num_rejected,
    all_token_ids,
    last_sampled_tokens,
    total_len,
    num_computed_tokens,
    num_reqs,
):
    """Append the sampled tokens to their rows and advance the counters."""
    kernel[(num_reqs,)](
        idx_mapping,
        query_start_loc,
        sampled_tokens,
        sampled_tokens.stride(0),
        num_sampled,
        num_rejected,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        last_sampled_tokens,
        total_len,
        num_computed_tokens,
        BLOCK=next_power_of_2(sampled_tokens.shape[1]),
    )


# idx_mapping         [r] int32
# query_start_loc     [>= r + 1] int32
# num_computed_tokens [R] int32
def post_update_num_computed_spec(idx_mapping, query_start_loc, num_computed_tokens, num_reqs):
    for i in range(num_reqs):
        if idx_mapping[i] >= 0:
            num_computed_tokens[idx_mapping[i]] += query_start_loc[i + 1] - query_start_loc[i]


@jit(do_not_specialize=["num_reqs"])
def post_update_num_computed_kernel(idx_mapping, query_start_loc, num_computed_tokens, num_reqs, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_reqs
    row = tl.load(idx_mapping + i, mask=mask, other=-1)
    start = tl.load(query_start_loc + i, mask=mask, other=0)
    query_len = tl.load(query_start_loc + i + 1, mask=mask, other=0) - start
    live = row >= 0
    computed = tl.load(num_computed_tokens + row, mask=live, other=0)
    tl.store(num_computed_tokens + row, computed + query_len, mask=live)


@op(
    spec=post_update_num_computed_spec,
    kernel=post_update_num_computed_kernel,
    writes=("num_computed_tokens",),
)
def post_update_num_computed(kernel, idx_mapping, query_start_loc, num_computed_tokens, num_reqs):
    """Advance num_computed_tokens by this step's tokens."""
    kernel[(cdiv(num_reqs, 128),)](idx_mapping, query_start_loc, num_computed_tokens, num_reqs, BLOCK=128)
