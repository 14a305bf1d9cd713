"""What penalties remember of a request: which tokens its prompt holds, and how often each was generated.

A row is rebuilt from the request's known tokens when the request is added (also when it is resumed: outputs are counted
again), and advanced by the accepted tokens of each step, so a step costs the same however long the output is.
Counterparts in vLLM: ``_bincount_kernel`` in ``v1/worker/gpu/sample/penalties.py``, and ``post_update`` in
``v1/worker/gpu/input_batch.py``, which counts for every request.

Token ids outside the vocabulary count nowhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op

tl: Any = None


# rows              [a] int32, distinct
# prompt_bin_mask   [R, ceil(V / 32)] int32, bit 0 of a word is its lowest token
# output_bin_counts [R, V] int32
def zero_counts_spec(rows, prompt_bin_mask, output_bin_counts):
    prompt_bin_mask[rows] = 0
    output_bin_counts[rows] = 0


@jit
def zero_counts_kernel(rows, prompt_bin_mask, words, output_bin_counts, vocab, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), tl.int32)
    tl.store(output_bin_counts + row * vocab + token, zeros, mask=token < vocab)
    tl.store(prompt_bin_mask + row * words + token, zeros, mask=token < words)


@op(spec=zero_counts_spec, kernel=zero_counts_kernel, writes=("prompt_bin_mask", "output_bin_counts"))
def zero_counts(kernel, rows, prompt_bin_mask, output_bin_counts):
    """Forget the rows' previous owners."""
    vocab, words = output_bin_counts.shape[1], prompt_bin_mask.shape[1]
    kernel[(len(rows), cdiv(vocab, 4096))](rows, prompt_bin_mask, words, output_bin_counts, vocab, BLOCK=4096)


# rows              [a] int32, distinct
# all_token_ids     [R, L] int32, device or UVA
# prompt_len        [R] int32
# prefill_len       [R] int32, at most longest
# prompt_bin_mask   [R, ceil(V / 32)] int32
# output_bin_counts [R, V] int32
def count_history_spec(rows, all_token_ids, prompt_len, prefill_len, prompt_bin_mask, output_bin_counts, longest):
    vocab = output_bin_counts.shape[1]
    words = prompt_bin_mask.view(np.uint32)
    for row in rows:
        tokens = all_token_ids[row, : prefill_len[row]]
        prompt, outputs = (
            part[(part >= 0) & (part < vocab)] for part in (tokens[: prompt_len[row]], tokens[prompt_len[row] :])
        )
        np.bitwise_or.at(words[row], prompt // 32, np.uint32(1) << (prompt % 32).astype(np.uint32))
        np.add.at(output_bin_counts[row], outputs, 1)


@jit
def count_history_kernel(
    rows,
    all_token_ids,
    token_stride,
    prompt_len,
    prefill_len,
    prompt_bin_mask,
    words,
    output_bin_counts,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    length = tl.load(prefill_len + row)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(all_token_ids + row * token_stride + i, mask=i < length, other=-1)
    known = (token >= 0) & (token < vocab)
    in_prompt = i < tl.load(prompt_len + row)
    bit = tl.full((BLOCK,), 1, tl.int32) << (token % 32)
    tl.atomic_or(prompt_bin_mask + row * words + token // 32, bit, mask=known & in_prompt)
    tl.atomic_add(output_bin_counts + row * vocab + token, 1, mask=known & (i >= tl.load(prompt_len + row)))


@op(spec=count_history_spec, kernel=count_history_kernel, writes=("prompt_bin_mask", "output_bin_counts"))
def count_history(kernel, rows, all_token_ids, prompt_len, prefill_len, prompt_bin_mask, output_bin_counts, longest):
    """Add the known tokens of ``rows``: those of the prompt to the mask, outputs to the counts."""
    vocab, words = output_bin_counts.shape[1], prompt_bin_mask.shape[1]
    kernel[(len(rows), cdiv(longest, 1024))](
        rows, all_token_ids, all_token_ids.stride(0), prompt_len, prefill_len, prompt_bin_mask, words,
        output_bin_counts, vocab, BLOCK=1024,
    )  # fmt: skip


# idx_mapping        [r] int32, < 0 = gone
# sampled_tokens     [r, K + 1] int64, the first num_sampled of each row count
# num_sampled        [r] int32
# repetition_penalty [R] float32, 1 = off
# frequency_penalty  [R] float32, 0 = off
# presence_penalty   [R] float32, 0 = off
# output_bin_counts  [R, V] int32
def count_sampled_spec(
    idx_mapping,
    sampled_tokens,
    num_sampled,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    output_bin_counts,
):
    for i, row in enumerate(idx_mapping):
        if row < 0 or (repetition_penalty[row] == 1 and frequency_penalty[row] == 0 and presence_penalty[row] == 0):
            continue
        tokens = sampled_tokens[i, : num_sampled[i]]
        known = tokens[(tokens >= 0) & (tokens < output_bin_counts.shape[1])]
        np.add.at(output_bin_counts[row], known, 1)


@jit
def count_sampled_kernel(
    idx_mapping,
    sampled_tokens,
    sampled_stride,
    num_sampled,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    output_bin_counts,
    vocab,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping + i).to(tl.int64)
    if row < 0:
        return
    off = (tl.load(repetition_penalty + row) == 1.0) & (tl.load(frequency_penalty + row) == 0.0)
    if off & (tl.load(presence_penalty + row) == 0.0):
        return
    j = tl.arange(0, BLOCK)
    token = tl.load(sampled_tokens + i * sampled_stride + j, mask=j < tl.load(num_sampled + i), other=-1)
    tl.atomic_add(output_bin_counts + row * vocab + token, 1, mask=(token >= 0) & (token < vocab))


@op(spec=count_sampled_spec, kernel=count_sampled_kernel, writes=("output_bin_counts",))
def count_sampled(
    kernel,
    idx_mapping,
    sampled_tokens,
    num_sampled,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    output_bin_counts,
):
    """Count this step's accepted tokens of the requests that use penalties; rejected drafts never count."""
    kernel[(len(idx_mapping),)](
        idx_mapping, sampled_tokens, sampled_tokens.stride(0), num_sampled, repetition_penalty, frequency_penalty,
        presence_penalty, output_bin_counts, output_bin_counts.shape[1],
        BLOCK=next_power_of_2(sampled_tokens.shape[1]), num_warps=1,
    )  # fmt: skip
