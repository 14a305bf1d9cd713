"""From the one neutral schedule to each runner's message."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mrv2lab.engine.request import Request
from mrv2lab.protocol import MRV2SchedulerOutput, SchedulerOutput, V1CachedData, V1SchedulerOutput


def project_mrv2(output: SchedulerOutput) -> MRV2SchedulerOutput:
    """MRV2's message: it keeps no copy of a request without a row, so a resumed request is new to it (its prefill is
    prompt + outputs) and a preempted one is removed exactly like a finished one.

    The runner removes (``removed_req_ids``) before it adds. Then an id may be in both: finished and submitted
    again, or preempted and resumed, between two schedules. Containers are shared with ``output``, not copied.

    Counterpart in vLLM: ``v1/core/sched/scheduler.py`` where it knows that a V2 runner is behind it.
    """
    return MRV2SchedulerOutput(
        step=output.step,
        new_reqs=output.new + output.resumed,
        cached_reqs=output.continued,
        finished_req_ids=output.finished,
        preempted_req_ids=output.preempted,
        num_scheduled_tokens=output.num_scheduled_tokens,
        scheduled_draft_tokens=output.scheduled_draft_tokens,
        total_num_scheduled_tokens=output.total_num_scheduled_tokens,
    )


class V1Projection:
    """V1's message, schedule after schedule: a resumed request is cached, since the worker remembers it, and the token
    list of a request is sent again where the previous schedule left it out.

    ``requests`` is the scheduler's table, read while the schedule is fresh. Each schedule must pass once, in order.
    Counterpart in vLLM: ``Scheduler._make_cached_request_data`` in ``v1/core/sched/scheduler.py``.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._previous: set[str] = set()
        """Who was in the previous schedule."""

    def __call__(self, output: SchedulerOutput) -> V1SchedulerOutput:
        """The message of the next schedule. Containers are shared with ``output`` where it has them already."""
        return V1SchedulerOutput(
            step=output.step,
            new_reqs=output.new,
            cached_reqs=self._cached(output),
            finished_req_ids=output.finished,
            num_scheduled_tokens=output.num_scheduled_tokens,
            scheduled_draft_tokens=output.scheduled_draft_tokens,
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
        )

    def _cached(self, output: SchedulerOutput) -> V1CachedData:
        continued, resumed = output.continued, output.resumed
        # A preempted request left the batch, even if it is resumed in the very next schedule.
        back = set(continued.req_ids) - self._previous
        self._previous = set(output.num_scheduled_tokens)
        tokens = {req_id: list(self._requests[req_id].all_token_ids) for req_id in back}
        if not resumed:
            return V1CachedData(
                continued.req_ids,
                set(),
                continued.new_block_ids,
                continued.num_computed_tokens,
                continued.num_output_tokens,
                tokens,
            )
        ids = [data.req_id for data in resumed]
        computed = np.array([data.num_computed_tokens for data in resumed], np.int32)
        outputs = np.array([len(data.all_token_ids) - data.prompt_len for data in resumed], np.int32)
        return V1CachedData(
            continued.req_ids + ids,
            set(ids),
            continued.new_block_ids | {data.req_id: data.block_ids for data in resumed},
            np.concatenate([continued.num_computed_tokens, computed]),
            np.concatenate([continued.num_output_tokens, outputs]),
            tokens | {data.req_id: data.all_token_ids for data in resumed},
        )
