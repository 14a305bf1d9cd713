"""What a padded step must find behind the batch. Each of these was a bug of vLLM's once (reference: #36580, #35431).

tokens [num_tokens:padded]    slot_mapping -1          else stale slots are overwritten with garbage
requests [num_reqs:padded]    seq_lens 0               else attention reads a finished request's keys
                              query_start_loc flat     else padding rows own tokens
                              block rows null (0)      else they point into somebody's blocks
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.base import Runtime

Ints = np.ndarray[Any, np.dtype[Any]]


def padding_faults(
    rt: Runtime,
    num_reqs: int,
    num_tokens: int,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> list[str]:
    """What is wrong with the tails of a padded step's inputs, one sentence each; [] if a replay is safe.

    query_start_loc int32[p + 1], seq_lens int32[p] and block_table int32[p, B] of p padded requests, slot_mapping
    int64[t] of t padded tokens, all on the device. For looking and tests: it waits for the device.
    """
    tensors = query_start_loc, seq_lens, block_table, slot_mapping
    return tail_faults(num_reqs, num_tokens, *(rt.read(tensor).numpy() for tensor in tensors))


def tail_faults(
    num_reqs: int, num_tokens: int, query_start_loc: Ints, seq_lens: Ints, block_table: Ints, slot_mapping: Ints
) -> list[str]:
    """:func:`padding_faults` of host arrays."""
    faults = []
    for what, values, used, good in (
        ("slot_mapping", slot_mapping, num_tokens, -1),
        ("seq_lens", seq_lens, num_reqs, 0),
        ("query_start_loc", query_start_loc, num_reqs, num_tokens),
    ):
        wrong = used + np.flatnonzero(values[used:] != good)
        if len(wrong):
            faults.append(f"{what}[{wrong[0]}] is {values[wrong[0]]}, but padding must hold {good}")
    rows = num_reqs + np.flatnonzero((block_table[num_reqs:] != 0).any(axis=1))
    if len(rows):
        blocks = [block for block in block_table[rows[0]].tolist() if block][:4]
        faults.append(f"row {rows[0]} of the block table holds blocks {blocks}, but padding must hold the null block 0")
    return faults
