"""The small values of the scheduler: what it reports, why it decided, what it counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mrv2lab.engine.request import FinishReason, Request
from mrv2lab.protocol import BlockIds, RequestData


class RequestUpdate(NamedTuple):
    """What a step did for one request: its new tokens (the stop token included) and why it ended, if it did; for
    ``"error"`` the runner's output says more.

    A named tuple, since a frozen dataclass costs three times as much to build and this is made per request and step.
    """

    req_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None


class Decision(NamedTuple):
    """Why ``schedule()`` did something out of the ordinary. ``needed`` and ``free`` count blocks, or what kind says.

    ``preempt``: req_id lost its blocks, another needed them. ``no_blocks``: waits for blocks. ``full_sequence``: waits
    until its whole sequence fits. ``rows``: waits, ``free`` = 0 of R rows are left. ``draining``: waits for ``needed``
    stale tokens. ``after_preemption``: waits, since this step preempted. ``budget``: got ``free`` of ``needed`` tokens.
    ``last_token``: skipped, the step in flight surely ends it. ``prefix_hit``: ``free`` of ``needed`` tokens were
    cached.
    """

    kind: str
    req_id: str
    needed: int
    free: int


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Tokens unless said otherwise."""

    num_preemptions: int = 0
    wasted_rows: int = 0
    """Rows sampled for requests that had finished, or were aborted, while the step was in flight."""
    prefix_queried_tokens: int = 0
    """Known tokens of admitted requests."""
    prefix_hit_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class StepDraft:
    """A schedule being put together."""

    __slots__ = ("budget", "continued", "drafts", "new", "new_blocks", "num_scheduled", "preempted", "resumed")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.continued: list[Request] = []
        self.new: list[RequestData] = []
        self.resumed: list[RequestData] = []
        self.num_scheduled: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.new_blocks: dict[str, BlockIds] = {}
        self.preempted = False
