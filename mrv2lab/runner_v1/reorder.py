"""Row order as a backend demands it, reached by swapping rows of the persistent batch.

V1's batch keeps its order from step to step. Some attention backends want decodes in front (in vLLM those that declare
``reorder_batch_threshold``: MLA, FlashInfer; FlashAttention and Triton do not). Counterpart in vLLM:
``reorder_batch_to_split_decodes_and_prefills`` in ``v1/attention/backends/utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mrv2lab.runner_v1.persistent_batch import InputBatch

Ints = np.ndarray[Any, np.dtype[Any]]

ReorderDemand = int | Literal["mrv2"] | None
"""A ``reorder_batch_threshold``, MRV2's sort key, or no demand (flash and triton backends)."""

DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL = range(4)
"""The regions, in batch order."""


def reorder_batch(
    batch: InputBatch,
    demand: ReorderDemand,
    num_scheduled_tokens: Mapping[str, int],
    scheduled_draft_tokens: Mapping[str, list[int]],
    decode_query_len: int = 1,
) -> int:
    """Bring ``batch``, dense and holding exactly the scheduled requests, into the order demanded; returns the swaps.

    Raises ``ValueError`` for a demand it does not know, ``RuntimeError`` for a batch that is not the schedule's.
    """
    if demand is None:
        return 0
    if demand != "mrv2" and (type(demand) is not int or demand < 1):
        raise ValueError(f'the reorder demand must be None, a threshold >= 1 or "mrv2", got {demand!r}')
    count = batch.num_reqs
    if len(batch.req_ids) != count:
        raise RuntimeError(f"the batch has {len(batch.req_ids) - count} holes: condense before reordering")
    if len(num_scheduled_tokens) != count:
        raise RuntimeError(
            f"the batch has {count} requests but {len(num_scheduled_tokens)} are scheduled: "
            "remove the unscheduled and add the scheduled ones before reordering"
        )
    if demand == "mrv2":
        ids = list(num_scheduled_tokens)
        return reorder_as_mrv2(
            batch,
            np.fromiter(map(batch.req_id_to_index.__getitem__, ids), np.int32, count),
            np.fromiter(num_scheduled_tokens.values(), np.int32, count),
            np.fromiter((len(scheduled_draft_tokens.get(req_id, ())) for req_id in ids), np.int32, count),
            decode_query_len,
        )
    tokens = np.fromiter(map(num_scheduled_tokens.__getitem__, batch.req_ids), np.int32, count)
    return reorder_decodes_first(batch, tokens, demand)


def regions(num_scheduled: Ints, num_computed: Ints, num_prompt: Ints, threshold: int) -> Ints:
    """The region of each row, int64[r]: decode (at most ``threshold`` tokens, prompt done), short extend (at most
    ``threshold``, prompt begun), long extend (more than that, something computed), prefill (nothing computed)."""
    short = num_scheduled <= threshold
    return np.where(
        num_computed == 0,
        PREFILL,
        np.where(short, np.where(num_computed >= num_prompt, DECODE, SHORT_EXTEND), LONG_EXTEND),
    )


def reorder_decodes_first(batch: InputBatch, num_scheduled_tokens: Ints, threshold: int) -> int:
    """Sort the rows into the four regions; returns the number of swaps.

    ``num_scheduled_tokens`` int32[r] is in batch order as it stands. Rows that are in their region stay where they are;
    the others change places along cycles, a cycle of n rows costing n - 1 swaps. As in vLLM, the cycles come from a
    stable sort of the misplaced rows; another choice among equals can need fewer.
    """
    count = batch.num_reqs
    region = regions(
        num_scheduled_tokens, batch.num_computed_tokens.np[:count], batch.num_prompt_tokens[:count], threshold
    )
    misplaced = np.flatnonzero(region != np.sort(region))
    if not misplaced.size:
        return 0
    order = np.arange(count)
    order[misplaced] = misplaced[np.argsort(region[misplaced], kind="stable")]
    return permute(batch, order)


def reorder_as_mrv2(
    batch: InputBatch, rows: Ints, num_scheduled_tokens: Ints, num_draft_tokens: Ints, decode_query_len: int = 1
) -> int:
    """Bring the rows into MRV2's batch order, so that both runners form the same batch; returns the number of swaps.

    The arrays, int32[r], are in the scheduler's order; ``rows`` are the requests' rows. Ascending by (has no drafts,
    num_tokens != decode_query_len, num_tokens); ties keep the scheduler's order. No backend of vLLM's V1 asks for this:
    it is the order of ``prepare_inputs`` in ``v1/worker/gpu/model_runner.py``.
    """
    key = (num_scheduled_tokens, num_scheduled_tokens != decode_query_len, num_draft_tokens == 0)
    return permute(batch, rows[np.lexsort(key)])


def permute(batch: InputBatch, order: Ints) -> int:
    """Put the request of row ``order[i]`` into row ``i``, for all i; returns the number of swaps.

    ``order`` int[r] is a permutation of the rows. The fewest swaps that do it: r minus the number of its cycles.
    """
    source = order.tolist()
    swaps = 0
    for first in np.flatnonzero(order != np.arange(len(source))).tolist():
        row = first
        # What stood in `first` is carried along the cycle until the row that wants it.
        while source[row] not in (first, row):
            wanted = source[row]
            batch.swap_states(row, wanted)
            swaps += 1
            source[row] = row
            row = wanted
        source[row] = row
    return swaps
