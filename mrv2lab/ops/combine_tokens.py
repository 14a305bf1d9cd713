"""Put each decoding request's last sampled token and drafts into ``input_ids``, and find the rows that need logits.

A request's last ``num_logits`` tokens of the step get logits: the last sampled token, then its drafts. One rule keeps
prompts intact: a slot whose position lies within the prefill holds a known token and is left alone. It covers prefill
chunks and the "prompt tail", a first decode step that placeholder drafts pad while the last prompt token is still to be
computed. A negative row is nobody's: its logits rows are found, its tokens stay what they were. Counterpart in vLLM:
``combine_sampled_and_draft_tokens`` in ``v1/worker/gpu/input_batch.py`` (its guard tests the first slot only).
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, next_power_of_2, op

tl: Any = None


# idx_mapping         [r] int32, < 0 = nobody's
# query_start_loc     [>= r + 1] int32
# cu_num_logits       [r + 1] int32, from 0; at most K + 1 a request
# seq_lens            [>= r] int32
# prefill_len         [R] int32
# last_sampled_tokens [R] int64
# draft_tokens        [R, K] int64
# input_ids           [T] int32
# logits_indices      [n] int64
def combine_tokens_spec(
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    seq_lens,
    prefill_len,
    last_sampled_tokens,
    draft_tokens,
    input_ids,
    logits_indices,
    num_reqs,
):
    for i in range(num_reqs):
        row = idx_mapping[i]
        num_logits = cu_num_logits[i + 1] - cu_num_logits[i]
        for j in range(num_logits):
            slot = query_start_loc[i + 1] - num_logits + j
            logits_indices[cu_num_logits[i] + j] = slot
            if row >= 0 and seq_lens[i] - num_logits + j >= prefill_len[row]:
                input_ids[slot] = last_sampled_tokens[row] if j == 0 else draft_tokens[row, j - 1]


@jit
def combine_tokens_kernel(
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    seq_lens,
    prefill_len,
    last_sampled_tokens,
    draft_tokens,
    draft_stride,
    input_ids,
    logits_indices,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(idx_mapping + i)
    first = tl.load(cu_num_logits + i)
    num_logits = tl.load(cu_num_logits + i + 1) - first
    j = tl.arange(0, BLOCK)
    mask = j < num_logits
    slot = tl.load(query_start_loc + i + 1) - num_logits + j
    tl.store(logits_indices + first + j, slot.to(tl.int64), mask=mask)
    if row < 0:
        return

    mask = mask & (tl.load(seq_lens + i) - num_logits + j >= tl.load(prefill_len + row))
    drafts = tl.load(draft_tokens + row.to(tl.int64) * draft_stride + j - 1, mask=mask & (j > 0), other=0)
    token = tl.where(j == 0, tl.load(last_sampled_tokens + row), drafts)
    tl.store(input_ids + slot, token.to(tl.int32), mask=mask)


@op(spec=combine_tokens_spec, kernel=combine_tokens_kernel, writes=("input_ids", "logits_indices"))
def combine_tokens(
    kernel,
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    seq_lens,
    prefill_len,
    last_sampled_tokens,
    draft_tokens,
    input_ids,
    logits_indices,
    num_reqs,
):
    """Sampled and draft tokens into ``input_ids``; the step's logits rows into ``logits_indices``."""
    kernel[(num_reqs,)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        seq_lens,
        prefill_len,
        last_sampled_tokens,
        draft_tokens,
        draft_tokens.stride(0),
        input_ids,
        logits_indices,
        BLOCK=next_power_of_2(draft_tokens.shape[1] + 1),
    )
