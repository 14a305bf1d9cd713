"""Repetition, frequency and presence penalties, in place on float32 logits, from counts that live on the device.

A logits row behind drafts sees the drafts in front of it as if they had been generated. Only tokens that a penalty
touches are read and written: the rest of a row costs its counts (and one bit a token where repetition is used).
Counterpart in vLLM: ``_penalties_kernel`` in ``v1/worker/gpu/sample/penalties.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None

BLOCK, CHUNK = 2048, 256
"""Tokens of a program, which is one warp, and those it looks at at a time: what it must read first is read for all."""


def apply_penalties_spec(
    logits: Any,
    expanded_idx_mapping: Any,
    local_pos: Any,
    logits_indices: Any,
    input_ids: Any,
    repetition_penalty: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
    prompt_bin_mask: Any,
    output_bin_counts: Any,
) -> None:
    """Tokens of prompt or output: x > 0 ? x / repetition : x * repetition. Then, for tokens generated c times, x -=
    frequency * c and x -= presence if c > 0; each operation is rounded to float32.

    logits float32[n, V], any row stride, columns adjacent; expanded_idx_mapping int32[n] -> row of the float32[R]
    penalties, prompt_bin_mask int32[R, ceil(V / 32)] and output_bin_counts int32[R, V], < 0 = padding; local_pos
    int32[n]: how many drafts lie in front of the row, the last of them at logits_indices int64[n] of input_ids
    int32[t]. A draft outside the vocabulary (a placeholder, -1) is nobody.
    """
    vocab = logits.shape[1]
    ids, counts = input_ids.numpy(), output_bin_counts.numpy()
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index < 0:
            continue
        repetition, frequency, presence = (
            np.float32(table[index]) for table in (repetition_penalty, frequency_penalty, presence_penalty)
        )
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        last = int(logits_indices[row]) + 1
        drafts = ids[last - int(local_pos[row]) : last]
        count = counts[index] + np.bincount(drafts[(drafts >= 0) & (drafts < vocab)], minlength=vocab)
        words = np.ascontiguousarray(prompt_bin_mask.numpy()[index]).view(np.uint8)
        seen = (count > 0) | (np.unpackbits(words, count=vocab, bitorder="little") == 1)
        x = logits[row].numpy()
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
        x[count > 0] -= frequency * count[count > 0].astype(np.float32)
        x[count > 0] -= presence


@jit
def _quotient(x, y, inverse):
    """x / y rounded to nearest, for inverse = 1 / y rounded so; what the hardware's division does, without its branches
    for the quotients that it cannot do so: tiny, huge and infinite ones take its own, if a chunk has one."""
    q = x * inverse
    q = tl.fma(tl.fma(-q, y, x), inverse, q)
    q = tl.fma(tl.fma(-q, y, x), inverse, q)
    odd = (x > 0.0) & ((x < 1e-20) | (x > 1e20))
    far = tl.where((y < 1e-10) | (y > 1e10), 1, 0)
    if tl.max(tl.max(odd.to(tl.int32), axis=1), axis=0) + far > 0:
        q = tl.div_rn(x, y)
    return q


@jit
def apply_penalties_kernel(
    logits,
    stride,
    expanded_idx_mapping,
    local_pos,
    logits_indices,
    input_ids,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    prompt_bin_mask,
    words,
    output_bin_counts,
    vocab,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(expanded_idx_mapping + row).to(tl.int64)
    if index < 0:
        return
    repetition = tl.load(repetition_penalty + index)
    frequency = tl.load(frequency_penalty + index)
    presence = tl.load(presence_penalty + index)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    drafts = tl.load(local_pos + row)
    first = tl.load(logits_indices + row) - drafts + 1
    inverse = tl.div_rn(1.0, repetition)
    asked = tl.where(repetition != 1.0, words, 0)  # no other penalty is about the prompt
    for part in range(tl.program_id(1) * BLOCK, tl.minimum((tl.program_id(1) + 1) * BLOCK, vocab), CHUNK):
        word = part // 32 + tl.arange(0, CHUNK // 32)
        token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        inside = token < vocab
        count = tl.load(output_bin_counts + index * vocab + token, mask=inside, other=0)
        packed = tl.load(prompt_bin_mask + index * words + word, mask=word < asked, other=0)
        for i in range(drafts):
            count += (token == tl.load(input_ids + first + i)).to(tl.int32)
        in_prompt = ((packed[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 1
        seen = ((count > 0) | in_prompt) & inside
        at = logits + row * stride + token
        x = tl.load(at, mask=seen, other=0.0)
        x = tl.where(x > 0.0, _quotient(x, repetition, inverse), x * repetition)
        x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(at, x, mask=seen)


@op(spec=apply_penalties_spec, kernel=apply_penalties_kernel, writes=("logits",), numpy=False)
def apply_penalties(
    kernel,
    logits,
    expanded_idx_mapping,
    local_pos,
    logits_indices,
    input_ids,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    prompt_bin_mask,
    output_bin_counts,
):
    n, vocab = logits.shape
    if n:
        # Without fusion every operation rounds, as in the spec.
        kernel[(n, cdiv(vocab, BLOCK))](
            logits, logits.stride(0), expanded_idx_mapping, local_pos, logits_indices, input_ids, repetition_penalty,
            frequency_penalty, presence_penalty, prompt_bin_mask, prompt_bin_mask.shape[1], output_bin_counts, vocab,
            BLOCK=BLOCK, CHUNK=CHUNK, num_warps=1, maxnreg=64, enable_fp_fusion=False,
        )  # fmt: skip
