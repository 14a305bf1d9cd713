"""What of each recorded step was prefill: a recording says whether anything was, and where each request began."""

from __future__ import annotations

from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import StepRecord
from mrv2lab.trace.annotations import Batch


def recorded_batches(recording: Recording) -> list[Batch | None]:
    """The batch of each step, in their order; None: the recording begins behind the request's own beginning.

    A request is in prefill until what was known of it when it got its row (its prompt; after a preemption its outputs
    too) is computed. Counted from ``new`` and from keyframes, so that drafts that were rejected do not matter.
    """
    left: dict[str, int] = {}
    """Tokens of a request that are still to be prefilled; none and less: it decodes."""
    found: list[Batch | None] = []
    for step in recording.steps:
        _learn(step, left)
        found.append(_batch(step, left))
        for req_id, tokens in zip(step.req_ids, step.num_scheduled.tolist(), strict=True):
            if req_id in left:
                left[req_id] -= tokens
    return found


def _learn(step: StepRecord, left: dict[str, int]) -> None:
    tables = step.keyframe or {}
    if "prefill_len" in tables and "num_computed_tokens" in tables:
        prefill, computed = tables["prefill_len"].reshape(-1), tables["num_computed_tokens"].reshape(-1)
        left |= {req_id: int(prefill[row]) - int(computed[row]) for req_id, row in step.owners.items()}
    left |= {request.req_id: request.prefill_len - request.num_computed_tokens for request in step.new}


def _batch(step: StepRecord, left: dict[str, int]) -> Batch | None:
    counts = step.num_scheduled.tolist()
    if not step.has_prefill:
        return Batch(0, 0, len(counts), sum(counts))
    if len(counts) == 1:
        return Batch(1, sum(counts), 0, 0)
    if any(req_id not in left for req_id in step.req_ids):
        return None
    context = [tokens for req_id, tokens in zip(step.req_ids, counts, strict=True) if left[req_id] > 0]
    return Batch(len(context), sum(context), len(counts) - len(context), sum(counts) - sum(context))
