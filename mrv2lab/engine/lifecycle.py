"""Which requests there are, and how they come, go and lose their blocks.

Counterpart in vLLM: ``v1/core/sched/scheduler.py``, Scheduler (add_request, finish_requests, _preempt_request).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mrv2lab.config import CacheConfig, SchedulerConfig, SpecConfig
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.records import Decision, RequestUpdate, SchedulerStats
from mrv2lab.engine.request import FinishReason, Request, RequestStatus
from mrv2lab.engine.request_queue import make_queue
from mrv2lab.engine.steady import SteadyBatch


class RequestLifecycle:
    """The waiting and the running requests over one pool of KV blocks; :class:`Scheduler` gives them tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        spec: SpecConfig | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """``windows``: how far the attention of each KV-cache group reaches."""
        self.config = config
        self.num_spec = (spec or SpecConfig()).num_speculative_tokens
        promised = (1 + self.num_spec) * config.max_concurrent_steps
        self.kv = KVCacheManager(
            cache, config.max_model_len, windows, config.max_num_batched_tokens + self.num_spec + promised
        )
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(config.policy)
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self.decisions: list[Decision] = []
        """Why the last ``schedule()`` did what it did; empty in a steady state."""
        self.step = 0
        self._arrivals = 0
        # Both are handed over to the next output and re-bound, never cleared: the output owns them from then on.
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        # (step, its requests in the order of num_scheduled_tokens). Objects, not ids: an id may finish and be
        # submitted again while a step of its first life is in flight.
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._previous: list[Request] = []
        """Who was in the latest schedule, but for those of ``_steady``."""
        self._steady: SteadyBatch | None = None
        """While it is here, all its requests run, and nobody else does."""

    def add_request(self, request: Request) -> None:
        """Let ``request`` wait for its turn.

        Raises ``ValueError`` for an id in use, for prompt + max_tokens over max_model_len, and for a request that the
        KV pool could never hold.
        """
        req_id, total = request.req_id, request.max_total_tokens
        if req_id in self.requests:
            raise ValueError(f"request id {req_id!r} is in use; ids may be used again once they finished")
        if total > self.config.max_model_len:
            raise ValueError(
                f"request {req_id!r}: prompt of {request.num_prompt_tokens} + max_tokens "
                f"{request.sampling.max_tokens} = {total} exceeds max_model_len {self.config.max_model_len}; "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        # The last token is never computed. Drafts: those optimistically in flight, those to verify, and lookahead.
        most = min(total - 1 + self.num_spec * (1 + self.config.max_concurrent_steps), self.config.max_model_len)
        if not self.kv.can_ever_fit(most):
            raise ValueError(
                f"request {req_id!r} may need {most} KV slots, the pool has "
                f"{self.kv.longest_fit}; "
                "lower max_tokens or raise CacheConfig.num_blocks"
            )
        request.arrival_order = self._arrivals
        self._arrivals += 1
        self.requests[req_id] = request
        self.waiting.add(request)

    def abort(self, req_id: str) -> RequestUpdate:
        """End a request in any state; output of it that is in flight will be ignored.

        Raises ``ValueError`` for an id that is unknown or finished already.
        """
        if req_id not in self.requests:
            raise ValueError(f"cannot abort {req_id!r}: no unfinished request has this id")
        self.finish(req_id, "abort")
        return RequestUpdate(req_id, [], "abort")

    def finish(self, req_id: str, reason: FinishReason) -> None:
        """End a request between two schedules for a reason that the scheduler cannot see: a stop string in its text,
        say. What is in flight of it is wasted, and counted. No effect on one that has ended."""
        request = self.requests.get(req_id)
        if request is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self._finish(request, reason)

    def preempt(self, req_id: str) -> None:
        """Take a running request's blocks away now, as a dry pool would: for lessons and tests.

        Raises ``ValueError`` if it is not running.
        """
        request = self.requests.get(req_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            raise ValueError(f"cannot preempt {req_id!r}: it is not running")
        self.running.remove(request)
        self._preempt(request)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached KV. False, and nothing forgotten, while requests hold blocks, unless they are preempted."""
        if preempt_running:
            while self.running:
                self._preempt(self.running.pop())
        return self.kv.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        """Whether any request waits, runs or is preempted."""
        return bool(self.requests)

    def has_work(self) -> bool:
        """Whether ``schedule()`` has something to say: requests, or ends that the runner must still hear of."""
        return bool(self.requests or self._finished or self._preempted)

    @property
    def num_steps_in_flight(self) -> int:
        """Schedules whose output was not processed yet."""
        return len(self._in_flight)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Everything but the place in ``running``."""
        self._end_steady()
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)
        request.finish(reason)
        self.kv.free(request)
        del self.requests[request.req_id]
        self._finished.add(request.req_id)

    def _preempt(self, request: Request) -> None:
        """Everything but the place in ``running``."""
        self._end_steady()
        # A victim that had a place in this step published blocks which nobody will write now.
        self.kv.free(request, num_valid_tokens=request.num_computed_tokens)
        request.preempted()
        self.stats.num_preemptions += 1
        self._preempted.add(request.req_id)
        self.waiting.requeue(request)

    def _end_steady(self) -> None:
        if self._steady is not None:
            self._steady.end()
            self._steady = None

    def _decide(self, kind: str, request: Request, needed: int, free: int) -> None:
        self.decisions.append(Decision(kind, request.req_id, needed, free))
