"""Positions of this step's tokens and sequence lengths of its requests, from the exact counters on the device.

``seq_lens`` counts the context with this step's tokens, drafts that will be rejected included. Its tail up to R is
zeroed: a full CUDA graph reads padded requests and must find them empty. A request with a negative row, as a dummy
run's are, starts at position 0. Counterpart in vLLM: ``prepare_pos_seq_lens`` in ``v1/worker/gpu/input_batch.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit, op

tl: Any = None


# idx_mapping         [r] int32, < 0 = nobody's: nothing is computed yet
# query_start_loc     [>= r + 1] int32
# num_computed_tokens [R] int32
# positions           [T] int64
# seq_lens            [R] int32
def pos_seq_lens_spec(idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens, num_reqs):
    for i in range(num_reqs):
        start, end = query_start_loc[i], query_start_loc[i + 1]
        done = num_computed_tokens[idx_mapping[i]] if idx_mapping[i] >= 0 else 0
        seq_lens[i] = done + end - start
        positions[start:end] = np.arange(done, done + end - start)
    seq_lens[num_reqs:] = 0


@jit
def pos_seq_lens_kernel(
    idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens, max_num_reqs, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    num_reqs = tl.num_programs(0) - 1
    if i == num_reqs:
        for first in range(num_reqs, max_num_reqs, BLOCK):
            tail = first + tl.arange(0, BLOCK)
            tl.store(seq_lens + tail, tl.zeros((BLOCK,), tl.int32), mask=tail < max_num_reqs)
        return
    row = tl.load(idx_mapping + i)
    done = tl.load(num_computed_tokens + row, mask=row >= 0, other=0)
    start = tl.load(query_start_loc + i)
    length = tl.load(query_start_loc + i + 1) - start
    tl.store(seq_lens + i, done + length)
    for first in range(0, length, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        tl.store(positions + start + offset, (done + offset).to(tl.int64), mask=offset < length)


@op(spec=pos_seq_lens_spec, kernel=pos_seq_lens_kernel, writes=("positions", "seq_lens"))
def pos_seq_lens(kernel, idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens, num_reqs):
    """Fill ``positions`` for this step's tokens and all of ``seq_lens``."""
    kernel[(num_reqs + 1,)](
        idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens, seq_lens.shape[0], BLOCK=1024
    )
