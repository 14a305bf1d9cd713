"""The account of a lasting batch: what each of its members gets in every step is written down once, for all of them.

A step that touches a few hundred requests pays for their cache lines, which nobody has used since the last step, more
than for anything it decides. So a batch that stays as it is takes such attributes away from its members and keeps the
account itself. Whoever reads one gets it: the member then catches up, and the batch takes the attribute away again when
the next step changes it. Outside a lasting batch these are plain slots, at no cost (from Python 3.12 on).

Any thread may read while another steps: whatever gives, takes or changes does so under ``LOCK``. An interrupt may come
anywhere: what a member is owed can be given twice, with the same result, and stays owed until all of it is given.

No counterpart in vLLM.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.int64]]

LEAST = 64
"""Members that an account is opened for, at least: fewer cost less than what it saves."""
PATIENCE = 4
"""Steps that a batch lasts before its account is opened: taking attributes away pays if it goes on for a while."""
LONGEST = 128
"""Steps that a member is owed, about, at most."""
LOCK = threading.RLock()
"""One for all accounts: it is held for microseconds, a few times a step."""


class Accounted:
    """An object some of whose slots, the ``accounted`` ones, an account may take away for a while."""

    __slots__ = ("arrears",)
    accounted: ClassVar[frozenset[str]]
    arrears: tuple[Callable[..., None], tuple[Any, ...]] | None
    """Who gives the accounted slots back, called with these arguments; None = they are here."""

    def fall_behind(self, give_back: Callable[..., None], *args: Any) -> None:
        """The accounted slots have been emptied; ``give_back(*args)`` fills them."""
        self.arrears = give_back, args

    def catch_up(self) -> None:
        """Have the accounted attributes back, as they are now."""
        with LOCK:
            if self.arrears is not None:
                give_back, args = self.arrears
                give_back(*args)
                self.arrears = None

    if not TYPE_CHECKING:  # a missing attribute stays an error for a type checker

        def __getattr__(self, name: str) -> Any:
            """Asked where a slot is empty."""
            if name in self.accounted:
                with LOCK:  # until it is read: nobody takes it away again in between
                    self.catch_up()
                    return object.__getattribute__(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


Member = TypeVar("Member", bound=Accounted)


class Account(ABC, Generic[Member]):
    """What the members of a batch are owed: a token a step each, and whatever a subclass counts besides."""

    __slots__ = ("_caught_up", "_num_turns", "_num_watched", "_ring", "_turn", "is_open", "members", "num_columns")
    closed_behind: ClassVar[int] = 1
    """Steps in a row, in which somebody reads many of the members, behind which it is closed for good."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.is_open = False
        self.num_columns = 0
        """Steps whose tokens are in the account."""
        self._caught_up: list[int] = []
        """Who is up to date at the moment."""
        self._turn = self._num_turns = 0
        """Whose turn it is to catch up, so that nobody is owed more and more, and how many have one in a step."""
        self._num_watched = 0
        """Such steps up to now."""
        # [2 * LONGEST, members] int64: tokens of the latest steps
        self._ring = np.empty((0, len(members)), np.int64)

    def open(self, num_steps: int) -> None:
        """Begin, if the batch is large enough and has lasted for ``num_steps`` already, and nobody watches it."""
        if num_steps < PATIENCE or len(self.members) < LEAST or self._num_watched >= self.closed_behind:
            return
        self._num_turns = -(-len(self.members) // LONGEST)
        self._ring = np.empty((2 * LONGEST, len(self.members)), np.int64)
        self.is_open = True
        with LOCK:
            self.take_away(range(len(self.members)))

    def is_open_for_step(self) -> bool:
        """Whether it is open, asked once a step. Where somebody (grammars, a recorder, a page) reads many of the
        members step by step it costs eight times as much as plain attributes, and is closed."""
        if self.is_open:
            num_read = len(self._caught_up) - self._num_turns  # about: not because it was their turn
            self._num_watched = self._num_watched + 1 if 4 * num_read > len(self.members) else 0
            if self._num_watched >= self.closed_behind:
                self.close()
        return self.is_open

    def begin_change(self) -> None:
        """To be called before the account changes, under ``LOCK`` until it has: whoever has caught up would be wrong
        behind it."""
        if self._caught_up:
            indices, self._caught_up = self._caught_up, []
            self.take_away(indices)

    def add(self, tokens: Tokens) -> None:
        """A step's tokens, int64[members], behind :meth:`begin_change` and under the same ``LOCK``."""
        self._ring[self.num_columns % len(self._ring)] = tokens
        self.num_columns += 1
        for _ in range(self._num_turns):
            self.members[self._turn].catch_up()
            self._turn = (self._turn + 1) % len(self.members)

    def tokens_since(self, i: int, column: int) -> list[int]:
        """Member ``i``'s tokens from the step ``column`` of the account on; noted as one that has caught up."""
        self._caught_up.append(i)
        size = len(self._ring)
        first, last = column % size, self.num_columns % size
        if column == self.num_columns:
            return []
        if first < last:
            return self._ring[first:last, i].tolist()  # type: ignore[no-any-return]
        return self._ring[first:, i].tolist() + self._ring[:last, i].tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the members go, up to date."""
        if self.is_open:
            for member in self.members:
                member.catch_up()
            self.is_open = False

    @abstractmethod
    def take_away(self, indices: Iterable[int]) -> None:
        """Empty the accounted slots of the members ``indices``, and have ``arrears`` know what was in them. Under
        ``LOCK``."""
