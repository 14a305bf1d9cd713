"""Log-probabilities as the user reads them: a value for each token, small until it is looked at.

Counterpart in vLLM: ``v1/engine/logprobs.py``, LogprobsProcessor, and ``logprobs.py``, FlatLogprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import pandas as pd

from mrv2lab.protocol import Logprobs

Decode = Callable[[list[int]], str]


class TokenLogprob(NamedTuple):
    """``rank`` 1 is the most likely token. Ties count against the chosen token; the others are numbered in order."""

    logprob: float
    rank: int


Candidates = dict[int, TokenLogprob]


class LogprobRows(Sequence[Candidates | None]):
    """One entry a token: token id -> :class:`TokenLogprob`, the token itself first, then the most likely others.

    A prompt's first token has None: nothing predicts it.
    """

    def __init__(self, *, prompt: bool = False) -> None:
        self._offset = int(prompt)
        # one a row: ids int32[1 + k] (-1 = not asked for), values float32[1 + k], rank of column 0
        self._ids: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        self._values: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self._ranks: list[int] = []

    def extend(self, rows: Logprobs, start: int = 0, count: int | None = None) -> None:
        """Take over ``count`` rows from ``start`` on; None = all that follow. They are copied."""
        end = len(rows.ranks) if count is None else start + count
        if not 0 <= start <= end <= len(rows.ranks):
            raise ValueError(f"rows {start} to {end} were asked of {len(rows.ranks)}")
        for ids, values, rank in zip(
            rows.token_ids[start:end], rows.values[start:end], rows.ranks[start:end].tolist(), strict=True
        ):
            asked = ids >= 0
            self._ids.append(ids[asked])
            self._values.append(values[asked])
            self._ranks.append(rank)

    def __len__(self) -> int:
        return self._offset + len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Candidates | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[Candidates | None]: ...

    def __getitem__(self, index: int | slice) -> Candidates | list[Candidates | None] | None:
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._at(index % len(self))

    def _at(self, index: int) -> Candidates | None:
        if index < self._offset:
            return None
        ids, values, ranks = self._row(index - self._offset)
        made: Candidates = {}
        for token, value, rank in zip(ids, values, ranks, strict=True):
            made.setdefault(token, TokenLogprob(value, rank))  # the token itself may be among the most likely
        return made

    def _row(self, index: int) -> tuple[list[int], list[float], list[int]]:
        ids = self._ids[index].tolist()
        return ids, self._values[index].tolist(), [self._ranks[index], *range(1, len(ids))]

    @property
    def chosen(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32[tokens]: the log-probability of each token itself; a prompt's first is left out."""
        return np.array([values[0] for values in self._values], np.float32)

    def to_frame(self, decode: Decode | None = None) -> pd.DataFrame:
        """One line a candidate: ``position``, ``token_id``, ``logprob``, ``rank``, ``chosen``, and ``text`` if
        ``decode`` (a tokenizer's, say) is given."""
        lines = [
            (position, token, entry.logprob, entry.rank, first == 0)
            for position, row in enumerate(self)
            for first, (token, entry) in enumerate((row or {}).items())
        ]
        frame = pd.DataFrame(lines, columns=["position", "token_id", "logprob", "rank", "chosen"])
        if decode is not None:
            frame["text"] = [decode([token]) for token in frame["token_id"]]
        return frame

    def __repr__(self) -> str:
        return f"LogprobRows({len(self)} tokens)"
