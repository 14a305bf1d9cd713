"""All inputs of a batch of plain decodes in one launch: every request has one token, and nobody has drafts.

The definition is ``pos_seq_lens``, ``combine_tokens``, ``gather_block_tables`` and ``slot_mapping``, one after the
other, with ``query_start_loc`` and ``cu_num_logits`` both 0, 1, 2, ...; their files say what each part is for. Four
launches are four times the host's launch cost and four times the way through the same counters. A program is a request
and a KV-cache group; programs behind ``num_rows`` blank the tails of ``seq_lens`` and ``slot_mappings``. vLLM has no
counterpart: it launches the parts one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# idx_mapping         [r] int32, < 0 = nobody's
# num_computed_tokens [R] int32
# prefill_len         [R] int32
# last_sampled_tokens [R] int64
# num_blocks          [G, R] int32
# tables              G x [R, B_g] int32
# table_ptrs          [G] uint64
# input_tables        G x [R, B_g] int32
# input_ptrs          [G] uint64
# table_strides       [G] int64, B_g
# block_sizes         [G] int32
# input_ids           [T] int32
# positions           [T] int64
# seq_lens            [R] int32
# logits_indices      [n] int64
# slot_mappings       [G, T] int64
def prepare_decode_spec(
    idx_mapping,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    num_blocks,
    tables,
    table_ptrs,
    input_tables,
    input_ptrs,
    table_strides,
    block_sizes,
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
    positions[:num_reqs] = done
    seq_lens[:num_reqs], seq_lens[num_reqs:] = done + 1, 0
    logits_indices[:num_reqs] = np.arange(num_reqs)
    sampled = np.flatnonzero(live & (done >= prefill_len[rows]))
    input_ids[sampled] = last_sampled_tokens[rows[sampled]]
    for g, (table, input_table) in enumerate(zip(tables, input_tables, strict=True)):
        slot_mappings[g] = -1
        input_table[num_reqs:num_rows] = 0
        for i in range(num_reqs):
            if not live[i]:
                input_table[i] = 0
                continue
            blocks, count = table[rows[i]], num_blocks[g, rows[i]]
            input_table[i, :count] = blocks[:count]
            block, offset = divmod(int(done[i]), int(block_sizes[g]))
            slot_mappings[g, i] = int(blocks[block]) * int(block_sizes[g]) + offset


@jit(do_not_specialize=["num_reqs", "num_rows"])
def prepare_decode_kernel(
    idx_mapping,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    num_blocks,
    count_stride,
    table_ptrs,
    input_ptrs,
    table_strides,
    block_sizes,
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
            tl.store(seq_lens + tail, tl.zeros((BLOCK,), tl.int32), mask=tail < max_num_reqs)
        return

    stride = tl.load(table_strides + g)
    target = tl.load(input_ptrs + g).to(tl.pointer_type(tl.int32)) + i * stride
    row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)
    live = row >= 0
    done = tl.load(num_computed_tokens + row, mask=live, other=0)
    if g == 0 and i < num_reqs:
        tl.store(positions + i, done.to(tl.int64))
        tl.store(seq_lens + i, done + 1)
        tl.store(logits_indices + i, i.to(tl.int64))
        known = tl.load(prefill_len + row, mask=live, other=0)
        token = tl.load(last_sampled_tokens + row, mask=live, other=0)
        tl.store(input_ids + i, token.to(tl.int32), mask=live & (done >= known))
    if row < 0:
        if i < num_reqs:
            tl.store(slots + i, tl.full((), -1, tl.int64))
        for first in range(0, stride, BLOCK):
            offset = first + lane
            tl.store(target + offset, tl.zeros((BLOCK,), tl.int32), mask=offset < stride)
        return

    source = tl.load(table_ptrs + g).to(tl.pointer_type(tl.int32)) + row * stride
    block_size = tl.load(block_sizes + g)
    block = tl.load(source + done // block_size)
    tl.store(slots + i, block.to(tl.int64) * block_size + done % block_size)
    count = tl.load(num_blocks + g * count_stride + row)
    for first in range(0, count, BLOCK):
        offset = first + lane
        mask = offset < count
        tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)


@op(
    spec=prepare_decode_spec,
    kernel=prepare_decode_kernel,
    writes=("input_tables", "input_ids", "positions", "seq_lens", "logits_indices", "slot_mappings"),
)
def prepare_decode(
    kernel,
    idx_mapping,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    num_blocks,
    tables,
    table_ptrs,
    input_tables,
    input_ptrs,
    table_strides,
    block_sizes,
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
    tail = cdiv(max(max_num_reqs, max_num_tokens) - num_reqs, 512)
    kernel[(num_rows + tail, len(tables))](
        idx_mapping,
        num_computed_tokens,
        prefill_len,
        last_sampled_tokens,
        num_blocks,
        num_blocks.stride(0),
        table_ptrs,
        input_ptrs,
        table_strides,
        block_sizes,
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
