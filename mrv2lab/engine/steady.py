"""The steady decode: the batch stays as it is, and each of its requests computes one token a step.

Nothing is decided here. ``Scheduler._schedule_running`` has the rule for one request, ``update_from_output`` what a
token does to it; this is what both come to for a whole batch of which nobody comes or goes. The counters are the
batch's, and a request catches up with them when its blocks need work, when somebody looks (``account.py``) and when the
batch ends, so that a step touches a few requests instead of all. A step in which somebody needs the rule (blocks run
short, a last token, a stop) is not taken here at all: the answer is None or False, and the scheduler asks everyone.

No counterpart in vLLM, whose scheduler asks everyone in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from mrv2lab.engine.account import LOCK, Account, Tokens
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.request import Request
from mrv2lab.protocol import BlockIds, ContinuedData, MadeForReaders, OneTokenEach

_make_update: Callable[[tuple[str, list[int], None]], RequestUpdate] = partial(tuple.__new__, RequestUpdate)
"""Half the time of the named tuple's own."""

Int32 = np.ndarray[Any, np.dtype[np.int32]]

FEW_STOPS = 4
"""Stop ids that cost less when each is compared with all tokens: 1 us each for 256 requests."""


class SteadyUpdates(MadeForReaders[RequestUpdate]):
    """The updates of a step that gave each request one token and ended none."""

    __slots__ = ("req_ids",)

    def __init__(self, req_ids: list[str], tokens: Tokens) -> None:
        super().__init__(tokens)
        self.req_ids = req_ids

    def make(self, part: slice) -> list[RequestUpdate]:
        """See :meth:`MadeForReaders.make`."""
        each = ([token] for token in self.tokens[part].tolist())
        return list(map(_make_update, zip(self.req_ids[part], each, repeat(None))))


class RequestAccount(Account[Request]):
    """The counters of requests; ``is_behind``: a schedule promises a token each, which a step then gives."""

    __slots__ = ("_is_behind", "_num_counted")
    closed_behind = 8  # block work reads many now and then

    def __init__(self, requests: list[Request], is_behind: bool) -> None:
        super().__init__(requests)
        self._is_behind = is_behind
        self._num_counted = 0
        """Schedules in the account."""

    def count(self) -> None:
        """A token of each is computed (optimistically) and in flight."""
        with LOCK:
            self.begin_change()
            self._num_counted += 1

    def take_away(self, indices: Iterable[int]) -> None:
        """See :meth:`Account.take_away`."""
        give_back, now = self._give_back, (self._num_counted, self.num_columns)
        for i in indices:
            r = self.members[i]
            known = r.num_computed_tokens, r.num_in_flight_tokens, r.num_output_placeholders, r.all_token_ids
            r.fall_behind(give_back, r, i, *known, r.num_tokens, *now)
            del r.num_computed_tokens, r.num_in_flight_tokens, r.num_output_placeholders, r.all_token_ids, r.num_tokens

    def _give_back(
        self,
        request: Request,
        i: int,
        computed: int,
        in_flight: int,
        placeholders: int,
        token_ids: list[int],
        length: int,
        counted: int,
        columns: int,
    ) -> None:
        """Bring ``request``, whose counters were as given at that point of the account, up to date."""
        scheduled, settled = self._num_counted - counted, self.num_columns - columns
        request.num_computed_tokens = computed + scheduled
        request.num_in_flight_tokens = in_flight + scheduled - settled
        request.num_output_placeholders = placeholders + (scheduled - settled if self._is_behind else 0)
        token_ids[length:] = self.tokens_since(i, columns)
        request.all_token_ids = token_ids
        request.num_tokens = len(token_ids)


class SteadyBatch:
    """All running requests, in order, while each of them asks for one token in every step and nothing else.

    It begins behind a schedule that gave them one token each; ``told`` is the runner's message about them in it. The
    scheduler ends it (:meth:`end`) when one of them ends, is preempted or gets anything but one token, and when another
    is admitted. ``is_behind`` (asynchronous scheduling): when a step is scheduled, a token of each is still to come.
    ``last_position`` of a sequence is never computed.
    """

    __slots__ = (
        "_account",
        "_due_at",
        "_is_behind",
        "_kv",
        "_num_computed_tokens",
        "_num_output_tokens",
        "_num_schedules",
        "_num_settled",
        "_num_steps",
        "_stop_ids",
        "one_each",
        "req_ids",
        "requests",
    )

    def __init__(
        self, requests: list[Request], told: ContinuedData, kv: KVCacheManager, is_behind: bool, last_position: int
    ) -> None:
        self.requests = requests
        self.req_ids = told.req_ids
        self.one_each = dict.fromkeys(self.req_ids, 1)
        """Each schedule's tokens by request: one object, not to be written."""
        self._kv, self._is_behind = kv, is_behind
        self._stop_ids = frozenset[int]().union(*{request.stop_set for request in requests})
        # [r] int32, of the latest schedule
        self._num_computed_tokens, self._num_output_tokens = told.num_computed_tokens, told.num_output_tokens
        # Schedules of this batch, that of ``told`` included, and how many of them are settled
        self._num_schedules, self._num_settled = 1, 0
        # Schedules until one is the last of somebody: max_tokens are promised, or the sequence is as long as it may be
        starts = zip(requests, told.num_computed_tokens.tolist(), strict=True)
        self._num_steps = min(min(r.max_total_tokens - 1, last_position) - start for r, start in starts)
        self._account = RequestAccount(requests, is_behind)
        # [r] int64: with as many tokens computed a block is full, so that it is to be published and another one needed.
        # It may be too early, which costs a look, never too late.
        self._due_at = np.empty(len(requests), np.int64)
        self._look_ahead(list(range(len(requests))))

    def _look_ahead(self, due: list[int]) -> None:
        requests = self.requests
        self._due_at[due] = [min(requests[i].num_slots, requests[i].next_hash_at) for i in due]

    # -- a step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> ContinuedData | None:
        """What the runner is told of the next step, in which each request has one token."""
        if self._num_schedules >= self._num_steps:
            return None
        computed: Int32 = self._num_computed_tokens + 1
        new_blocks: dict[str, BlockIds] = {}
        # What becomes full in this very step is published with it, unless its last token is not known.
        ends = computed + 1
        due = ((computed if self._is_behind else ends) >= self._due_at).nonzero()[0].tolist()
        if due and not self._serve(due, ends, new_blocks):
            return None
        self._num_schedules += 1
        self._num_computed_tokens = computed
        self._num_output_tokens = outputs = self._num_output_tokens + 1
        return ContinuedData(self.req_ids, computed, outputs, new_blocks)

    def _serve(self, due: list[int], computed: Int32, new_blocks: dict[str, BlockIds]) -> bool:
        """The block work of those who are ``due``, in order, so that ``computed`` tokens have room; False, and nothing
        changed, if blocks run short."""
        kv, ends = self._kv, computed[due].tolist()
        requests = [self.requests[i] for i in due]
        short = [request for request, end in zip(requests, ends, strict=True) if end > request.num_slots]
        if len(short) * kv.num_groups > kv.num_free_blocks:
            return False
        if kv.caching:
            for request, end in zip(requests, ends, strict=True):
                if end <= request.num_slots and end >= request.next_hash_at <= request.num_tokens:
                    kv.cache_blocks(request, end)
        for request, block_ids in zip(short, kv.append_blocks(short), strict=True):
            new_blocks[request.req_id] = block_ids
        self._look_ahead(due)
        return True

    def count(self) -> None:
        """The scheduled tokens are computed (optimistically) and in flight, and the next ones promised."""
        if self._account.is_open_for_step():
            self._account.count()
            return
        promised = int(self._is_behind)
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += promised
        self._account.open(self._num_schedules)

    def settle(self, told: ContinuedData, sampled: Sequence[list[int]]) -> SteadyUpdates | None:
        """Give each request its token of the schedule ``told``. None if that ends one, or if it is not one each."""
        if isinstance(sampled, OneTokenEach):
            tokens = sampled.tokens
        else:
            try:
                tokens = np.array([token for (token,) in sampled], np.int64)
            except ValueError:
                return None
        self._num_settled += 1
        stops = self._stop_ids
        # One comparison an id for a few; where each request has its own, one look an output.
        few = len(stops) <= FEW_STOPS
        stopped = any((tokens == stop).any() for stop in stops) if few else not stops.isdisjoint(tokens.tolist())
        if stopped or self._num_settled >= self._num_steps:
            return None
        if self._account.is_open:
            with LOCK:
                self._account.begin_change()
                self._account.add(tokens)
        else:
            promised = int(self._is_behind)
            for request, token in zip(self.requests, tokens.tolist(), strict=True):
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= promised
                request.all_token_ids.append(token)
                request.num_tokens += 1
        due = (told.num_computed_tokens + 1 >= self._due_at).nonzero()[0].tolist()
        for i in due:
            request = self.requests[i]
            if request.num_confirmed_tokens >= request.next_hash_at:
                self._kv.cache_blocks(request, request.num_confirmed_tokens)
        if due:
            self._look_ahead(due)
        return SteadyUpdates(self.req_ids, tokens)

    def end(self) -> None:
        """Let the requests go, counters up to date."""
        self._account.close()
