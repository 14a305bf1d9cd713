"""Causal attention over a paged KV cache: one kernel for prefill chunks, decodes and any mix of them, with GQA.

Source: Kwon et al., "PagedAttention" (2023); Dao, "FlashAttention-2" (2023) for the online softmax. A program owns
one kv head and BLOCK_Q consecutive queries of one request; the GROUP query heads of that kv head share its keys, so
they are packed with the queries into the M dimension of the products: row m is query m // GROUP, head m % GROUP.
Slots past the end of a request are never used in arithmetic: a fresh block may hold NaN (vLLM #43990); nor are those
before a window, whose blocks may belong to somebody else by now.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl = None


def paged_attention_spec(
    out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, max_query_len, scale, window,
    skip_single=False,
):  # fmt: skip
    """out[i] = softmax(scale * q[i] K^T) V in float32, over the keys of its request that token i sees: p - window + 1
    .. p at position p, or 0 .. p where window is 0.

    out, q: [t, Hq, D]; caches: [num_blocks, block_size, Hk, D]; block_table: int32[r, B]; seq_lens: int32[r];
    query_start_loc: int32[r + 1]. Request j's queries are its last positions. Rows of no request or of an
    empty one stay as they are, and where ``skip_single``, so do those of requests with exactly one query.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    least = 2 if skip_single else 1
    live = [j for j in range(len(lengths)) if starts[j + 1] - starts[j] >= least and lengths[j] > 0]
    # Neighbours with the same number of queries go as one batch, shorter ones padded: all decodes at once.
    for _, group in itertools.groupby(live, key=lambda j: starts[j + 1] - starts[j]):
        batch = list(group)
        rows = slice(starts[batch[0]], starts[batch[-1] + 1])
        queries = q[rows].unflatten(0, (len(batch), -1))
        mixed = _attend(queries, key_cache, value_cache, block_table[batch], [lengths[j] for j in batch], scale, window)
        out[rows] = mixed.flatten(0, 1)


def _attend(q, key_cache, value_cache, block_table, lengths, scale, window):
    """q: [b, m, Hq, D] at the last m positions of requests with ``lengths`` tokens. Returns [b, m, Hq, D] float32."""
    import torch

    b, m = q.shape[:2]
    block_size = key_cache.shape[1]
    used = cdiv(max(lengths), block_size)
    lens = torch.tensor(lengths, device=q.device).view(b, 1)
    firsts = [max(0, length - m + 1 - window) if window else 0 for length in lengths]
    # The table's entries past a request's last block, or before its window, are anything.
    begin = torch.arange(0, used * block_size, block_size, device=q.device)
    unused = (begin >= lens) | (begin + block_size <= torch.tensor(firsts, device=q.device).view(b, 1))
    blocks = block_table[:, :used].masked_fill(unused, 0).flatten()

    def gathered(cache):
        rows = cache.flatten(1).index_select(0, blocks).view(b, -1, *cache.shape[2:]).float()
        for row, first, length in zip(rows, firsts, lengths, strict=True):
            row[length:] = 0  # an attention weight of 0 would not hide a NaN
            row[:first] = 0
        return rows.transpose(1, 2)

    position = (lens - m + torch.arange(m, device=q.device)).view(b, 1, m, 1)
    key = torch.arange(used * block_size, device=q.device)
    seen = key <= position
    if window:
        seen &= key > position - window
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


@jit
def _one_tile(
    best, total, acc, queries, position, tile, end, window, table,
    key_cache, value_cache, key_stride_b, key_stride_s, value_stride_b, value_stride_s, score_scale,
    D: tl.constexpr, D_P2: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """The online softmax over TILE more keys. MASKED is for tiles that some row sees in part only, or not at all."""
    n = tile + tl.arange(0, TILE)
    d = tl.arange(0, D_P2)
    slot = n % BLOCK_SIZE
    if MASKED:
        inside = n < end
        if WINDOWED:
            inside = inside & (n > tl.min(position, axis=0) - window)
        page = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
    keys_at = key_cache + (page * key_stride_b + slot * key_stride_s)[:, None] + d[None, :]
    values_at = value_cache + (page * value_stride_b + slot * value_stride_s)[:, None] + d[None, :]
    if MASKED:
        kv_mask = inside[:, None] & (d < D)[None, :]
        keys = tl.load(keys_at, mask=kv_mask, other=0.0)
        values = tl.load(values_at, mask=kv_mask, other=0.0)
    elif D < D_P2:
        keys = tl.load(keys_at, mask=(d < D)[None, :], other=0.0)
        values = tl.load(values_at, mask=(d < D)[None, :], other=0.0)
    else:
        keys = tl.load(keys_at)
        values = tl.load(values_at)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if MASKED:
        seen = inside[None, :] & (n[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (n[None, :] > (position - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * score_scale)
    # Key 0 is seen by every row, so the maximum is finite from the first tile on, unless a window begins later.
    base = tl.where(new_best == float("-inf"), 0.0, new_best) if WINDOWED else new_best
    weights = tl.exp2(scores * score_scale - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@jit(do_not_specialize=["num_reqs", "window", "skip_single"])
def paged_attention_kernel(
    out, out_stride_t, out_stride_h, q, q_stride_t, q_stride_h,
    key_cache, value_cache, key_stride_b, key_stride_s, key_stride_h, value_stride_b, value_stride_s, value_stride_h,
    block_table, block_table_stride, seq_lens, query_start_loc, num_reqs, scale, window, skip_single,
    GROUP: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, ONE_BLOCK: tl.constexpr,
    PLAIN_TILES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    if ONE_BLOCK:  # no request has more queries than a block
        request = block
        first = block * 0
    else:
        request = _find_request(query_start_loc, num_reqs, block, BLOCK_Q)
        first = (block - tl.load(query_start_loc + request) // BLOCK_Q - request) * BLOCK_Q
    start = tl.load(query_start_loc + request)
    length = tl.load(seq_lens + request)
    query_len = tl.where(length > 0, tl.load(query_start_loc + request + 1) - start, 0)
    query_len = tl.where(query_len <= skip_single, 0, query_len)
    # Padding, a block past the request's end, or a query that decode_attention serves. The small tiling, whose programs
    # do little without keys, would pay for the return with 4 registers, and so with 1 of 4 programs a multiprocessor.
    if PLAIN_TILES and first >= query_len:
        return
    context = length - query_len

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_P2)
    query = first + m // GROUP
    position = context + query
    head = kv_head * GROUP + m % GROUP
    row_mask = (m < BLOCK_Q * GROUP) & (query < query_len)
    token = (start + query).to(tl.int64)
    mask = row_mask[:, None] & (d < D)[None, :]
    queries = tl.load(q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=mask, other=0.0)

    # The keys that the block's last query may see; none for a block past the request's end.
    end = tl.where(first < query_len, context + tl.minimum(first + BLOCK_Q, query_len), 0)
    table = block_table + request.to(tl.int64) * block_table_stride
    keys = key_cache + kv_head * key_stride_h
    values = value_cache + kv_head * value_stride_h
    score_scale = scale * 1.4426950408889634  # log2(e): the exponentials below are powers of two
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P2], tl.float32)
    begin = first * 0
    if WINDOWED:
        begin = tl.maximum(context + first - window + 1, 0) // TILE * TILE
    elif PLAIN_TILES:  # tiles that all rows see whole need no masks
        plain_end = (context + first + 1) // TILE * TILE
        for tile in range(0, plain_end, TILE):
            best, total, acc = _one_tile(
                best, total, acc, queries, position, tile, end, window, table,
                keys, values, key_stride_b, key_stride_s, value_stride_b, value_stride_s, score_scale,
                D, D_P2, BLOCK_SIZE, TILE, False, False,
            )  # fmt: skip
        begin = plain_end
    for tile in range(begin, end, TILE):
        best, total, acc = _one_tile(
            best, total, acc, queries, position, tile, end, window, table,
            keys, values, key_stride_b, key_stride_s, value_stride_b, value_stride_s, score_scale,
            D, D_P2, BLOCK_SIZE, TILE, True, WINDOWED,
        )  # fmt: skip
    result = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(
        out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


@dataclass(frozen=True)
class Tiling:
    """How the kernel cuts a batch: rows (queries x GROUP) of a program, keys a turn, warps, stages of the pipeline."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    # a second loop without masks over the tiles that all rows see whole
    plain_tiles: bool = True
    # a thread's registers at most; None = as the compiler likes
    maxnreg: int | None = None


def tiling(max_query_len: int, group: int, d: int, element_size: int) -> Tiling:
    """The tiling for a batch whose requests have ``max_query_len`` queries at most, of heads of ``d`` elements."""
    small = max(16, next_power_of_2(group))
    if element_size == 4:  # products in full float32, without tensor cores; 4 warps spill registers at D > 64
        block_m = small if max_query_len * group <= small else max(small, 32)
        return Tiling(block_m, 32, 8 if d > 64 else 4, 2, plain_tiles=False)
    if max_query_len * group <= small:
        return Tiling(small, 64, 4, 3, plain_tiles=False)
    if max_query_len * group <= 64 or d > 128:
        return Tiling(max(small, 64), 64, 4, 2)
    if max_query_len <= 512:
        # Few queries want many programs. On an H200, a prompt of 128 among single queries behind 275 tokens: 27 us a
        # layer with 64 of those and 95 with 256, where large tiles take 44 and 157.
        return Tiling(max(small, 64), 32, 4, 3, maxnreg=128)
    return Tiling(max(small, 128), 64, 8, 2, maxnreg=128)  # two programs a multiprocessor: 327 TFLOP/s, else 248


@op(spec=paged_attention_spec, kernel=paged_attention_kernel, writes=("out",), numpy=False)
def paged_attention(
    kernel, out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, max_query_len, scale, window,
    skip_single=False,
):  # fmt: skip
    """Attend from q [t, Hq, D] to the paged keys and values of each request, into out [t, Hq, D].

    ``block_table`` int32[r, B], ``seq_lens`` int32[r] (this step's tokens included), ``query_start_loc`` int32[r + 1];
    ``max_query_len`` is the host's bound on a request's queries. Caches [num_blocks, block_size, Hk, D] hold the
    step's own keys already. A query sees the last ``window`` keys, its own included; 0 = all. A request without queries
    or tokens (padding) writes nothing; where ``skip_single``, nor does one with exactly one query, which
    ``decode_attention`` serves. Their programs end before they read a key.
    """
    group = q.shape[1] // key_cache.shape[2]
    cut = tiling(max_query_len, group, next_power_of_2(q.shape[2]), q.element_size())
    launch(
        kernel,
        out,
        q,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        max_query_len,
        scale,
        window,
        skip_single,
        cut,
    )


def launch(
    kernel, out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, max_query_len, scale, window,
    skip_single, cut,
):  # fmt: skip
    """:func:`paged_attention` with a given :class:`Tiling`."""
    t, heads, d = q.shape
    num_reqs, kv_heads = seq_lens.shape[0], key_cache.shape[2]
    group = heads // kv_heads
    block_q = cut.block_m // group
    one_block = max_query_len <= block_q
    if t and num_reqs:
        kernel[(kv_heads, num_reqs if one_block else t // block_q + num_reqs)](
            out, out.stride(0), out.stride(1), q, q.stride(0), q.stride(1),
            key_cache, value_cache, *key_cache.stride()[:3], *value_cache.stride()[:3],
            block_table, block_table.stride(0), seq_lens, query_start_loc, num_reqs, scale, window, int(skip_single),
            GROUP=group, D=d, D_P2=max(16, next_power_of_2(d)), BLOCK_SIZE=key_cache.shape[1],
            BLOCK_M=cut.block_m, BLOCK_Q=block_q, TILE=cut.tile, ONE_BLOCK=one_block,
            PLAIN_TILES=cut.plain_tiles, WINDOWED=window > 0,
            num_warps=cut.num_warps, num_stages=cut.num_stages,
            **({"maxnreg": cut.maxnreg} if cut.maxnreg else {}),
        )  # fmt: skip
