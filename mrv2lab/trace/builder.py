"""Collects events piece by piece and makes a Trace of them: sorted, with names and lanes stored once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrv2lab.trace.args import ArgStore
from mrv2lab.trace.trace import KIND, Lane, Problem, Trace, TraceInfo, problems_of

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "start": np.int64,
    "duration": np.int64,
    "name": np.int32,
    "kind": np.uint8,
    "lane": np.int32,
    "correlation": np.int64,
    "nbytes": np.int64,
    "arg": np.int32,
}


class _Positions(dict[str, int]):
    """Of each text asked for, in the order of first asking. A known one costs no call of Python."""

    def __missing__(self, text: str) -> int:
        place = self[text] = len(self)
        return place


class TraceBuilder:
    """``extend`` with pieces of columns, or ``add`` one event; ``build`` once.

    Starts are given on the file's own clock as int64 ns; ``build`` moves them so that the first event starts at 0 and
    says so in ``TraceInfo.origin_ns``.
    """

    def __init__(self) -> None:
        self._names = _Positions()
        self.name = self._names.__getitem__
        """Position of a name."""
        self._lanes: dict[Lane, int] = {}
        self._pieces: list[dict[str, Array]] = []
        self._single: dict[str, list[int]] = {name: [] for name in DTYPES}
        # One block from the start: orjson leaves a hole of kilobytes behind each of its small texts that lives on.
        self._blob = bytearray()
        self._lengths: list[int] = []
        self._problems: list[Problem] = []

    def lane(self, lane: Lane) -> int:
        """Position of a lane."""
        return self._lanes.setdefault(lane, len(self._lanes))

    def arg(self, text: bytes) -> int:
        """Position of an event's arguments, a JSON object as text."""
        self._blob += text
        self._lengths.append(len(text))
        return len(self._lengths) - 1

    def problem(self, reason: str, *, count: int = 1, offset: int = -1, example: str = "") -> None:
        """Something that was left out or mended; equal reasons are counted together."""
        self._problems.append(Problem(reason, count, offset, example))
        if len(self._problems) > 1000:
            self._problems = list(problems_of(self._problems))

    def add(
        self,
        start: int,
        duration: int,
        name: str,
        kind: str,
        lane: Lane,
        *,
        correlation: int = -1,
        nbytes: int = -1,
        arg: int = -1,
    ) -> None:
        """One event."""
        values = (start, duration, self.name(name), KIND[kind], self.lane(lane), correlation, nbytes, arg)
        for column, value in zip(self._single.values(), values, strict=True):
            column.append(value)

    def extend(self, **columns: Sequence[int] | Array) -> None:
        """Many events: a sequence for each of ``DTYPES``, all of one length. ``correlation``, ``nbytes`` and ``arg``
        may be left out."""
        length = len(columns["start"])
        piece = {name: np.asarray(columns[name], dtype) for name, dtype in DTYPES.items() if name in columns}
        for name in DTYPES.keys() - piece.keys():
            piece[name] = np.full(length, -1, DTYPES[name])
        self._pieces.append(piece)

    def build(self, info: TraceInfo) -> Trace:
        """The Trace. ``info.origin_ns`` is what to add to the builder's clock to get ``info.clock``'s."""
        if self._single["start"]:
            self.extend(**self._single)
        columns = {
            name: np.concatenate([piece[name] for piece in self._pieces]) if self._pieces else np.empty(0, dtype)
            for name, dtype in DTYPES.items()
        }
        self._pieces.clear()
        order = np.lexsort((-columns["duration"], columns["start"]))
        for name in DTYPES:
            columns[name] = columns[name][order]
        first = int(columns["start"][0]) if len(order) else 0
        columns["start"] -= first
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, out=offsets[1:])
        blob, self._blob = self._blob, bytearray()
        return Trace(
            info=dataclasses.replace(info, origin_ns=info.origin_ns + first),
            names=tuple(self._names),
            lanes=tuple(self._lanes),
            **columns,
            store=ArgStore(blob, offsets),
            problems=problems_of(self._problems),
        )
