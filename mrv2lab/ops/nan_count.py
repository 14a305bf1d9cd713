"""How many logits of each row are NaN, on the raw logits. Counterpart in vLLM: ``v1/worker/gpu/metrics/logits.py``.

One program a row: at 256 rows that fills an H200, no partial sums are stored, and nothing has to be zeroed before.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, op

tl: Any = None


def nan_count_spec(out: Any, logits: Any, expanded_idx_mapping: Any) -> None:
    """Write out int32[n] from logits [n, V] of any float type and row stride, columns adjacent. Padding rows
    (expanded_idx_mapping int32[n] < 0) read no logits and write 0."""
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        out[row] = int(logits[row].isnan().sum()) if index >= 0 else 0


@jit
def nan_count_kernel(out, logits, stride, expanded_idx_mapping, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count = tl.zeros((BLOCK,), tl.int32)
    if tl.load(expanded_idx_mapping + row) >= 0:
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + token, mask=token < vocab, other=0.0).to(tl.float32)
            count += (x != x).to(tl.int32)
    tl.store(out + row, tl.sum(count, axis=0))


@op(spec=nan_count_spec, kernel=nan_count_kernel, writes=("out",), numpy=False)
def nan_count(kernel, out, logits, expanded_idx_mapping):
    n, vocab = logits.shape
    if n:
        kernel[(n,)](out, logits, logits.stride(0), expanded_idx_mapping, vocab, BLOCK=4096, num_warps=8)
