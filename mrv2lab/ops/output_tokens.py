"""What a request had generated when a logits row's token is chosen, as one array on the device, for custom processors.

Committed outputs, then this step's drafts in front of the row. No counterpart in vLLM, whose processors on this path
read the state themselves.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# out                  [>= starts[-1]] int32: the rows' tokens one behind the other
# starts               [m + 1] int32, where each row's lie
# rows                 [m] int32, logits rows
# expanded_idx_mapping [n] int32
# local_pos            [n] int32, drafts in front of a logits row, the last of them at logits_indices of input_ids
# logits_indices       [n] int64
# input_ids            [t] int32
# all_token_ids        [R, L] int32, device or UVA
# prompt_len           [R] int32
def output_tokens_spec(
    out, starts, rows, expanded_idx_mapping, local_pos, logits_indices, input_ids, all_token_ids, prompt_len, longest
):
    for i, row in enumerate(rows):
        drafts, last = local_pos[row], logits_indices[row] + 1
        index = expanded_idx_mapping[row]
        committed = starts[i + 1] - starts[i] - drafts
        out[starts[i] : starts[i] + committed] = all_token_ids[index, prompt_len[index] : prompt_len[index] + committed]
        out[starts[i] + committed : starts[i + 1]] = input_ids[last - drafts : last]


@jit
def output_tokens_kernel(
    out,
    starts,
    rows,
    expanded_idx_mapping,
    local_pos,
    logits_indices,
    input_ids,
    all_token_ids,
    token_stride,
    prompt_len,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    index = tl.load(expanded_idx_mapping + row).to(tl.int64)
    start = tl.load(starts + i)
    length = tl.load(starts + i + 1) - start
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    committed = length - tl.load(local_pos + row)
    old = tl.load(all_token_ids + index * token_stride + tl.load(prompt_len + index) + j, mask=j < committed, other=0)
    # The last draft is at logits_indices and becomes token length - 1.
    draft_at = tl.load(logits_indices + row) + 1 - length + j
    draft = tl.load(input_ids + draft_at, mask=(j >= committed) & (j < length), other=0)
    tl.store(out + start + j, tl.where(j < committed, old, draft), mask=j < length)


@op(spec=output_tokens_spec, kernel=output_tokens_kernel, writes=("out",))
def output_tokens(
    kernel,
    out,
    starts,
    rows,
    expanded_idx_mapping,
    local_pos,
    logits_indices,
    input_ids,
    all_token_ids,
    prompt_len,
    longest,
):
    """Gather the generated tokens of ``rows``, of which none has more than ``longest``."""
    kernel[(len(rows), cdiv(max(longest, 1), 1024))](
        out, starts, rows, expanded_idx_mapping, local_pos, logits_indices, input_ids, all_token_ids,
        all_token_ids.stride(0), prompt_len, BLOCK=1024,
    )  # fmt: skip
