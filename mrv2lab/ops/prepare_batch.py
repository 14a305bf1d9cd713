"""All inputs of a batch without drafts in one launch, prefills or not.

The definition is ``prefill_inputs``, ``pos_seq_lens``, ``combine_tokens``, ``gather_block_tables`` and
``slot_mapping``, one after the other, with one row of logits a request; their files say what each part is for. A step
with a newcomer gives every launch new arguments, which costs the host 50 to 100 us each: one launch instead of five.
Rows and starts come in one piece that may lie in host memory, and are put here where later kernels, and graphs, read
them: one copy less than an upload each.

A request is known to have a block for every token up to this step's last and none behind it, so ``num_blocks`` is not
asked. Of what may lie in host memory, a microsecond or two away, only the first group's program reads ``prefill_len``
and the prompt. A program is a request and a KV-cache group, and goes through its tokens in blocks; programs behind
``num_rows`` blank the tails of ``query_start_loc``, ``seq_lens`` and ``slot_mappings``. Plain decodes have
``prepare_decode``, which asks for less. vLLM has no counterpart: it launches the parts one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops.combine_tokens import combine_tokens_spec
from mrv2lab.ops.gather_block_tables import gather_block_tables_spec
from mrv2lab.ops.pos_seq_lens import pos_seq_lens_spec
from mrv2lab.ops.prefill_inputs import prefill_inputs_spec
from mrv2lab.ops.slot_mapping import slot_mapping_spec

tl: Any = None


# sent_rows           [>= r] int32, device or UVA, state row of each request of the batch, < 0 = nobody's
# sent_starts         [>= r + 1] int32, device or UVA, first token of each request; at r, num_tokens
# num_computed_tokens [R] int32
# prefill_len         [R] int32
# last_sampled_tokens [R] int64
# all_token_ids       [R, L] int32, device or UVA
# tables              G x [R, B_g] int32, ceil(seq_len / block_size) blocks in each row of the batch
# table_ptrs          [G] uint64
# input_tables        G x [R, B_g] int32
# input_ptrs          [G] uint64
# table_strides       [G] int64, B_g
# block_sizes         [G] int32
# idx_mapping         [>= r] int32: sent_rows
# query_start_loc     [R + 1] int32: sent_starts, num_tokens behind them
# input_ids           [T] int32
# next_prefill_tokens [lookahead, R] int32
# positions           [T] int64
# seq_lens            [R] int32
# logits_indices      [n] int64
# slot_mappings       [G, T] int64
def prepare_batch_spec(
    sent_rows,
    sent_starts,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    all_token_ids,
    tables,
    table_ptrs,
    input_tables,
    input_ptrs,
    table_strides,
    block_sizes,
    idx_mapping,
    query_start_loc,
    input_ids,
    next_prefill_tokens,
    positions,
    seq_lens,
    logits_indices,
    slot_mappings,
    num_reqs,
    num_tokens,
    num_rows,
):
    idx_mapping[:num_reqs] = rows = sent_rows[:num_reqs]
    query_start_loc[:num_reqs], query_start_loc[num_reqs:] = sent_starts[:num_reqs], num_tokens
    batch = rows, query_start_loc
    one_each, no_drafts = np.arange(num_reqs + 1), np.zeros((len(prefill_len), 0), np.int64)
    prefill_inputs_spec(
        *batch, all_token_ids, prefill_len, num_computed_tokens, input_ids, next_prefill_tokens, num_reqs
    )
    pos_seq_lens_spec(*batch, num_computed_tokens, positions, seq_lens, num_reqs)
    combine_tokens_spec(
        *batch, one_each, seq_lens, prefill_len, last_sampled_tokens, no_drafts, input_ids, logits_indices, num_reqs
    )
    live = np.flatnonzero(rows >= 0)
    num_blocks = np.zeros((len(tables), len(prefill_len)), np.int32)
    num_blocks[:, rows[live]] = -(-seq_lens[live] // block_sizes[:, None])
    gather_block_tables_spec(
        rows, num_blocks, tables, table_ptrs, input_tables, input_ptrs, table_strides, num_reqs, num_rows
    )
    slot_mapping_spec(*batch, positions, tables, table_ptrs, table_strides, block_sizes, slot_mappings, num_reqs)


@jit(do_not_specialize=["num_reqs", "num_tokens", "num_rows"])
def prepare_batch_kernel(
    sent_rows,
    sent_starts,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    all_token_ids,
    token_stride,
    table_ptrs,
    input_ptrs,
    table_strides,
    block_sizes,
    idx_mapping,
    query_start_loc,
    input_ids,
    next_prefill_tokens,
    next_stride,
    lookahead,
    positions,
    seq_lens,
    max_num_reqs,
    logits_indices,
    slot_mappings,
    slot_stride,
    max_num_tokens,
    num_reqs,
    num_tokens,
    num_rows,
    BLOCK: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):
    i = tl.program_id(0)
    g = tl.program_id(1)
    slots = slot_mappings + g.to(tl.int64) * slot_stride
    lane = tl.arange(0, BLOCK)
    if i >= num_rows:
        behind = (i - num_rows) * BLOCK + lane
        tail = num_tokens + behind
        tl.store(slots + tail, tl.full((BLOCK,), -1, tl.int64), mask=tail < max_num_tokens)
        if g == 0:
            tail = num_reqs + behind
            tl.store(query_start_loc + tail, tl.zeros((BLOCK,), tl.int32) + num_tokens, mask=tail <= max_num_reqs)
            tl.store(seq_lens + tail, tl.zeros((BLOCK,), tl.int32), mask=tail < max_num_reqs)
        return

    # Loads that need nothing of each other stand together: a program is a chain of four ways to memory.
    row = tl.load(sent_rows + i, mask=i < num_reqs, other=-1)
    start = tl.load(sent_starts + i, mask=i < num_reqs, other=0)
    end = tl.load(sent_starts + i + 1, mask=i < num_reqs, other=0)
    stride = tl.load(table_strides + g)
    block_size = tl.load(block_sizes + g)
    table = tl.load(table_ptrs + g).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * stride
    target = tl.load(input_ptrs + g).to(tl.pointer_type(tl.int32)) + i * stride
    length = end - start
    done = tl.load(num_computed_tokens + row, mask=row >= 0, other=0)
    known = tl.load(prefill_len + row, mask=(row >= 0) & (g == 0), other=0)
    sampled = tl.load(last_sampled_tokens + row, mask=(row >= 0) & (g == 0), other=0)
    if g == 0 and i < num_reqs:
        tl.store(idx_mapping + i, row)
        tl.store(query_start_loc + i, start)
        tl.store(seq_lens + i, done + length)
        tl.store(logits_indices + i, (end - 1).to(tl.int64))
        for first in range(0, length, BLOCK):
            offset = first + lane
            tl.store(positions + start + offset, (done + offset).to(tl.int64), mask=offset < length)
    if row < 0:
        for first in range(0, length, BLOCK):
            offset = first + lane
            tl.store(slots + start + offset, tl.full((BLOCK,), -1, tl.int64), mask=offset < length)
        for first in range(0, stride, BLOCK):
            offset = first + lane
            tl.store(target + offset, tl.zeros((BLOCK,), tl.int32), mask=offset < stride)
        return

    if g == 0:
        tokens = all_token_ids + row.to(tl.int64) * token_stride + done
        for first in range(0, length, BLOCK):
            offset = first + lane
            in_prompt = (offset < length) & (done + offset < known)
            token = tl.where(in_prompt, tl.load(tokens + offset, mask=in_prompt, other=0), sampled.to(tl.int32))
            tl.store(input_ids + start + offset, token, mask=in_prompt | (offset == length - 1))
        if done < known:
            ahead = tl.arange(0, LOOKAHEAD)
            wanted = ahead < lookahead
            following = tl.load(tokens + length + ahead, mask=wanted & (done + length + ahead < known), other=0)
            tl.store(next_prefill_tokens + ahead * next_stride + row, following, mask=wanted)
    for first in range(0, length, BLOCK):
        offset = first + lane
        mask = offset < length
        block = tl.load(table + (done + offset) // block_size, mask=mask, other=0)
        slot = block.to(tl.int64) * block_size + (done + offset) % block_size
        tl.store(slots + start + offset, slot, mask=mask)
    num_blocks = (done + length + block_size - 1) // block_size
    for first in range(0, num_blocks, BLOCK):
        offset = first + lane
        mask = offset < num_blocks
        tl.store(target + offset, tl.load(table + offset, mask=mask), mask=mask)


@op(
    spec=prepare_batch_spec,
    kernel=prepare_batch_kernel,
    writes=(
        "input_tables",
        "idx_mapping",
        "query_start_loc",
        "input_ids",
        "next_prefill_tokens",
        "positions",
        "seq_lens",
        "logits_indices",
        "slot_mappings",
    ),
)
def prepare_batch(
    kernel,
    sent_rows,
    sent_starts,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    all_token_ids,
    tables,
    table_ptrs,
    input_tables,
    input_ptrs,
    table_strides,
    block_sizes,
    idx_mapping,
    query_start_loc,
    input_ids,
    next_prefill_tokens,
    positions,
    seq_lens,
    logits_indices,
    slot_mappings,
    num_reqs,
    num_tokens,
    num_rows,
):
    """Rows, tokens, positions, lengths, block tables and slots of ``num_reqs`` requests with ``num_tokens`` tokens and
    no drafts; ``num_rows >= num_reqs`` rows of the input tables are written."""
    max_num_reqs, max_num_tokens, lookahead = seq_lens.shape[0], slot_mappings.shape[1], next_prefill_tokens.shape[0]
    tail = cdiv(max(max_num_reqs + 1 - num_reqs, max_num_tokens - num_tokens), 1024)
    kernel[(num_rows + tail, len(tables))](
        sent_rows,
        sent_starts,
        num_computed_tokens,
        prefill_len,
        last_sampled_tokens,
        all_token_ids,
        all_token_ids.stride(0),
        table_ptrs,
        input_ptrs,
        table_strides,
        block_sizes,
        idx_mapping,
        query_start_loc,
        input_ids,
        next_prefill_tokens,
        next_prefill_tokens.stride(0),
        lookahead,
        positions,
        seq_lens,
        max_num_reqs,
        logits_indices,
        slot_mappings,
        slot_mappings.stride(0),
        max_num_tokens,
        num_reqs,
        num_tokens,
        num_rows,
        BLOCK=1024,
        LOOKAHEAD=next_power_of_2(lookahead),
    )
