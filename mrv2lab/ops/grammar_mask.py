"""Make impossible what a grammar does not allow: raw logits of masked tokens become -inf, in place, before all stages.

Only what is masked is written, and no logit is read. Counterpart in vLLM: ``_apply_grammar_bitmask_kernel`` in
``v1/worker/gpu/structured_outputs.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


def grammar_mask_spec(logits: Any, bitmask: Any, mapping: Any) -> None:
    """logits [n, V] (any float type and row stride, columns adjacent): row mapping[i] gets -inf where the bit of
    bitmask row i is 0. bitmask int32[m, ceil(V / 32)], bit 0 of a word is its lowest token; mapping int32[m], distinct
    logits rows, < 0 = skip."""
    vocab = logits.shape[1]
    for words, row in zip(bitmask.numpy(), mapping.tolist(), strict=True):
        if row >= 0:
            bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), count=vocab, bitorder="little")
            logits[row, bits == 0] = float("-inf")


@jit
def grammar_mask_kernel(logits, stride, bitmask, mask_stride, mapping, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(mapping + i).to(tl.int64)
    if row < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmask + i * mask_stride + token // 32, mask=token < vocab, other=-1)
    forbidden = ((words >> (token % 32)) & 1) == 0
    tl.store(
        logits + row * stride + token,
        tl.full((BLOCK,), float("-inf"), logits.dtype.element_ty),
        mask=forbidden & (token < vocab),
    )


@op(spec=grammar_mask_spec, kernel=grammar_mask_kernel, writes=("logits",), numpy=False)
def grammar_mask(kernel, logits, bitmask, mapping):
    m, vocab = len(mapping), logits.shape[1]
    if m:
        kernel[(m, cdiv(vocab, 4096))](
            logits, logits.stride(0), bitmask, bitmask.stride(0), mapping, vocab, BLOCK=4096, num_warps=8
        )  # fmt: skip
