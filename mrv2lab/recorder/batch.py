"""The make-up of a scheduled batch. Counterpart in vLLM: ``v1/utils.py``, compute_iteration_details."""

from __future__ import annotations

import numpy as np

from mrv2lab.protocol import SchedulerOutput
from mrv2lab.trace.annotations import Batch


def batch_of(schedule: SchedulerOutput) -> Batch:
    """Requests and tokens of ``schedule`` in prefill (context) and in decode (generation).

    As in vLLM a request is in prefill until it has an output, which under asynchronous scheduling may be one that is
    still to come. What is computed again after a preemption is prefill too: there a request gets more tokens than its
    next one and its drafts. Of that the last chunk looks like decode if it is one token, and is the same work.
    """
    continued, scheduled = schedule.continued, schedule.num_scheduled_tokens
    count = len(continued.req_ids)
    tokens = np.fromiter(map(scheduled.__getitem__, continued.req_ids), np.int64, count)
    most = np.ones(count, np.int64)
    if drafts := schedule.scheduled_draft_tokens:
        most += np.fromiter((len(drafts.get(req_id, ())) for req_id in continued.req_ids), np.int64, count)
    decode = (continued.num_output_tokens > 0) & (tokens <= most)
    requests, of_decode = int(decode.sum()), int(tokens[decode].sum())
    return Batch(len(scheduled) - requests, schedule.total_num_scheduled_tokens - of_decode, requests, of_decode)
