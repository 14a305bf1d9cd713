"""Repeat each request's state row once per logits row, so that sampling reads per-request tables in its kernels.

Without drafts every request has one logits row and the result is ``idx_mapping`` itself with zeros: skip the launch.
Counterpart in vLLM: ``expand_idx_mapping`` in ``v1/worker/gpu/input_batch.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit, op

tl: Any = None


# idx_mapping          [r] int32
# cu_num_logits        [r + 1] int32, from 0
# expanded_idx_mapping [n] int32, state row of each logits row (int64 in vLLM)
# expanded_local_pos   [n] int32, which of its request's logits rows it is, from 0
def expand_idx_mapping_spec(idx_mapping, cu_num_logits, expanded_idx_mapping, expanded_local_pos, num_reqs):
    for i in range(num_reqs):
        start, end = cu_num_logits[i], cu_num_logits[i + 1]
        expanded_idx_mapping[start:end] = idx_mapping[i]
        expanded_local_pos[start:end] = np.arange(end - start)


@jit
def expand_idx_mapping_kernel(
    idx_mapping, cu_num_logits, expanded_idx_mapping, expanded_local_pos, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    row = tl.load(idx_mapping + i)
    start = tl.load(cu_num_logits + i)
    length = tl.load(cu_num_logits + i + 1) - start
    for first in range(0, length, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        mask = offset < length
        tl.store(expanded_idx_mapping + start + offset, tl.zeros((BLOCK,), tl.int32) + row, mask=mask)
        tl.store(expanded_local_pos + start + offset, offset, mask=mask)


@op(
    spec=expand_idx_mapping_spec,
    kernel=expand_idx_mapping_kernel,
    writes=("expanded_idx_mapping", "expanded_local_pos"),
)
def expand_idx_mapping(kernel, idx_mapping, cu_num_logits, expanded_idx_mapping, expanded_local_pos, num_reqs):
    """Row and local position of every logits row."""
    kernel[(num_reqs,)](idx_mapping, cu_num_logits, expanded_idx_mapping, expanded_local_pos, BLOCK=32)
