"""Typed events of a clean piece -> columns, with no step of Python for each event where it can be helped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from mrv2lab.trace import microseconds
from mrv2lab.trace.categories import DEVICE_CATEGORIES, PHASE_PREFIX
from mrv2lab.trace.kineto_args import Arguments
from mrv2lab.trace.kineto_lanes import LaneTable, Row, size
from mrv2lab.trace.kineto_typed import Args, Metadata, Typed, decoded, decoded_args
from mrv2lab.trace.trace import KIND

Array = np.ndarray[Any, Any]

COPIES = _MEMCPY, _MEMSET = KIND["memcpy"], KIND["memset"]
_ANNOTATION, _PHASE, _INSTANT = KIND["annotation"], KIND["phase"], KIND["instant"]
_OWNER = attrgetter("cat", "pid", "tid")


class Read(NamedTuple):
    """What a piece held."""

    columns: dict[str, Array]
    metadata: list[Metadata]
    arrows: int


class QuickReader:
    """``read`` takes a piece or refuses it; with the reader of single events it shares names, lanes and arguments."""

    def __init__(self, name: Callable[[str], int], args: Arguments, lanes: LaneTable, row: Callable[..., Row]) -> None:
        self._name = name
        self._args = args
        self._codes = _Codes(lanes, row)
        self._exact = False  # a double of this file's times would lose nanoseconds

    def read(self, text: bytes) -> Read | None:
        """The events of a JSON array; None with nothing read where anything in it is out of the ordinary."""
        found = self._timed(text)
        if found is None:
            return None
        events, start, duration = found
        given = decoded_args([event.args for event in events.timed])
        if given is None or not _in_order(start, duration):
            return None
        args, texts = given
        try:
            correlation = np.array([one.correlation for one in args], np.int64)
        except OverflowError:
            return None
        codes = self._codes.of(events.timed, args)
        kind, lane, is_moment = self._codes.columns(codes)
        correlation[is_moment] = -1
        names = [event.name for event in events.timed]
        for place in np.flatnonzero(kind == _ANNOTATION).tolist():
            if names[place].startswith(PHASE_PREFIX):
                kind[place] = _PHASE
        columns = {
            "start": start,
            "duration": duration,
            "name": np.fromiter(map(self._name, names), np.int32, len(names)),
            "kind": kind,
            "lane": lane,
            "correlation": correlation,
            "nbytes": _sizes(args, kind),
            "arg": self._kept(texts),
        }
        return Read(columns, events.metadata, events.arrows)

    def _timed(self, text: bytes) -> tuple[Typed, Array, Array] | None:
        """The events with their starts and durations in ns."""
        if not self._exact:
            events = decoded(text, exact=False)
            if events is None:
                return None
            starts = np.array([event.ts for event in events.timed], np.float64)
            if not len(starts) or np.abs(starts).max() < microseconds.EXACT_US:
                durations = np.array([event.dur for event in events.timed], np.float64)
                return events, microseconds.of_doubles(starts), microseconds.of_doubles(durations)
            self._exact = True
        events = decoded(text, exact=True)
        if events is None:
            return None
        start = microseconds.of_texts([event.ts for event in events.timed])
        duration = microseconds.of_texts([event.dur for event in events.timed])
        return None if start is None or duration is None else (events, start, duration)

    def _kept(self, texts: list[Any]) -> Array:
        """[n] int32: where each event's arguments are kept; -1: it has none."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        full = lengths > 2  # {}
        first = self._args.next
        self._args.add_texts(b"".join(compress(texts, full.tolist())), lengths[full])
        return np.where(full, first - 1 + np.cumsum(full), -1).astype(np.int32)


class _Codes(dict[tuple[object, ...], int]):
    """Numbers for what events share: category, process and thread, on a device also what the arguments say of it."""

    def __init__(self, lanes: LaneTable, row: Callable[..., Row]) -> None:
        super().__init__()
        self._lanes = lanes
        self._row = row
        self._rows: list[tuple[int, int, bool]] = []

    def of(self, events: list[Any], args: list[Args]) -> Array:
        """[n] int64: the number of each event's."""
        owners: list[tuple[object, ...]] = list(map(_OWNER, events))
        if not DEVICE_CATEGORIES.isdisjoint([event.cat for event in events]):
            for place, owner in enumerate(owners):
                if owner[0] in DEVICE_CATEGORIES:
                    owners[place] = (*owner, args[place].device, args[place].stream)
        return np.fromiter(map(self.__getitem__, owners), np.int64, len(owners))

    def columns(self, codes: Array) -> tuple[Array, Array, Array]:
        """[n] each: kind, lane, and whether it is a moment."""
        kinds, lanes, moments = zip(*self._rows, strict=True) if self._rows else ((), (), ())
        return np.array(kinds, np.uint8)[codes], np.array(lanes, np.int32)[codes], np.array(moments, bool)[codes]

    def __missing__(self, owner: tuple[object, ...]) -> int:
        category, pid, tid, *ids = owner
        if category is None:
            row = Row(_INSTANT, self._lanes.host(pid, tid))
        else:
            told = {name: value for name, value in zip(("device", "stream"), ids, strict=False) if value is not UNSET}
            row = self._row({"ph": "X", "cat": category, "pid": pid, "tid": tid}, told)
        self._rows.append((*row, category is None))
        code = self[owner] = len(self)
        return code


def _in_order(start: Array, duration: Array) -> bool:
    """Whether all events have a time, and a length that is one."""
    if not len(start):
        return True
    longest = microseconds.LONGEST_NS
    return bool(start.min() >= microseconds.EARLIEST_NS and duration.min() >= 0 and duration.max() <= longest)


def _sizes(args: list[Args], kind: Array) -> Array:
    """[n] int64: bytes of each copy; -1: no copy, or not told."""
    found = np.full(len(kind), -1, np.int64)
    for place in np.flatnonzero((kind == _MEMCPY) | (kind == _MEMSET)).tolist():
        one = args[place]
        found[place] = size(next((told for told in (one.bytes, one.Bytes, one.nbytes) if told is not UNSET), None))
    return found
