"""Scheduling a step before the last one's tokens are known.

Counterpart in vLLM: ``v1/core/sched/async_scheduler.py``, AsyncScheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        spec: SpecConfig | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        super().__init__(config, cache, spec, windows)
        # One list for all: nobody writes to it.
        self._placeholder_drafts = [-1] * self.num_spec

    _promises = 1

    def _count_scheduled(self, scheduled: list[Request], output: SchedulerOutput) -> None:
        # One loop with what the synchronous scheduler counts, since this is a large part of a schedule.
        drafts = output.scheduled_draft_tokens
        for request, n in zip(scheduled, output.num_scheduled_tokens.values(), strict=True):
            request.num_computed_tokens = computed = request.num_computed_tokens + n
            request.num_in_flight_tokens += n
            placeholders = request.num_output_placeholders
            if computed < request.num_tokens + placeholders:
                request.is_prefill_chunk = True
                continue
            request.is_prefill_chunk = False
            # The step samples one token more than the drafts it accepts.
            request.num_output_placeholders = placeholders + 1 + (len(drafts.get(request.req_id, ())) if drafts else 0)
            request.spec_token_ids = self._placeholder_drafts

    def _on_rejected(self, request: Request, num_rejected: int) -> None:
        super()._on_rejected(request, num_rejected)
        request.num_output_placeholders -= num_rejected
