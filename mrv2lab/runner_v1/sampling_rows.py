"""What the requests of the persistent batch ask of the sampler, by row: so it moves with every row that moves.

Counterpart in vLLM: the sampling half of ``InputBatch`` in ``v1/worker/gpu_input_batch.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import LogitsFunction, SamplingParams
from mrv2lab.runner_v1.block_table import HostTable, MakeTable
from mrv2lab.runner_v1.cached_request import CachedRequestState

ALLOWED = "allowed_token_ids_mask"
"""The table of masks, True = not allowed: a row of V bytes a request."""

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
"""Three tables with the same users: whoever needs one needs all."""
_TABLES = {
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    **dict.fromkeys(PENALTIES, torch.float32),
    ALLOWED: torch.bool,
}


@dataclass(frozen=True, slots=True)
class MinTokens:
    """No token of ``stop_token_ids`` before ``count`` outputs."""

    count: int
    stop_token_ids: tuple[int, ...]
    structured: bool
    """A grammar that allows nothing but the end wins."""


class SamplingRows:
    """Row-indexed parameters beyond the temperature. A table is made when the first request needs it, so a batch that
    uses none has none, and moves none.

    ``users`` has, by table, the ids of the requests whose row of it says something; the dictionaries are by row and
    hold only the rows that say something.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, make_table: MakeTable) -> None:
        self._max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self._make_table = make_table
        self.tables: dict[str, HostTable] = {}
        """Those made so far: [R] each, the masks [R, V]."""
        self.users: dict[str, set[str]] = {name: set() for name in _TABLES}
        self.logit_bias: dict[int, Mapping[int, float]] = {}
        self.min_tokens: dict[int, MinTokens] = {}
        self.bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.processors: dict[int, tuple[tuple[int, LogitsFunction], ...]] = {}
        self.num_logprobs: dict[int, int] = {}
        """How many most likely tokens; V for the whole vocabulary."""
        self._maps: tuple[dict[int, Any], ...] = (
            self.logit_bias,
            self.min_tokens,
            self.bad_words,
            self.processors,
            self.num_logprobs,
        )

    @property
    def used(self) -> bool:
        """Whether any row of the batch says anything."""
        return any(self._maps) or any(self.users.values())

    def fill_row(self, row: int, request: CachedRequestState) -> None:
        """Overwrite everything of ``row``. Raises ``ValueError`` for bad words that are still texts."""
        params, vocab = request.sampling, self.vocab_size
        words = tuple(word for word in params.bad_words if not isinstance(word, str))
        if len(words) < len(params.bad_words):
            raise ValueError(f"request {request.req_id!r} has bad words as texts; make token ids of them at submit")
        self.clear_row(row)
        self._fill_tables(row, request.req_id, params)
        if params.logit_bias:
            self.logit_bias[row] = params.logit_bias
        if params.min_tokens and request.stop_token_ids:
            structured = params.structured_output is not None
            self.min_tokens[row] = MinTokens(params.min_tokens, request.stop_token_ids, structured)
        if words:
            self.bad_words[row] = words
        if request.processors:
            self.processors[row] = request.processors
        if params.logprobs is not None:
            self.num_logprobs[row] = vocab if params.logprobs == -1 else min(params.logprobs, vocab)

    def _fill_tables(self, row: int, req_id: str, params: SamplingParams) -> None:
        vocab, allowed = self.vocab_size, params.allowed_token_ids
        values: dict[str, Any] = {
            "top_k": params.top_k if 0 < params.top_k < vocab else vocab,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            ALLOWED: allowed is not None,
        }
        off = self._off()
        used = {name for name, value in values.items() if value != off[name]}
        if params.uses_penalties:
            used.update(PENALTIES)
        for name, users in self.users.items():
            if name in used:
                users.add(req_id)
                if name not in self.tables:
                    self.tables[name] = self._make(name, off[name])
            else:
                users.discard(req_id)
        for name, table in self.tables.items():
            table.np[row] = values[name]
        if allowed is not None:
            self.tables[ALLOWED].np[row, list(allowed)] = False

    def _off(self) -> dict[str, Any]:
        """By table: the value that says nothing."""
        return {
            "top_k": self.vocab_size,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            ALLOWED: False,
        }

    def _make(self, name: str, off: Any) -> HostTable:
        shape = (self._max_num_reqs, self.vocab_size) if name == ALLOWED else (self._max_num_reqs,)
        table = self._make_table(name, shape, _TABLES[name])
        table.np.fill(off)
        return table

    def clear_row(self, row: int) -> None:
        """Forget what the dictionaries hold of ``row``; tables are overwritten by the next owner."""
        for by_row in self._maps:
            by_row.pop(row, None)

    def remove(self, row: int, req_id: str) -> None:
        """The request of ``row`` has no row any more."""
        self.clear_row(row)
        for users in self.users.values():
            users.discard(req_id)

    def move_row(self, src: int, dst: int) -> int:
        """Give ``dst`` everything of ``src``; returns the bytes moved in tables."""
        moved = 0
        for table in self.tables.values():
            table.np[dst] = table.np[src]
            moved += table.np[dst].nbytes
        for by_row in self._maps:
            _put(by_row, dst, by_row.pop(src, None))
        return moved

    def swap_rows(self, i: int, j: int) -> int:
        """Exchange two rows; returns the bytes moved in tables."""
        moved = 0
        for table in self.tables.values():
            table.np[[i, j]] = table.np[[j, i]]
            moved += 2 * table.np[i].nbytes
        for by_row in self._maps:
            of_i, of_j = by_row.pop(i, None), by_row.pop(j, None)
            _put(by_row, i, of_j)
            _put(by_row, j, of_i)
        return moved

    def publish(self, rows: int) -> None:
        """Send the first ``rows`` rows of every table that somebody uses; after a change of rows only."""
        for name, table in self.tables.items():
            if self.users[name]:
                table.publish(rows)

    def reset(self) -> None:
        """Forget every request; tables keep their contents until rows get new owners."""
        for by_row in self._maps:
            by_row.clear()
        for users in self.users.values():
            users.clear()

    def device_tables(self) -> dict[str, torch.Tensor]:
        """What queued work reads, by name, as of the last publish."""
        return {name: table.gpu for name, table in self.tables.items()}

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth, by name."""
        return {name: table.np for name, table in self.tables.items()}


def _put(by_row: dict[int, Any], row: int, value: Any) -> None:
    if value is None:
        by_row.pop(row, None)
    else:
        by_row[row] = value
