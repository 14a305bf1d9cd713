"""One request as the scheduler sees it: its tokens, and the counters that chase them.

There is no prefill phase and no decode phase, only a computed count chasing a known count. Four counters carry it:

- ``num_computed_tokens``, *optimistic*: advanced when a step is scheduled, rolled back when drafts are rejected;
- ``num_in_flight_tokens``: scheduled, but the step's output is not processed yet; computed minus in flight is the
  *confirmed* frontier;
- ``num_output_placeholders`` (async): tokens that steps in flight promised and nobody on the host knows yet;
- ``num_stale_output_tokens``: in flight from before a preemption; the request waits until they have drained.

Counterpart in vLLM: ``v1/request.py``, Request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Literal

from mrv2lab.engine.account import Accounted
from mrv2lab.engine.block_pool import NONE_HASH, hash_block
from mrv2lab.protocol import LogitsFunction, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(IntEnum):
    """A request's life. The order matters: everything above PREEMPTED is over."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def finished(self) -> bool:
        """Whether the request is over."""
        return self > RequestStatus.PREEMPTED


FINISHED: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}


class Request(Accounted):
    """One request. Lengths are in tokens; ``arrival_time`` in seconds on the engine's clock, used for ordering only.

    ``seed`` is the one the engine drew; a seed in ``sampling`` goes before it, and ``seed_given`` says which it was.
    A lower ``priority`` goes first. A token of ``eos_token_ids`` (unless ``sampling.ignore_eos``) or of
    ``sampling.stop_token_ids`` ends the request and is part of its output. ``processors`` are its custom stages.

    Raises ``ValueError`` for an empty prompt or a negative token id (a vocabulary is the engine's to check).
    """

    accounted = frozenset(
        ("all_token_ids", "num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "num_tokens")
    )
    """What a :class:`SteadyBatch` accounts for."""

    __slots__ = (
        "all_token_ids",
        "arrival_order",
        "arrival_time",
        "block_hashes",
        "finish_reason",
        "is_prefill_chunk",
        "max_total_tokens",
        "next_hash_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "num_stale_output_tokens",
        "num_tokens",
        "priority",
        "processors",
        "req_id",
        "sampling",
        "seed",
        "seed_given",
        "spec_token_ids",
        "status",
        "stop_set",
    )

    def __init__(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        seed: int = 0,
        eos_token_ids: Iterable[int] = (),
        arrival_time: float = 0.0,
        priority: int = 0,
        processors: tuple[LogitsFunction, ...] = (),
    ) -> None:
        if not len(prompt_token_ids):
            raise ValueError(f"request {req_id!r}: the prompt is empty; it needs at least one token")
        if min(prompt_token_ids) < 0:
            raise ValueError(f"request {req_id!r}: token id {min(prompt_token_ids)} in the prompt is negative")
        self.req_id = req_id
        self.sampling = sampling if sampling is not None else SamplingParams()
        self.seed_given = self.sampling.seed is not None
        self.seed = seed if self.sampling.seed is None else self.sampling.seed
        self.stop_set = frozenset(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            self.stop_set |= frozenset(eos_token_ids)
        self.arrival_time = arrival_time
        self.priority = priority
        self.processors = processors
        # Set by the scheduler: breaks ties between equal arrival times.
        self.arrival_order = 0

        # Prompt and outputs that are known; never a placeholder, never a draft.
        self.all_token_ids = [int(token) for token in prompt_token_ids]
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.max_total_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        # Drafts to verify in the next step; under async scheduling -1 placeholders, shared and read-only.
        self.spec_token_ids: list[int] = []
        self.block_hashes: list[bytes] = []

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.is_prefill_chunk = False
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_stale_output_tokens = 0
        self.num_preemptions = 0
        # Prefix hits of the last admission.
        self.num_cached_tokens = 0

        # Kept by KVCacheManager so that a decode step can see with two comparisons that no block work is due: slots
        # in the table, and the number of computed tokens at which the next block is full.
        self.num_slots = 0
        self.next_hash_at = 0
        self.arrears = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt (a copy)."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The known outputs (a copy)."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Outputs known."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens computed by steps whose output was processed."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def finished(self) -> bool:
        """Whether the request is over."""
        return self.finish_reason is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, cached or not: its log-probabilities are still owed."""
        return self.sampling.prompt_logprobs is not None and self.num_tokens == self.num_prompt_tokens

    def append_output(self, token: int) -> FinishReason | None:
        """Append one sampled token; the reason if it is the last one. A stop token wins over the length."""
        self.all_token_ids.append(token)
        self.num_tokens += 1
        if token in self.stop_set:
            return "stop"
        if self.num_tokens >= self.max_total_tokens:
            return "length"
        return None

    def finish(self, reason: FinishReason) -> None:
        """End the request."""
        self.status = FINISHED[reason]
        self.finish_reason = reason

    def preempted(self) -> None:
        """Go back to the start, tokens kept: all of them are computed again after resumption.

        What is in flight becomes stale: still appended when it comes back (dropping it would bias acceptance figures
        and waste work), but without effect on the counters reset here.
        """
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_stale_output_tokens = self.num_in_flight_tokens
        self.spec_token_ids = []
        self.is_prefill_chunk = False
        self.num_preemptions += 1

    def update_block_hashes(self, block_size: int) -> list[bytes]:
        """Extend ``block_hashes`` to every full block of known tokens, and return it."""
        hashes = self.block_hashes
        for end in range((len(hashes) + 1) * block_size, self.num_tokens + 1, block_size):
            parent = hashes[-1] if hashes else NONE_HASH
            hashes.append(hash_block(parent, self.all_token_ids[end - block_size : end]))
        return hashes

    def __repr__(self) -> str:
        return (
            f"Request({self.req_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, in_flight={self.num_in_flight_tokens}, "
            f"placeholders={self.num_output_placeholders})"
        )
