"""Causal attention over a paged KV cache: one kernel for prefill chunks, decodes and any mix of them, with GQA.

Source: Kwon et al., "PagedAttention" (2023); Dao, "FlashAttention-2" (2023) for the online softmax. A program owns
one kv head and BLOCK_Q consecutive queries of one request; the GROUP query heads of that kv head share its keys, so
they are packed with the queries into the M dimension of the products: row m is query m // GROUP, head m % GROUP.
Slots past the end of a request are never used in arithmetic: a fresh block may hold NaN (vLLM #43990).
"""

from __future__ import annotations

import itertools

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl = None


def paged_attention_spec(out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, max_query_len, scale):
    """out[i] = softmax(scale * q[i] K^T) V in float32, over the keys 0 .. (position of token i) of its request.

    out, q: [t, Hq, D]; caches: [num_blocks, block_size, Hk, D]; block_table: int32[r, B]; seq_lens: int32[r];
    query_start_loc: int32[r + 1]. Request j's queries are its last positions. Rows of no request stay as they are.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    live = [j for j in range(len(lengths)) if starts[j] < starts[j + 1]]
    # Neighbours with the same number of queries go as one batch, shorter ones padded: all decodes at once.
    for _, group in itertools.groupby(live, key=lambda j: starts[j + 1] - starts[j]):
        batch = list(group)
        rows = slice(starts[batch[0]], starts[batch[-1] + 1])
        queries = q[rows].unflatten(0, (len(batch), -1))
        mixed = _attend(queries, key_cache, value_cache, block_table[batch], [lengths[j] for j in batch], scale)
        out[rows] = mixed.flatten(0, 1)


def _attend(q, key_cache, value_cache, block_table, lengths, scale):
    """q: [b, m, Hq, D] at the last m positions of requests with ``lengths`` tokens. Returns [b, m, Hq, D] float32."""
    import torch

    b, m = q.shape[:2]
    block_size = key_cache.shape[1]
    used = cdiv(max(lengths), block_size)
    lens = torch.tensor(lengths, device=q.device).view(b, 1)
    # The table's entries past a request's last block are anything.
    past = torch.arange(0, used * block_size, block_size, device=q.device) >= lens
    blocks = block_table[:, :used].masked_fill(past, 0).flatten()

    def gathered(cache):
        rows = cache.flatten(1).index_select(0, blocks).view(b, -1, *cache.shape[2:]).float()
        for row, length in zip(rows, lengths, strict=True):
            row[length:] = 0  # an attention weight of 0 would not hide a NaN
        return rows.transpose(1, 2)

    position = (lens - m + torch.arange(m, device=q.device)).view(b, 1, m, 1)
    seen = torch.arange(used * block_size, device=q.device) <= position
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(1, 2),
        gathered(key_cache),
        gathered(value_cache),
        attn_mask=seen,
        scale=scale,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2)


@jit
def _find_request(query_start_loc, num_reqs, block, BLOCK_Q):
    """The request that owns query block ``block``, where request j's blocks start at query_start_loc[j] // BLOCK_Q + j.

    That start leaves every request ceil(len / BLOCK_Q) blocks or one more, so blocks need no table.
    """
    low = block * 0
    high = low + num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@jit(do_not_specialize=["num_reqs"])
def paged_attention_kernel(
    out, out_stride_t, out_stride_h, q, q_stride_t, q_stride_h,
    key_cache, value_cache, key_stride_b, key_stride_s, key_stride_h, value_stride_b, value_stride_s, value_stride_h,
    block_table, block_table_stride, seq_lens, query_start_loc, num_reqs, scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    if ONE_BLOCK:  # no request has more queries than a block
        request = block
        first = block * 0
    else:
        request = _find_request(query_start_loc, num_reqs, block, BLOCK_Q)
        first = (block - tl.load(query_start_loc + request) // BLOCK_Q - request) * BLOCK_Q
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    context = tl.load(seq_lens + request) - query_len

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_P2)
    query = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    row_mask = (m < BLOCK_Q * GROUP) & (query < query_len)
    token = (start + query).to(tl.int64)
    mask = row_mask[:, None] & (d < D)[None, :]
    queries = tl.load(q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=mask, other=0.0)

    # The keys that the block's last query may see; none for a block past the request's end.
    end = tl.where(first < query_len, context + tl.minimum(first + BLOCK_Q, query_len), 0)
    table = block_table + request.to(tl.int64) * block_table_stride
    score_scale = scale * 1.4426950408889634  # log2(e): the exponentials below are powers of two
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P2], tl.float32)
    for tile in range(0, end, TILE):
        n = tile + tl.arange(0, TILE)
        inside = n < end
        page = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = n % BLOCK_SIZE
        kv_mask = inside[:, None] & (d < D)[None, :]
        key_at = page * key_stride_b + slot * key_stride_s + kv_head * key_stride_h
        keys = tl.load(key_cache + key_at[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * score_scale
        seen = inside[None, :] & (n[None, :] <= (context + query)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        # Key 0 is seen by every row, so the maximum is finite from the first tile on.
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        value_at = page * value_stride_b + slot * value_stride_s + kv_head * value_stride_h
        values = tl.load(value_cache + value_at[:, None] + d[None, :], mask=kv_mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = new_best
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


@op(spec=paged_attention_spec, kernel=paged_attention_kernel, writes=("out",), numpy=False)
def paged_attention(
    kernel, out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, max_query_len, scale
):
    """Attend from q [t, Hq, D] to the paged keys and values of each request, into out [t, Hq, D].

    ``block_table`` int32[r, B], ``seq_lens`` int32[r] (this step's tokens included), ``query_start_loc`` int32[r + 1];
    ``max_query_len`` is the host's bound on a request's queries. Caches [num_blocks, block_size, Hk, D] hold the
    step's own keys already. A request without queries (padding) writes nothing.
    """
    t, heads, d = q.shape
    num_reqs, kv_heads = seq_lens.shape[0], key_cache.shape[2]
    group = heads // kv_heads
    small = max(16, next_power_of_2(group))
    wide = q.element_size() == 4
    block_m = small if max_query_len * group <= small else max(small, 32 if wide else 64)
    block_q = block_m // group
    one_block = max_query_len <= block_q
    d_p2 = max(16, next_power_of_2(d))
    if t and num_reqs:
        kernel[(num_reqs if one_block else t // block_q + num_reqs, kv_heads)](
            out, out.stride(0), out.stride(1), q, q.stride(0), q.stride(1),
            key_cache, value_cache, *key_cache.stride()[:3], *value_cache.stride()[:3],
            block_table, block_table.stride(0), seq_lens, query_start_loc, num_reqs, scale,
            GROUP=group, D=d, D_P2=d_p2, BLOCK_SIZE=key_cache.shape[1],
            BLOCK_M=block_m, BLOCK_Q=block_q, TILE=32 if wide else 64, ONE_BLOCK=one_block,
            num_warps=8 if wide and d_p2 > 64 else 4,  # 4 warps spill registers there
            num_stages=2,
        )  # fmt: skip
