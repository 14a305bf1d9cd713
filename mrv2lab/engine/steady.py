"""The steady decode: the batch stays as it is, and each of its requests computes one token a step.

Nothing is decided here. ``Scheduler._schedule_running`` has the rule for one request, ``update_from_output`` what a
token does to it; this is what both come to for a whole batch of which nobody comes or goes, with a loop left only for
what each request itself keeps. A step in which somebody needs the rule (blocks run short, a last token, a stop) is not
taken here at all: the answer is None or False, nothing has changed, and the scheduler asks everyone.

No counterpart in vLLM, whose scheduler asks everyone in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, overload

import numpy as np

from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.request import Request
from mrv2lab.protocol import BlockIds, ContinuedData

_make_update: Callable[[tuple[str, list[int], None]], RequestUpdate] = partial(tuple.__new__, RequestUpdate)
"""Half the time of the named tuple's own."""

Int32 = np.ndarray[Any, np.dtype[np.int32]]


class SteadyUpdates(Sequence[RequestUpdate]):
    """The updates of a step that gave each request one token and ended none: made one by one only for who looks."""

    __slots__ = ("new_token_ids", "req_ids")

    def __init__(self, req_ids: list[str], new_token_ids: list[list[int]]) -> None:
        self.req_ids = req_ids
        self.new_token_ids = new_token_ids

    def __len__(self) -> int:
        return len(self.req_ids)

    @overload
    def __getitem__(self, index: int) -> RequestUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestUpdate]: ...
    def __getitem__(self, index: int | slice) -> RequestUpdate | list[RequestUpdate]:
        if isinstance(index, slice):
            return list(map(_make_update, zip(self.req_ids[index], self.new_token_ids[index], repeat(None))))
        return RequestUpdate(self.req_ids[index], self.new_token_ids[index], None)

    def __iter__(self) -> Iterator[RequestUpdate]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


class SteadyBatch:
    """All running requests, in order, while each of them asks for one token in every step and nothing else.

    It begins behind a schedule that gave them one token each; ``told`` is the runner's message about them in it. The
    scheduler drops it when one of them ends, is preempted or gets anything but one token, and when another is admitted.
    ``is_behind`` (asynchronous scheduling): when a step is scheduled, a token of each is still to come.
    ``last_position`` of a sequence is never computed.
    """

    __slots__ = (
        "_due_at",
        "_is_behind",
        "_kv",
        "_num_computed_tokens",
        "_num_output_tokens",
        "_num_schedules",
        "_num_settled",
        "_num_steps",
        "_one_each",
        "_stop_ids",
        "req_ids",
        "requests",
    )

    def __init__(
        self, requests: list[Request], told: ContinuedData, kv: KVCacheManager, is_behind: bool, last_position: int
    ) -> None:
        self.requests = requests
        self.req_ids = told.req_ids
        self._kv, self._is_behind = kv, is_behind
        self._one_each = dict.fromkeys(self.req_ids, 1)
        self._stop_ids = frozenset[int]().union(*{request.stop_set for request in requests})
        # [r] int32, of the latest schedule
        self._num_computed_tokens, self._num_output_tokens = told.num_computed_tokens, told.num_output_tokens
        # Schedules of this batch, that of ``told`` included, and how many of them are settled
        self._num_schedules, self._num_settled = 1, 0
        # Schedules until one is the last of somebody: max_tokens are promised, or the sequence is as long as it may be
        starts = zip(requests, told.num_computed_tokens.tolist(), strict=True)
        self._num_steps = min(min(r.max_total_tokens - 1, last_position) - start for r, start in starts)
        # [r] int64: with as many tokens computed a block is full, so that it is to be published and another one needed.
        # It may be too early, which costs a look, never too late.
        self._due_at = np.empty(len(requests), np.int64)
        self._look_ahead(list(range(len(requests))))

    def _look_ahead(self, due: list[int]) -> None:
        requests = self.requests
        self._due_at[due] = [min(requests[i].num_slots, requests[i].next_hash_at) for i in due]

    def schedule(self) -> tuple[dict[str, int], ContinuedData] | None:
        """The next step's tokens by request, and what the runner is told of them."""
        computed: Int32 = self._num_computed_tokens + 1
        if self._num_schedules >= self._num_steps:
            return None
        new_blocks: dict[str, BlockIds] = {}
        # What becomes full in this very step is published with it, unless its last token is not known.
        due = ((computed if self._is_behind else computed + 1) >= self._due_at).nonzero()[0].tolist()
        if due and not self._serve(due, new_blocks):
            return None
        self._num_schedules += 1
        self._num_computed_tokens = computed
        self._num_output_tokens = outputs = self._num_output_tokens + 1
        return self._one_each.copy(), ContinuedData(self.req_ids, computed, outputs, new_blocks)

    def _serve(self, due: list[int], new_blocks: dict[str, BlockIds]) -> bool:
        """The block work of those who are ``due``, in order; False, and nothing changed, if blocks run short."""
        kv, requests = self._kv, [self.requests[i] for i in due]
        if sum([r.num_computed_tokens >= r.num_slots for r in requests]) * kv.num_groups > kv.num_free_blocks:
            return False
        for request in requests:
            end = request.num_computed_tokens + 1
            if end > request.num_slots:
                new_blocks[request.req_id] = kv.append_block(request)
            elif end >= request.next_hash_at and request.num_tokens >= request.next_hash_at:
                kv.cache_blocks(request, end)
        self._look_ahead(due)
        return True

    def count(self) -> None:
        """The scheduled tokens are computed (optimistically) and in flight, and the next ones promised."""
        if self._is_behind:
            for request in self.requests:
                request.num_computed_tokens += 1
                request.num_in_flight_tokens += 1
                request.num_output_placeholders += 1
        else:
            for request in self.requests:
                request.num_computed_tokens += 1
                request.num_in_flight_tokens += 1

    def settle(self, told: ContinuedData, sampled: list[list[int]]) -> SteadyUpdates | None:
        """Give each request its token of the schedule ``told``. None if that ends one, or if it is not one each."""
        try:
            tokens = [token for (token,) in sampled]
        except ValueError:
            return None
        self._num_settled += 1
        if self._num_settled >= self._num_steps or not self._stop_ids.isdisjoint(tokens):
            return None
        if self._is_behind:
            for request, token in zip(self.requests, tokens, strict=True):
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= 1
                request.all_token_ids.append(token)
                request.num_tokens += 1
        else:
            for request, token in zip(self.requests, tokens, strict=True):
                request.num_in_flight_tokens -= 1
                request.all_token_ids.append(token)
                request.num_tokens += 1
        due = (told.num_computed_tokens + 1 >= self._due_at).nonzero()[0].tolist()
        for i in due:
            request = self.requests[i]
            if request.num_confirmed_tokens >= request.next_hash_at:
                self._kv.cache_blocks(request, request.num_confirmed_tokens)
        if due:
            self._look_ahead(due)
        return SteadyUpdates(self.req_ids, sampled)
