"""Attention of requests with one query each over the paged KV cache: memory-bound, cut along the keys (split-KV).

Source: Dao et al., "Flash-Decoding" (2023). Every request's keys are cut into at most ``splits`` equal runs of tiles. A
program attends from the GROUP query heads of one kv head to one run; where a request has several, each leaves its
normalised output and log-sum-exp in ``partial`` and ``partial_lse``, and the last one to arrive, by ``counters``,
combines them in the order of the runs, so that the result does not depend on who was last.

The grid follows from host values that a graph may freeze; lengths are read on the device. A program is one warp, so
that nothing in it waits for anything but memory: many small programs hide that better than few large ones. Tiles go
through shared memory in a pipeline to the tensor cores, which is a third of the instructions of multiply-adds in
registers (at two query heads a kv head: 66 us against 89 for 256 requests of 256 tokens on an H200).
"""

from __future__ import annotations

from mrv2lab.ops._decode_cut import cut
from mrv2lab.ops._op import jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous
from mrv2lab.ops.paged_attention import paged_attention_spec

tl = None


def decode_attention_spec(
    out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window,
    partial, partial_lse, counters,
):  # fmt: skip
    """:func:`paged_attention_spec` of the requests with exactly one query; other rows of ``out`` stay as they are."""
    counts = query_start_loc[1:] - query_start_loc[:-1]
    single = ((counts == 1) & (seq_lens > 0)).nonzero().flatten()
    if not len(single):
        return
    rows = query_start_loc[single].long()
    mixed = out[rows]
    starts = query_start_loc.new_tensor(range(len(single) + 1))
    batch = (block_table[single], seq_lens[single], starts, 1)
    paged_attention_spec(mixed, q[rows], key_cache, value_cache, *batch, scale, window)
    out[rows] = mixed


@jit
def _load_tile(
    cache, stride_b, stride_s, table, page, offset, d, tile, low, end, D: tl.constexpr, D_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Keys or values of tokens tile * TILE + offset, zeros outside low .. end - 1: those slots may hold NaN."""
    n = tile * TILE + offset
    inside = n < end
    if WINDOWED:
        inside = inside & (n >= low)
    if TILE <= BLOCK_SIZE:  # within a block, 32 bits are enough, and only a scalar changes from tile to tile
        cache += page * stride_b + tile * TILE % BLOCK_SIZE * stride_s
        at = offset * stride_s
    else:
        at = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64) * stride_b + n % BLOCK_SIZE * stride_s
    mask = inside
    if D < D_P2:
        mask = mask & (d < D)
    return tl.load(cache + (at + d), mask=mask, other=0.0)


@jit
def _attend_run(
    q, q_stride_h, keys, values, key_stride_b, key_stride_s, value_stride_b, value_stride_s, table, low, end,
    first, last, scale, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Tiles first .. last - 1: (normalised output [GROUP_P2, D_P2], log2 of the sum of powers of two [GROUP_P2]).

    Tokens stand in M of the products, so that few query heads are padded to 8, not to 16.
    """
    g = tl.arange(0, GROUP_P2)
    d = tl.arange(0, D_P2)
    offset = tl.arange(0, TILE)
    mask = (g < GROUP)[None, :] & (d < D)[:, None]
    queries = tl.load(q + g[None, :] * q_stride_h + d[:, None], mask=mask, other=0.0)
    best = tl.full([GROUP_P2], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P2], tl.float32)
    acc = tl.zeros([D_P2, GROUP_P2], tl.float32)
    # Triton gives each of two dependent loads, the block and its tokens, half of the stages.
    for tile in tl.range(first, last, num_stages=2 * DEPTH + 1):
        page = tile
        if TILE <= BLOCK_SIZE:
            page = tl.load(table + tile * TILE // BLOCK_SIZE, mask=tile < last, other=0).to(tl.int64)
        key = _load_tile(
            keys, key_stride_b, key_stride_s, table, page, offset[:, None], d[None, :], tile, low, end, D, D_P2,
            BLOCK_SIZE, TILE, WINDOWED,
        )  # fmt: skip
        value = _load_tile(
            values, value_stride_b, value_stride_s, table, page, offset[None, :], d[:, None], tile, low, end, D, D_P2,
            BLOCK_SIZE, TILE, WINDOWED,
        )  # fmt: skip
        n = tile * TILE + offset
        seen = n < end
        if WINDOWED:
            seen = seen & (n >= low)
        scores = tl.dot(key, queries, input_precision="ieee")
        scores = tl.where(seen[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=0) * scale)  # finite: every tile has a key that is seen
        weights = tl.exp2(scores * scale - new_best[None, :])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = tl.dot(value, weights.to(value.dtype), acc * shrink[None, :], input_precision="ieee")
        best = new_best
    return tl.trans(acc * (1.0 / total)[None, :]), best + tl.log2(total)


@jit
def _combine(
    partial, partial_lse, row, runs, out, out_stride_h, GROUP: tl.constexpr, GROUP_C: tl.constexpr, D: tl.constexpr,
    D_P2: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """out [GROUP, D] from the runs' outputs, weighted by 2^(their log-sum-exp). RUNS of them are loaded at a time; no
    thread needs another's values."""
    g = tl.arange(0, GROUP_C)
    d = tl.arange(0, D_P2)
    best = tl.full([GROUP_C], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_C], tl.float32)
    acc = tl.zeros([GROUP_C, D_P2], tl.float32)
    # Loads go past the first-level cache, which other multiprocessors' stores do not reach.
    for first in range(0, runs, RUNS):
        new_best = best
        for i in tl.static_range(RUNS):
            run = g * 0 + first + i
            here = (g < GROUP) & (run < runs)
            at = row + run * GROUP + g
            lse = tl.load(partial_lse + at, mask=here, other=float("-inf"), cache_modifier=".cg")
            new_best = tl.maximum(new_best, lse)
        base = tl.where(g < GROUP, new_best, 0.0)
        shrink = tl.exp2(best - base)
        total = total * shrink
        acc = acc * shrink[:, None]
        for i in tl.static_range(RUNS):
            run = g * 0 + first + i
            here = (g < GROUP) & (run < runs)
            at = row + run * GROUP + g
            lse = tl.load(partial_lse + at, mask=here, other=float("-inf"), cache_modifier=".cg")
            mask = here[:, None] & (d < D)[None, :]
            part = tl.load(partial + at[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(lse - base)
            total += weight
            acc += part * weight[:, None]
        best = new_best
    result = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(out + g[:, None] * out_stride_h + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["window"])
def decode_attention_kernel(
    out, out_stride_t, out_stride_h, q, q_stride_t, q_stride_h,
    key_cache, value_cache, key_stride_b, key_stride_s, key_stride_h, value_stride_b, value_stride_s, value_stride_h,
    block_table, block_table_stride, seq_lens, query_start_loc, scale, window, partial, partial_lse, counters,
    GROUP: tl.constexpr, GROUP_P2: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, DEPTH: tl.constexpr, WINDOWED: tl.constexpr,
    GROUP_C: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    start = tl.load(query_start_loc + request)
    behind = tl.load(query_start_loc + request + 1)
    end = tl.load(seq_lens + request)
    end = tl.where(behind - start == 1, end, 0)  # padding has no query; chunks are other kernels' work
    low = end * 0
    if WINDOWED:
        low = tl.maximum(end - window, 0)
    first_tile = low // TILE
    tiles = (end + TILE - 1) // TILE - first_tile
    each = tl.maximum((tiles + SPLITS - 1) // SPLITS, LEAST)
    first = first_tile + split * each
    last = tl.minimum(first + each, first_tile + tiles)
    if first < last:
        table = block_table + request.to(tl.int64) * block_table_stride
        result, lse = _attend_run(
            q + start.to(tl.int64) * q_stride_t + kv_head * GROUP * q_stride_h, q_stride_h,
            key_cache + kv_head * key_stride_h, value_cache + kv_head * value_stride_h,
            key_stride_b, key_stride_s, value_stride_b, value_stride_s, table, low, end, first, last,
            scale * 1.4426950408889634,  # log2(e): the exponentials are powers of two
            GROUP, GROUP_P2, D, D_P2, BLOCK_SIZE, TILE, DEPTH, WINDOWED,
        )  # fmt: skip
        g = tl.arange(0, GROUP_P2)
        d = tl.arange(0, D_P2)
        mask = (g < GROUP)[:, None] & (d < D)[None, :]
        first_head = out + start.to(tl.int64) * out_stride_t + kv_head * GROUP * out_stride_h
        runs = (tiles + each - 1) // each
        if SPLITS == 1 or runs == 1:
            to = first_head + g[:, None] * out_stride_h + d[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=mask)
        else:
            pair = request * tl.num_programs(0) + kv_head
            row = pair.to(tl.int64) * SPLITS * GROUP
            at = row + split * GROUP + g
            tl.store(partial + at[:, None] * D + d[None, :], result, mask=mask)
            tl.store(partial_lse + at, lse, mask=g < GROUP)
            tl.debug_barrier()  # all of the program's partials are stored before its arrival is counted
            arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == runs - 1:
                tl.store(counters + pair, 0)  # ready for the next launch
                _combine(partial, partial_lse, row, runs, first_head, out_stride_h, GROUP, GROUP_C, D, D_P2, RUNS)


@op(
    spec=decode_attention_spec,
    kernel=decode_attention_kernel,
    writes=("out", "partial", "partial_lse", "counters"),
    numpy=False,
)
def decode_attention(
    kernel, out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window,
    partial, partial_lse, counters,
):  # fmt: skip
    """:func:`paged_attention` for the requests that have exactly one query; it neither reads nor writes for others.

    Arguments as there. ``partial``, ``partial_lse``, ``counters``: see :func:`scratch_shapes`; counters are zeros
    between launches, and launches that share a scratch must be on one stream. Padding (no query, or seq_lens 0) costs a
    program that ends at once.
    """
    max_len = block_table.shape[1] * key_cache.shape[1]
    how = cut(seq_lens.shape[0], key_cache.shape[2], max_len, q.element_size())
    launch(
        kernel, out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window,
        partial, partial_lse, counters, how,
    )  # fmt: skip


def launch(
    kernel, out, q, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window,
    partial, partial_lse, counters, how,
):  # fmt: skip
    """:func:`decode_attention` with a given :class:`Cut`."""
    heads, d = q.shape[1:]
    num_reqs, kv_heads = seq_lens.shape[0], key_cache.shape[2]
    group = heads // kv_heads
    d_p2 = max(16, next_power_of_2(d))
    if how.splits > 1 and num_reqs * kv_heads * how.splits * group > partial_lse.shape[0]:
        raise ValueError(
            f"{num_reqs} requests x {kv_heads} kv heads x {how.splits} splits x {group} query heads need as many rows "
            f"of scratch, it has {partial_lse.shape[0]}; see scratch_shapes"
        )
    if num_reqs:
        kernel[(kv_heads, how.splits, num_reqs)](
            out, out.stride(0), out.stride(1), q, q.stride(0), q.stride(1),
            key_cache, value_cache, *key_cache.stride()[:3], *value_cache.stride()[:3],
            block_table, block_table.stride(0), seq_lens, query_start_loc, scale, window,
            partial, partial_lse, counters,
            GROUP=group, GROUP_P2=max(8, next_power_of_2(group)), D=d, D_P2=d_p2, BLOCK_SIZE=key_cache.shape[1],
            TILE=how.tile, SPLITS=how.splits, LEAST=how.least, DEPTH=how.depth, WINDOWED=window > 0,
            GROUP_C=next_power_of_2(group),
            RUNS=min(how.splits, 8 if how.num_warps == 1 else 16),
            num_warps=how.num_warps, **early_start(q), **({"maxnreg": how.maxnreg} if how.maxnreg else {}),
        )  # fmt: skip
