"""Dummy runs: a batch of nobody's requests through the same ``execute_model``. Counterpart in vLLM: ``_dummy_run``.

Their rows are -1. Every kernel skips such a row, or takes it for one that has computed nothing: no slot of the KV cache
is written (slots are -1), every block-table row is the null block, and no table changes. So a dummy run may come at any
time between steps, whoever is in the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrv2lab.observer import NULL_OBSERVER
from mrv2lab.protocol import ContinuedData, MRV2SchedulerOutput
from mrv2lab.runtime.base import Runtime
from mrv2lab.state.input_batch import HostBatch

if TYPE_CHECKING:
    from mrv2lab.runner.model_runner import ModelRunner

NOBODY = -1
"""The row of a request that is nobody's."""


def empty_message(step: int = -1, num_tokens: int = 0) -> MRV2SchedulerOutput:
    """A scheduler's message that adds, continues and removes nobody, for a step of ``num_tokens``."""
    return MRV2SchedulerOutput(step, [], ContinuedData(), set(), set(), {}, {}, num_tokens)


def fabricate(
    num_tokens: int, num_reqs: int, *, max_num_reqs: int, max_model_len: int, context: int | None = None
) -> HostBatch:
    """``num_reqs`` requests of nobody that share ``num_tokens`` as evenly as can be, fewer tokens first.

    ``context`` is the host's upper bound of their lengths, which backends may choose kernels by; None = their tokens.
    On the device their lengths are their tokens either way. Raises ``ValueError`` for a batch that no step can have.
    """
    if not 0 < num_reqs <= min(max_num_reqs, num_tokens):
        raise ValueError(
            f"a dummy run of {num_tokens} tokens needs 1 to {min(max_num_reqs, num_tokens)} requests, got {num_reqs}"
        )
    if -(-num_tokens // num_reqs) > max_model_len:
        raise ValueError(
            f"{num_tokens} tokens in {num_reqs} requests are more than max_model_len = {max_model_len} in one; spread "
            f"them over {-(-num_tokens // max_model_len)} requests"
        )
    shared, more = divmod(num_tokens, num_reqs)
    counts = np.full(num_reqs, shared, np.int32)
    counts[num_reqs - more :] += 1
    query_start_loc = np.full(max_num_reqs + 1, num_tokens, np.int32)
    query_start_loc[0] = 0
    np.cumsum(counts, out=query_start_loc[1 : num_reqs + 1])
    return HostBatch(
        req_ids=[f"dummy.{i}" for i in range(num_reqs)],
        rows=np.full(num_reqs, NOBODY, np.int32),
        num_scheduled_tokens=counts,
        num_draft_tokens=np.zeros(num_reqs, np.int32),
        query_start_loc=query_start_loc,
        seq_lens_upper_bound=counts if context is None else np.maximum(counts, np.int32(min(context, max_model_len))),
        num_tokens=num_tokens,
        num_logits=num_reqs,
        has_prefill=bool(counts[-1] > 1),
    )


def dummy_run(runner: ModelRunner, num_tokens: int, num_reqs: int | None = None, *, context: int | None = None) -> None:
    """Queue the forward pass of ``num_tokens`` tokens of nobody; nothing is sampled.

    ``num_reqs`` None = as few requests as ``max_model_len`` allows. Raises ``RuntimeError`` between ``execute_model``
    and ``sample_tokens``, and ``ValueError`` for a batch that no step can have.
    """
    states, most = runner.req_states, len(runner.buffers.positions)
    if not 0 < num_tokens <= most:
        raise ValueError(f"a dummy run takes 1 to max_num_batched_tokens = {most} tokens, got {num_tokens}")
    if num_reqs is None:
        num_reqs = -(-num_tokens // states.max_model_len)
    host = fabricate(
        num_tokens,
        num_reqs,
        max_num_reqs=states.max_num_reqs,
        max_model_len=states.max_model_len,
        context=context,
    )
    before = runner.batch, runner.forward_inputs
    with unobserved(runner.rt), torch.inference_mode(), runner.rt.active():
        runner.execute_model(empty_message(num_tokens=num_tokens), host)
        runner.forget_forward()
        runner.rt.end_step()
    runner.batch, runner.forward_inputs = before


@contextmanager
def unobserved(rt: Runtime) -> Iterator[None]:
    """Inside the ``with`` nobody is told of what ``rt`` does: it is no step of the engine's."""
    observer, rt.observer = rt.observer, NULL_OBSERVER
    try:
        yield
    finally:
        rt.observer = observer
