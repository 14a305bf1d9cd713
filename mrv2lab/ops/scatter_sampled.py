"""Fill V1's holes: input ids that the host wrote as -1, since the previous step's tokens were still on the device.

Counterpart in vLLM: the ``scatter_`` in ``GPUModelRunner._prepare_input_ids`` (``v1/worker/gpu_model_runner.py``).
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# token_indices [>= count] int64, which of this step's tokens
# prev_rows     [>= count] int64, row of the previous step's batch
# prev_sampled  [r', 1] int64
# input_ids     [T] int32
def scatter_sampled_spec(token_indices, prev_rows, prev_sampled, input_ids, count):
    input_ids[token_indices[:count]] = prev_sampled[prev_rows[:count], 0]


@jit(do_not_specialize=["count"])
def scatter_sampled_kernel(token_indices, prev_rows, prev_sampled, stride, input_ids, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    row = tl.load(prev_rows + i, mask=mask, other=0)
    token = tl.load(prev_sampled + row * stride, mask=mask, other=0)
    tl.store(input_ids + tl.load(token_indices + i, mask=mask, other=0), token.to(tl.int32), mask=mask)


@op(spec=scatter_sampled_spec, kernel=scatter_sampled_kernel, writes=("input_ids",))
def scatter_sampled(kernel, token_indices, prev_rows, prev_sampled, input_ids, count):
    """``input_ids[token_indices[i]] = prev_sampled[prev_rows[i], 0]`` for the first ``count`` pairs."""
    kernel[(cdiv(count, 128),)](
        token_indices, prev_rows, prev_sampled, prev_sampled.stride(0), input_ids, count, BLOCK=128
    )
