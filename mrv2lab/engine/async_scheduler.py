"""Scheduling a step before the last one's tokens are known.

Counterpart in vLLM: ``v1/core/sched/async_scheduler.py``, AsyncScheduler.
"""

from __future__ import annotations

from mrv2lab.config import CacheConfig, SchedulerConfig, SpecConfig
from mrv2lab.engine.request import Request
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.protocol import SchedulerOutput


class AsyncScheduler(Scheduler):
    """Counts a token as known once a step promises it: a *placeholder*, taken back when the token arrives.

    So the next ``schedule()`` sees one more token to compute and schedules it without knowing it. A request that ends
    by a stop token in step N is still in step N + 1, whose row is wasted; a length stop is foreseen (the rule in
    ``schedule()`` that fires only where there are placeholders). Drafts stay on the device: -1 stands for each.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, spec: SpecConfig | None = None, num_groups: int = 1
    ) -> None:
        super().__init__(config, cache, spec, num_groups)
        # One list for all: nobody writes to it.
        self._placeholder_drafts = [-1] * self.num_spec

    def _update_after_schedule(self, scheduled: list[Request], output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduled, output)
        drafts = output.scheduled_draft_tokens
        for request in scheduled:
            if not request.is_prefill_chunk:
                # The step samples one token more than the drafts it accepts.
                request.num_output_placeholders += 1 + (len(drafts.get(request.req_id, ())) if drafts else 0)
                request.spec_token_ids = self._placeholder_drafts

    def _on_rejected(self, request: Request, num_rejected: int) -> None:
        super()._on_rejected(request, num_rejected)
        request.num_output_placeholders -= num_rejected

    def _on_output(self, request: Request, num_tokens: int) -> None:
        request.num_output_placeholders -= num_tokens
