"""From the one neutral schedule to each runner's message."""

from __future__ import annotations

from mrv2lab.protocol import MRV2SchedulerOutput, SchedulerOutput


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
