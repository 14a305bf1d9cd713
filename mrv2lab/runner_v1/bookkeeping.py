"""What V1's host writes down after sampling: tokens where it knows them, placeholders where it does not.

Counterpart in vLLM: ``GPUModelRunner._bookkeeping_sync`` in ``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch

PLACEHOLDER = -1
"""Stands for a token that is sampled and not known on the host."""


def bookkeep_sync(
    batch: InputBatch, requests: Mapping[str, CachedRequestState], req_ids: list[str], tokens: Sequence[list[int]]
) -> None:
    """Append each row's tokens (none where the row is discarded) to the token table and to its request."""
    table, lengths = batch.token_ids_cpu, batch.num_tokens_no_spec
    for row, new in enumerate(tokens):
        if new:
            start = lengths[row]
            end = start + len(new)
            table[row, start:end] = new
            lengths[row] = end
            requests[req_ids[row]].output_token_ids.extend(new)


def bookkeep_async(
    batch: InputBatch,
    requests: Mapping[str, CachedRequestState],
    req_ids: list[str],
    sampled: torch.Tensor,
    discarded: list[int],
) -> int:
    """Keep ``sampled`` int64[r, 1] on the device for the next step, remember whose rows they are, and write a
    placeholder for each; returns how many. Nobody waits.

    Discarded rows sampled garbage: they are left out of the map, so that nobody takes it.
    """
    skipped = set(discarded)
    batch.prev_sampled_token_ids = sampled
    batch.prev_req_id_to_index = rows = {req_id: row for row, req_id in enumerate(req_ids) if row not in skipped}
    table, lengths = batch.token_ids_cpu, batch.num_tokens_no_spec
    for req_id, row in rows.items():
        end = lengths[row]
        table[row, end] = PLACEHOLDER
        lengths[row] = end + 1
        requests[req_id].output_token_ids.append(PLACEHOLDER)
    return len(rows)


def repair_outputs(batch: InputBatch, sampled: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Put the previous step's tokens, ``sampled`` int64[r', 1] in that step's order and on the host by now, in place of
    the placeholders that end its requests' output ids; returns how many. A loop over the batch.

    Counterpart in vLLM: ``InputBatch.update_async_output_token_ids`` in ``v1/worker/gpu_input_batch.py``.
    """
    table, lengths = batch.token_ids_cpu, batch.num_tokens_no_spec
    repaired = 0
    for req_id, prev_row in (batch.prev_req_id_to_index or {}).items():
        row = batch.req_id_to_index.get(req_id)
        outputs = batch.req_output_token_ids[row] if row is not None else None
        if outputs and outputs[-1] == PLACEHOLDER:
            outputs[-1] = table[row, lengths[row] - 1] = int(sampled[prev_row, 0])
            repaired += 1
    return repaired
