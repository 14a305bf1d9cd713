"""Copy each prefilling request's next tokens from its state row into this step's ``input_ids``.

Only known tokens are copied: a query that placeholder drafts stretch past the prompt leaves its tail to
``combine_tokens``. Also kept are the ``lookahead`` tokens that follow the chunk, 0 past the end, for a drafter that
must not sample what the prompt already says. Launched only if the batch has a prefill; decoding requests are skipped
inside. Counterpart in vLLM: ``prepare_prefill_inputs`` in ``v1/worker/gpu/input_batch.py`` (it copies the whole query).
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, next_power_of_2, op

tl: Any = None


# idx_mapping         [r] int32, state row of each request of the batch (int64 in vLLM), < 0 = nobody's
# query_start_loc     [>= r + 1] int32
# all_token_ids       [R, L] int32, device or UVA
# prefill_len         [R] int32
# num_computed_tokens [R] int32
# input_ids           [T] int32
# next_prefill_tokens [lookahead, R] int32
def prefill_inputs_spec(
    idx_mapping,
    query_start_loc,
    all_token_ids,
    prefill_len,
    num_computed_tokens,
    input_ids,
    next_prefill_tokens,
    num_reqs,
):
    for i in range(num_reqs):
        row, start, end = idx_mapping[i], query_start_loc[i], query_start_loc[i + 1]
        if row < 0:
            continue
        known, done = prefill_len[row], num_computed_tokens[row]
        if done < known:
            chunk = all_token_ids[row, done : min(done + end - start, known)]
            input_ids[start : start + len(chunk)] = chunk
            following = all_token_ids[row, done + end - start : known][: len(next_prefill_tokens)]
            next_prefill_tokens[:, row] = 0
            next_prefill_tokens[: len(following), row] = following


@jit
def prefill_inputs_kernel(
    idx_mapping,
    query_start_loc,
    all_token_ids,
    token_stride,
    prefill_len,
    num_computed_tokens,
    input_ids,
    next_prefill_tokens,
    next_stride,
    lookahead,
    BLOCK: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(idx_mapping + i)
    if row < 0:
        return
    known = tl.load(prefill_len + row)
    done = tl.load(num_computed_tokens + row)
    if done >= known:
        return
    start = tl.load(query_start_loc + i)
    end = tl.load(query_start_loc + i + 1)
    tokens = all_token_ids + row.to(tl.int64) * token_stride

    count = tl.minimum(end - start, known - done)
    for first in range(0, count, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        mask = offset < count
        tl.store(input_ids + start + offset, tl.load(tokens + done + offset, mask=mask), mask=mask)

    ahead = tl.arange(0, LOOKAHEAD)
    position = done + end - start + ahead
    wanted = ahead < lookahead
    following = tl.load(tokens + position, mask=wanted & (position < known), other=0)
    tl.store(next_prefill_tokens + ahead * next_stride + row, following, mask=wanted)


@op(spec=prefill_inputs_spec, kernel=prefill_inputs_kernel, writes=("input_ids", "next_prefill_tokens"))
def prefill_inputs(
    kernel,
    idx_mapping,
    query_start_loc,
    all_token_ids,
    prefill_len,
    num_computed_tokens,
    input_ids,
    next_prefill_tokens,
    num_reqs,
):
    """Prompt tokens of this step's chunks into ``input_ids``, those behind the chunks into ``next_prefill_tokens``."""
    kernel[(num_reqs,)](
        idx_mapping,
        query_start_loc,
        all_token_ids,
        all_token_ids.stride(0),
        prefill_len,
        num_computed_tokens,
        input_ids,
        next_prefill_tokens,
        next_prefill_tokens.stride(0),
        next_prefill_tokens.shape[0],
        BLOCK=1024,
        LOOKAHEAD=next_power_of_2(next_prefill_tokens.shape[0]),
    )
