"""Raw logits into the float32 buffer that the sampler's stages edit, NaN as -inf. Counterpart in vLLM:
``v1/worker/gpu/sample/sampler.py`` (a ``torch.empty_like(logits, dtype=float32).copy_(logits)``).

The raw logits stay as they are, for log-probabilities of raw logits. No stage behind this one meets a NaN of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


def cast_logits_spec(out: Any, logits: Any, expanded_idx_mapping: Any) -> None:
    """Write out float32[n, V] from logits [n, V], each of any row stride with adjacent columns, logits of any float
    type. Padding rows (expanded_idx_mapping int32[n] < 0) stay as they are."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index >= 0:
            x = logits[row].float().numpy()
            out[row].numpy()[:] = np.where(np.isnan(x), np.float32("-inf"), x)


@jit
def cast_logits_kernel(out, out_stride, logits, stride, expanded_idx_mapping, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(expanded_idx_mapping + row) < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + token, tl.where(x == x, x, float("-inf")), mask=token < vocab)


@op(spec=cast_logits_spec, kernel=cast_logits_kernel, writes=("out",), numpy=False)
def cast_logits(kernel, out, logits, expanded_idx_mapping):
    n, vocab = logits.shape
    if n:
        kernel[(n, cdiv(vocab, 4096))](
            out, out.stride(0), logits, logits.stride(0), expanded_idx_mapping, vocab, BLOCK=4096, num_warps=8
        )  # fmt: skip
