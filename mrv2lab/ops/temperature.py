"""Divide logits by their request's temperature, in place, for stages that need scaled logits (min-p, top-k, top-p).

Counterpart in vLLM: ``v1/worker/gpu/sample/gumbel.py``, ``apply_temperature``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


def apply_temperature_spec(logits: Any, expanded_idx_mapping: Any, temperature: Any) -> None:
    """logits [n, V] (any float type and row stride, columns adjacent) /= temperature float32[R] read through
    expanded_idx_mapping int32[n]. The quotient is correctly rounded float32, then rounded to the logits' type. Rows of
    temperature 0 (greedy) or 1 and padding rows (index < 0) stay as they are."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        t = temperature[index]
        if index >= 0 and t != 0 and t != 1:
            logits[row] = logits[row].float() / t


@jit
def apply_temperature_kernel(logits, stride, expanded_idx_mapping, temperature, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(expanded_idx_mapping + row)
    if index < 0:
        return
    t = tl.load(temperature + index)
    if (t == 0.0) | (t == 1.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + token, mask=token < vocab).to(tl.float32)
    tl.store(logits + row * stride + token, tl.div_rn(x, t).to(logits.dtype.element_ty), mask=token < vocab)


@op(spec=apply_temperature_spec, kernel=apply_temperature_kernel, writes=("logits",), numpy=False)
def apply_temperature(kernel, logits, expanded_idx_mapping, temperature):
    n, vocab = logits.shape
    if n:
        kernel[(n, cdiv(vocab, 2048))](
            logits, logits.stride(0), expanded_idx_mapping, temperature, vocab, BLOCK=2048
        )  # fmt: skip
