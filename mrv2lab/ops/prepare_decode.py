"""All inputs of a batch of plain decodes in one launch: every request has one token, and nobody has drafts.

The definition is ``pos_seq_lens``, ``combine_tokens``, ``gather_block_tables`` and ``slot_mapping``, one after the
other, with ``query_start_loc``, which is written here too, and ``cu_num_logits`` both 0, 1, 2, ...; their files say
what each part is for. Four launches are four times the host's launch cost and four times the way through the same
counters.

A plain decode is known to have its prefill behind it and a block for every token up to this one, so neither
``prefill_len`` nor ``num_blocks`` is asked: both may lie in host memory, a microsecond or two away, and nothing else
that is read here does. A program is a request and a KV-cache group; programs behind ``num_rows`` blank the tails of
``query_start_loc``, ``seq_lens`` and ``slot_mappings``. vLLM has no counterpart: it launches the parts one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# idx_mapping         [r] int32, < 0 = nobody's; the others have num_computed_tokens >= prefill_len
# num_computed_tokens [R] int32
# last_sampled_tokens [R] int64
# tables              G x [R, B_g] int32, num_computed_tokens // block_size + 1 blocks in each row of the batch
# table_ptrs          [G] uint64
# input_tables        G x [R, B_g] int32
# input_ptrs          [G] uint64
# table_strides       [G] int64, B_g
# block_sizes         [G] int32
# query_start_loc     [R + 1] int32
# input_ids           [T] int32
# positions           [T] int64
# seq_lens            [R] int32
# logits_indices      [n] int64
# slot_mappings       [G, T] int64
def prepare_decode_spec(
    idx_mapping,
    num_computed_tokens,
    last_sampled_tokens,
    tables,
    table_ptrs,
    input_tables,
    input_ptrs,
    table_strides,
    block_sizes,
    query_start_loc,
    input_ids,
    positions,
    seq_lens,
    logits_indices,
    slot_mappings,
    num_reqs,
    num_rows,
):
    rows = idx_mapping[:num_reqs]
    live = rows >= 0
    done = np.where(live, num_computed_tokens[rows], 0)
    query_start_loc[:] = np.minimum(np.arange(len(query_start_loc)), num_reqs)
    positions[:num_reqs] = done
    seq_lens[:num_reqs], seq_lens[num_reqs:] = done + 1, 0
    logits_indices[:num_reqs] = np.arange(num_reqs)
    sampled = np.flatnonzero(live)
    input_ids[sampled] = last_sampled_tokens[rows[sampled]]
    for g, (table, input_table) in enumerate(zip(tables, input_tables, strict=True)):
        slot_mappings[g] = -1
        input_table[num_reqs:num_rows] = 0
        for i in range(num_reqs):
            if not live[i]:
                input_table[i] = 0
                continue
            blocks, (block, offset) = table[rows[i]], divmod(int(done[i]), int(block_sizes[g]))
            input_table[i, : block + 1] = blocks[: block + 1]
            slot_mappings[g, i] = int(blocks[block]) * int(block_sizes[g]) + offset


@jit(do_not_specialize=["num_reqs", "num_rows"])
def prepare_decode_kernel(
    idx_mapping,
    num_computed_tokens,
    last_sampled_tokens,
    table_ptrs,
    input_ptrs,
    table_strides,
    block_sizes,
    query_start_loc,
    input_ids,
    positions,
    seq_lens,
    max_num_reqs,
    logits_indices,
    slot_mappings,
    slot_stride,
    max_num_tokens,
    num_reqs,
    num_rows,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    g = tl.program_id(1)
    slots = slot_mappings + g.to(tl.int64) * slot_stride
    lane = tl.arange(0, BLOCK)
    if i >= num_rows:
        tail = num_reqs + (i - num_rows) * BLOCK + lane
        tl.store(slots + tail, tl.full((BLOCK,), -1, tl.int64), mask=tail < max_num_tokens)
        if g == 0:
            tl.store(query_start_loc + tail, tl.zeros((BLOCK,), tl.int32) + num_reqs, mask=tail <= max_num_reqs)
            tl.store(seq_lens + tail, tl.zeros((BLOCK,), tl.int32), mask=tail < max_num_reqs)
        return

    # Loads that need nothing of each other stand together: a program is a chain of three ways to memory.
    row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)
    stride = tl.load(table_strides + g)
    block_size = tl.load(block_sizes + g)
    table = tl.load(table_ptrs + g).to(tl.pointer_type(tl.int32))
    target = tl.load(input_ptrs + g).to(tl.pointer_type(tl.int32)) + i * stride
    live = row >= 0
    done = tl.load(num_computed_tokens + row, mask=live, other=0)
    token = tl.load(last_sampled_tokens + row, mask=live & (g == 0), other=0)
    if g == 0 and i < num_reqs:
        tl.store(query_start_loc + i, i)
        tl.store(positions + i, done.to(tl.int64))
        tl.store(seq_lens + i, done + 1)
        tl.store(logits_indices + i, i.to(tl.int64))
        tl.store(input_ids + i, token.to(tl.int32), mask=live)
    if row < 0:
        if i < num_reqs:
            tl.store(slots + i, tl.full((), -1, tl.int64))
        for first in range(0, stride, BLOCK):
            offset = first + lane
            tl.store(target + offset, tl.zeros((BLOCK,), tl.int32), mask=offset < stride)
        return

    source = table + row.to(tl.int64) * stride
    last = done // block_size
    block = tl.load(source + last)
    for first in range(0, last + 1, BLOCK):
        offset = first + lane
        mask = offset <= last
        tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)
    tl.store(slots + i, block.to(tl.int64) * block_size + done % block_size)


@op(
    spec=prepare_decode_spec,
    kernel=prepare_decode_kernel,
    writes=("input_tables", "query_start_loc", "input_ids", "positions", "seq_lens", "logits_indices", "slot_mappings"),
)
def prepare_decode(
    kernel,
    idx_mapping,
    num_computed_tokens,
    last_sampled_tokens,
    tables,
    table_ptrs,
    input_tables,
    input_ptrs,
    table_strides,
    block_sizes,
    query_start_loc,
    input_ids,
    positions,
    seq_lens,
    logits_indices,
    slot_mappings,
    num_reqs,
    num_rows,
):
    """Tokens, positions, lengths, block tables and slots of ``num_reqs`` plain decodes; ``num_rows >= num_reqs`` rows
    of the input tables are written."""
    max_num_reqs, max_num_tokens = seq_lens.shape[0], slot_mappings.shape[1]
    tail = cdiv(max(max_num_reqs + 1, max_num_tokens) - num_reqs, 512)
    kernel[(num_rows + tail, len(tables))](
        idx_mapping,
        num_computed_tokens,
        last_sampled_tokens,
        table_ptrs,
        input_ptrs,
        table_strides,
        block_sizes,
        query_start_loc,
        input_ids,
        positions,
        seq_lens,
        max_num_reqs,
        logits_indices,
        slot_mappings,
        slot_mappings.stride(0),
        max_num_tokens,
        num_reqs,
        num_rows,
        BLOCK=512,
    )
