"""Who computes how many tokens in the next step.

Token-centric: every request has a computed count chasing a known count, so prefill chunks, decodes and drafts to verify
are one rule. ``schedule()`` promises, ``update_from_output()`` settles; between the two a step is in flight. A step's
outputs must be settled in the order of the schedules.

Counterpart in vLLM: ``v1/core/sched/scheduler.py``, Scheduler (schedule, update_from_output).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrv2lab.engine.lifecycle import RequestLifecycle
from mrv2lab.engine.records import RequestUpdate, StepDraft
from mrv2lab.engine.request import FinishReason, Request, RequestStatus
from mrv2lab.engine.request_queue import priority_key
from mrv2lab.engine.steady import SteadyBatch
from mrv2lab.protocol import BlockIds, ContinuedData, ModelRunnerOutput, RequestData, SchedulerOutput


class Scheduler(RequestLifecycle):
    """The synchronous scheduler: a step's tokens are known before the next schedule.

    Requests are admitted first come, first served, or by priority (never by preempting a running one); a dry pool
    preempts the last (or the lowest) running request, which is computed again from the start. The rules for one request
    are here, without a call per request in a decode; ``steady.py`` has what they come to for a batch that lasts.
    """

    def update_draft_token_ids(self, drafts: Mapping[str, list[int]]) -> None:
        """Synchronous loop: what the drafter proposed after the last step, to be verified in the next."""
        for req_id, tokens in drafts.items():
            request = self.requests.get(req_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                request.spec_token_ids = [] if request.is_prefill_chunk else tokens[: self.num_spec]

    _promises = 0
    """Placeholders that a schedule counts for each token to come, taken back when it comes."""

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Put the next step together: running requests first, in order, then waiting ones if nothing was preempted."""
        self.decisions = []
        step = StepDraft(self.config.max_num_batched_tokens)
        told = self._schedule_steady(step)
        if told is None:
            self._schedule_running(step)
        admitted: list[Request] = []
        if step.preempted:
            if self.waiting:
                self._decide("after_preemption", self.waiting.peek(), 0, self.kv.num_free_blocks)
        elif self.waiting and step.budget > 0:
            if told is not None:
                step.num_scheduled = step.num_scheduled.copy()
            admitted = self._schedule_waiting(step)

        continued, num_scheduled = step.continued, step.num_scheduled
        output = SchedulerOutput(
            step=self.step,
            new=step.new,
            continued=told if told is not None else _told(step),
            resumed=step.resumed,
            finished=self._finished,
            preempted=self._preempted,
            unscheduled={r.req_id for r in self.running if r.req_id not in num_scheduled}
            if len(num_scheduled) < len(self.running)
            else set(),
            num_scheduled_tokens=num_scheduled,
            scheduled_draft_tokens=step.drafts,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - step.budget,
        )
        self._update_after_schedule(continued + admitted if admitted else continued, output)
        return output

    def _schedule_steady(self, step: StepDraft) -> ContinuedData | None:
        """What :meth:`_schedule_running` comes to for a batch that stays as it is; None if it must be asked."""
        steady = self._steady
        if steady is None:
            return None
        told = None
        lasts = len(steady.requests) == len(self.running) <= step.budget
        # Synchronous: nobody wants another token before the last one is known. Asynchronous: the last one is not known.
        if lasts and bool(self._in_flight) == bool(self._promises):
            told = steady.schedule()
        if told is None:
            self._end_steady()
            return None
        step.num_scheduled = steady.one_each
        step.continued = steady.requests
        step.budget -= len(steady.requests)
        return told

    def _schedule_running(self, step: StepDraft) -> None:
        num_spec, last_position = self.num_spec, self.config.max_model_len - 1
        num_scheduled, continued = step.num_scheduled, step.continued
        cap = self._chunk_cap()
        budget = step.budget  # written back where somebody else reads it
        for request in tuple(self.running):
            if budget <= 0:
                break
            if step.preempted and request.status is not RequestStatus.RUNNING:
                continue
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if placeholders and computed + 2 - placeholders >= request.max_total_tokens:
                # One token is missing, and the step in flight yields at least one.
                self._decide("last_token", request, 0, 0)
                continue
            wanted = request.num_tokens + placeholders - computed
            drafts = request.spec_token_ids
            if drafts:
                wanted += len(drafts)
            n = min(wanted, cap, budget, last_position - computed) if wanted > 1 else wanted
            if n <= 0 or computed >= last_position:
                continue
            if n < wanted:
                self._decide("budget", request, wanted, n)
            end = computed + n
            # The steady decode does no block work: its slots are there and no block becomes full.
            if end + num_spec > request.num_slots:
                step.budget = budget
                new_blocks = self._allocate_or_preempt(request, n, step)
                budget = step.budget
                if new_blocks is None:
                    break
                if new_blocks[0]:
                    step.new_blocks[request.req_id] = new_blocks
            elif end >= request.next_hash_at and request.num_tokens >= request.next_hash_at:
                self.kv.cache_blocks(request, end)
            num_scheduled[request.req_id] = n
            continued.append(request)
            budget -= n
            if drafts:
                num_drafts = end - request.num_tokens - placeholders
                if num_drafts > 0:
                    step.drafts[request.req_id] = drafts[:num_drafts]
                request.spec_token_ids = []
        step.budget = budget

    def _allocate_or_preempt(self, request: Request, n: int, step: StepDraft) -> BlockIds | None:
        """Blocks for ``request``, others preempted until there are some; None if it had to be preempted itself."""
        while (blocks := self.kv.allocate_slots(request, n, self.num_spec)) is None:
            victim = max(self.running, key=priority_key) if self.config.policy == "priority" else self.running[-1]
            needed = self.kv.blocks_needed(request, request.num_computed_tokens + n + self.num_spec)
            self._decide("preempt", victim, needed, self.kv.num_free_blocks)
            self.running.remove(victim)
            if victim.req_id in step.num_scheduled:
                # Only under priority: it had a place in this very step.
                step.budget += step.num_scheduled.pop(victim.req_id)
                step.continued.remove(victim)
                step.drafts.pop(victim.req_id, None)
                step.new_blocks.pop(victim.req_id, None)
            self._preempt(victim)
            step.preempted = True
            if victim is request:
                return None
        return blocks

    def _schedule_waiting(self, step: StepDraft) -> list[Request]:
        admitted: list[Request] = []
        passed_over: list[Request] = []
        while self.waiting and step.budget > 0:
            request = self.waiting.peek()
            if len(self.running) >= self.config.max_num_reqs:
                self._decide("rows", request, 1, 0)
                break
            if request.num_stale_output_tokens:
                self._decide("draining", request, request.num_stale_output_tokens, 0)
                passed_over.append(self.waiting.pop())
                continue
            hit = self.kv.get_computed_blocks(request)
            wanted = request.num_tokens - hit.num_tokens
            n = min(wanted, self._chunk_cap(), step.budget)
            reserve = self.config.reserve_full_sequence
            if self.kv.allocate_slots(request, n, self.num_spec, hit, reserve) is None:
                self._explain_wait(request, hit.num_tokens + n, hit.num_tokens)
                break
            if n < wanted:
                self._decide("budget", request, wanted, n)
            if hit.num_tokens:
                self._decide("prefix_hit", request, request.num_tokens, hit.num_tokens)
            self.stats.prefix_queried_tokens += request.num_tokens
            self.stats.prefix_hit_tokens += hit.num_tokens
            self.waiting.pop()
            request.num_computed_tokens = request.num_cached_tokens = hit.num_tokens
            group = step.resumed if request.status is RequestStatus.PREEMPTED else step.new
            group.append(self._request_data(request))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            admitted.append(request)
            step.num_scheduled[request.req_id] = n
            step.budget -= n
        for request in reversed(passed_over):
            self.waiting.requeue(request)
        return admitted

    def _request_data(self, request: Request) -> RequestData:
        return RequestData(
            req_id=request.req_id,
            prompt_len=request.num_prompt_tokens,
            all_token_ids=list(request.all_token_ids),
            sampling=request.sampling,
            seed=request.seed,
            seed_given=request.seed_given,
            block_ids=self.kv.block_ids(request),
            num_computed_tokens=request.num_computed_tokens,
            stop_token_ids=tuple(sorted(request.stop_set)),
            processors=request.processors,
        )

    def _chunk_cap(self) -> int:
        """Longest chunk that one request may take while another could use the budget."""
        alone = len(self.running) + len(self.waiting) <= 1
        threshold = self.config.long_prefill_token_threshold
        return self.config.max_num_batched_tokens if alone or not threshold else threshold

    def _update_after_schedule(self, scheduled: list[Request], output: SchedulerOutput) -> None:
        """Count the scheduled tokens, and start the next step's sets."""
        steady = self._steady
        if steady is not None and scheduled is steady.requests:
            steady.count()
        else:
            self._end_steady()
            self._count_scheduled(scheduled, output)
            self._steady = self._find_steady(scheduled, output)
        self._in_flight.append((self.step, scheduled))
        self.step += 1
        self._finished, self._preempted = set(), set()

    def _find_steady(self, scheduled: list[Request], output: SchedulerOutput) -> SteadyBatch | None:
        """A batch of decodes, the same as in the last schedule and all that is running: more of that is expected."""
        told, previous, self._previous = output.continued, self._previous, scheduled
        if (
            self.num_spec
            or not scheduled
            or not len(told.req_ids) == output.total_num_scheduled_tokens == len(self.running)
            or scheduled != previous
            or any(request.is_prefill_chunk for request in scheduled)
        ):
            return None
        return SteadyBatch(scheduled, told, self.kv, bool(self._promises), self.config.max_model_len - 1)

    def _count_scheduled(self, scheduled: list[Request], output: SchedulerOutput) -> None:
        """The scheduled tokens are computed (optimistically) and in flight."""
        for request, n in zip(scheduled, output.num_scheduled_tokens.values(), strict=True):
            request.num_computed_tokens = computed = request.num_computed_tokens + n
            request.num_in_flight_tokens += n
            request.is_prefill_chunk = computed < request.num_tokens + request.num_output_placeholders

    # -- update --------------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Sequence[RequestUpdate]:
        """Settle the oldest step in flight; what it did, for each request that got tokens, or that failed in it.

        Raises ``ValueError`` if the two belong to another step, or if the runner's requests are not the step's.
        """
        if not self._in_flight or not self._in_flight[0][0] == scheduler_output.step == model_runner_output.step:
            oldest = self._in_flight[0][0] if self._in_flight else "none"
            raise ValueError(
                f"outputs are settled in the order of the schedules: oldest in flight is step {oldest}, got schedule "
                f"{scheduler_output.step} with output {model_runner_output.step}"
            )
        num_scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_draft_tokens
        sampled = _in_order(model_runner_output, scheduler_output)
        errors = model_runner_output.errors
        is_plain = not errors and not drafts
        updates: list[RequestUpdate] = []
        new = tuple.__new__  # half the time of the named tuple's own
        any_finished = False
        requests, steady = self._in_flight.popleft()[1], self._steady
        if steady is not None and requests is steady.requests:
            settled = steady.settle(scheduler_output.continued, sampled) if is_plain else None
            if settled is not None:
                return settled
            self._end_steady()
        for request, n, tokens in zip(requests, num_scheduled.values(), sampled, strict=True):
            req_id = request.req_id
            request.num_in_flight_tokens = in_flight = request.num_in_flight_tokens - n
            if request.finish_reason is not None:
                self.stats.wasted_rows += bool(tokens)
                continue
            if errors and req_id in errors:
                any_finished = True
                self._finish(request, "error")
                updates.append(RequestUpdate(req_id, [], "error"))
                continue
            stale = request.num_stale_output_tokens
            if is_plain and not stale and len(tokens) == 1:
                # The steady decode: what follows below, for one token and without a call.
                request.num_output_placeholders -= self._promises
                request.all_token_ids.append(tokens[0])
                request.num_tokens = known = request.num_tokens + 1
                if request.num_computed_tokens - in_flight >= request.next_hash_at:
                    self.kv.cache_blocks(request, request.num_computed_tokens - in_flight)
                if tokens[0] in request.stop_set or known >= request.max_total_tokens:
                    any_finished = True
                    end: FinishReason = "stop" if tokens[0] in request.stop_set else "length"
                    self._finish(request, end)
                    updates.append(RequestUpdate(req_id, tokens, end))
                else:
                    updates.append(new(RequestUpdate, (req_id, tokens, None)))
                continue
            if stale:
                request.num_stale_output_tokens = stale - n
            if not tokens:
                continue
            if drafts and req_id in drafts:
                num_drafts, num_accepted = len(drafts[req_id]), len(tokens) - 1
                self.stats.draft_tokens += num_drafts
                self.stats.accepted_draft_tokens += num_accepted
                if num_accepted < num_drafts and not stale:
                    self._on_rejected(request, num_drafts - num_accepted)
            if not stale:
                request.num_output_placeholders -= self._promises * len(tokens)
            reason = None
            for kept, token in enumerate(tokens, 1):
                reason = request.append_output(token)
                if reason is not None:
                    if kept < len(tokens) and not stale:
                        request.num_computed_tokens -= len(tokens) - kept
                    tokens = tokens[:kept]
                    break
            if not stale and request.num_computed_tokens - request.num_in_flight_tokens >= request.next_hash_at:
                self.kv.cache_blocks(request, request.num_confirmed_tokens)
            if reason is not None:
                any_finished = True
                self._finish(request, reason)
            updates.append(RequestUpdate(req_id, tokens, reason))
        if any_finished:
            self.running = [request for request in self.running if request.finish_reason is None]
        return updates

    def _on_rejected(self, request: Request, num_rejected: int) -> None:
        """The schedule counted ``num_rejected`` drafts as computed which turned out wrong."""
        request.num_computed_tokens -= num_rejected

    def _explain_wait(self, request: Request, num_tokens: int, num_hits: int) -> None:
        hit = self.kv.get_computed_blocks(request)
        needed, free = self.kv.blocks_needed(request, num_tokens + self.num_spec, hit), self.kv.num_free_blocks
        kind = "no_blocks"
        if needed <= free:
            kind, needed = "full_sequence", self.kv.blocks_needed(request, request.num_tokens, hit, in_chunks=True)
        self._decide(kind, request, needed, free)


def _told(step: StepDraft) -> ContinuedData:
    """What the runner is told of the requests that go on."""
    continued = step.continued
    return ContinuedData(
        list(step.num_scheduled)[: len(continued)],
        _int32([r.num_computed_tokens for r in continued]),
        _int32([r.num_tokens - r.num_prompt_tokens + r.num_output_placeholders for r in continued]),
        step.new_blocks,
    )


def _int32(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32[len(values)], at half the cost of ``np.array``."""
    return np.frombuffer(array("i", values), np.int32)


def _in_order(output: ModelRunnerOutput, schedule: SchedulerOutput) -> Sequence[list[int]]:
    """The sampled tokens in the order of the schedule. Raises ``ValueError`` where the requests are others."""
    num_scheduled = schedule.num_scheduled_tokens
    # Steps in a row are told of one list of ids, and the runner answers with it: comparing hundreds of strings would
    # touch them all.
    same = output.req_ids is schedule.continued.req_ids and len(output.req_ids) == len(num_scheduled)
    if same or output.req_ids == list(num_scheduled):
        return output.sampled_token_ids
    sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    if sampled.keys() != num_scheduled.keys():
        raise ValueError(
            f"step {output.step}: the runner's requests differ from the scheduled ones in "
            f"{sorted(sampled.keys() ^ num_scheduled.keys())}"
        )
    return [sampled[req_id] for req_id in num_scheduled]
