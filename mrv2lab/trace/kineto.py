"""Events of a Chrome trace, as torch's profiler and its like write them -> columns of a Trace."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from mrv2lab.trace import microseconds
from mrv2lab.trace.builder import DTYPES, TraceBuilder
from mrv2lab.trace.categories import (
    CATEGORY_KIND,
    DEVICE_CATEGORIES,
    DEVICE_ROLE,
    KINETO_CATEGORIES,
    PHASE_PREFIX,
)
from mrv2lab.trace.json_chunks import Piece
from mrv2lab.trace.kineto_args import Arguments
from mrv2lab.trace.kineto_lanes import LaneTable, Row, integer, own_correlations, size
from mrv2lab.trace.kineto_quick import COPIES, QuickReader
from mrv2lab.trace.trace import KIND, Trace, TraceInfo

Array = np.ndarray[Any, Any]

_TIMES = re.compile(rb'("(?:ts|dur)"\s*:\s*)(-?\d[\d.eE+-]*)')
_NO_CORRELATION = 0xFFFFFFFF
_UNTOLD = object()
"""In the place of an id that is not there; null is one that says nothing."""
_OTHER, _ANNOTATION, _PHASE, _RUNTIME = (KIND[kind] for kind in ("other", "annotation", "phase", "runtime"))
_INSTANT, _COUNTER, _OVERHEAD = (KIND[kind] for kind in ("instant", "counter", "overhead"))
_INSTANTS, _FLOWS = frozenset("iIR"), frozenset("stf")
_ASYNCHRONOUS = frozenset("bneSF")
_LATER_COLUMNS = ("name", "kind", "lane", "correlation", "nbytes", "arg")
_UNFINISHED = "events that were never finished (no length, a negative one, or one of months), drawn with length 0"

# One event's columns: start, duration (both as in the file), name, kind, lane, correlation, nbytes, arg; and which
# event of the piece it is.
_Values = tuple[object, object, int, int, int, int, int, int, int]


class KinetoEvents:
    """``add`` the pieces of a file, ``build`` once."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self._name = self.builder.name
        self.lanes = LaneTable()
        self.counts: Counter[str] = Counter()
        """Events that become no row, by what they are."""
        self.kineto = False
        """A category of torch's profiler was seen."""
        self._rows: dict[tuple[object, ...], Row] = {}
        self._columns: list[dict[str, Array]] = []
        self._values: list[_Values] = []
        self._open: dict[tuple[object, ...], list[dict[str, Any]]] = {}
        self._piece = Piece([], b"", 0)
        self._index = 0  # of the event in the piece
        self._args = Arguments()
        self._quick = QuickReader(self._name, self._args, self.lanes, self._row)
        self._told: set[str] = set()
        self._homeless: set[int] = set()  # lanes of events without pid or tid
        self._by_type: dict[str, Callable[[dict[str, Any]], None]] = {
            **dict.fromkeys(_INSTANTS, self._instant),
            **dict.fromkeys(_FLOWS, self._flow),
            "X": self._complete,
            "B": self._begin,
            "E": self._end,
            "b": self._begin,
            "e": self._end,
            "n": self._instant,
            "S": self._begin,
            "F": self._end,
            "C": self._counter,
            "M": self._metadata,
        }

    def __len__(self) -> int:
        return sum(len(piece["start"]) for piece in self._columns)

    def add(self, piece: Piece) -> None:
        """The events of one piece."""
        self._piece = piece
        events = piece.events
        try:
            exact = microseconds.is_exact([event["ts"] for event in events])
        except (KeyError, TypeError, IndexError):
            exact = microseconds.is_exact(
                [event["ts"] for event in events if type(event) is dict and event.get("ts") is not None]
            )
        if not exact:
            # A double has lost the nanoseconds already: the digits are taken from the text.
            parts = _TIMES.split(piece.text)
            parts[2::3] = [b'"' + number + b'"' for number in parts[2::3]]
            quoted = orjson.loads(b"[" + b"".join(parts) + b"]")
            for event, texts in zip(events, quoted, strict=True):
                if type(event) is dict:
                    event.update({key: texts[key] for key in ("ts", "dur") if key in texts})
        by_type, complete = self._by_type, self._complete
        for self._index, event in enumerate(events):
            if type(event) is not dict:
                self._problem("entries that are no events, left out", event)
                continue
            kind = event.get("ph")
            read = complete if kind == "X" else by_type.get(kind, self._unread) if type(kind) is str else self._unread
            try:
                read(event)
            except TypeError:  # a list or an object where a number or a text belongs
                self._problem("ids that are neither numbers nor texts, read as texts", event)
                read(_with_plain_ids(event))
        self._flush()

    def quick(self, text: bytes) -> bool:
        """The events of a piece, a JSON array, without ``add``; False with nothing read if ``add`` must read them."""
        found = self._quick.read(text)
        if found is None:
            return False
        if len(found.columns["start"]):
            self._columns.append(_without_no_correlation(found.columns))
        for one in found.metadata:
            self._describe(one.name, one.pid, one.tid, one.args)
        if found.arrows:
            self.counts["flow arrows"] += found.arrows
        return True

    # -- one event

    def _complete(self, event: dict[str, Any]) -> None:
        get = event.get
        category, args, name = get("cat"), get("args"), get("name")
        correlation = nbytes = arg = -1
        pid, tid = get("pid"), get("tid")
        # With the types: 1, 1.0 and True are one key, and different ids.
        key: tuple[object, ...] = (category, pid, type(pid), tid, type(tid))
        if args:
            if type(args) is not dict:
                args = {"args": args}
            correlation = args.get("correlation", -1)
            if type(correlation) is not int:
                correlation = integer(correlation)
            if category in DEVICE_CATEGORIES:
                device, stream = args.get("device", _UNTOLD), args.get("stream", _UNTOLD)
                key = (*key, device, type(device), stream, type(stream))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._row(event, args)
        if args:
            arg = self._args.add(args)
        if type(name) is not str:
            name = self._odd_name(name)
        kind = row.kind
        if kind in COPIES and args:
            nbytes = size(args.get("bytes", args.get("Bytes", args.get("nbytes"))))
        elif kind == _ANNOTATION and name.startswith(PHASE_PREFIX):
            kind = _PHASE
        self._values.append(
            (
                get("ts"),
                get("dur"),
                self._name(name),
                kind,
                row.lane,
                correlation,
                nbytes,
                arg,
                self._index,
            )
        )

    def _row(self, event: dict[str, Any], args: dict[str, Any] | None) -> Row:
        """The kind and the lane of events like this one."""
        category, pid, tid = event.get("cat"), event.get("pid"), event.get("tid")
        kind = CATEGORY_KIND.get(category, _OTHER) if category else _OTHER
        self.kineto = self.kineto or category in KINETO_CATEGORIES
        if kind in DEVICE_ROLE:
            return Row(kind, self.lanes.device(pid, tid, args or {}, kind))
        if kind == _OVERHEAD:
            return Row(kind, self.lanes.host(pid, tid, "profiler overhead"))
        beside = category == "Trace" or event["ph"] in _ASYNCHRONOUS
        lane = self.lanes.host(pid, tid, f"{pid} {tid}" if beside else None)
        if pid is None or tid is None:
            self._homeless.add(lane)
        return Row(kind, lane)

    def _begin(self, event: dict[str, Any]) -> None:
        self._open.setdefault(_pair(event), []).append(event)

    def _end(self, event: dict[str, Any]) -> None:
        waiting = self._open.get(_pair(event))
        if not waiting:
            self.counts["ends without a beginning"] += 1
            self._problem("ends without a beginning, left out", event)
            return
        begun = waiting.pop()
        start, end = microseconds.nanoseconds(begun.get("ts")), microseconds.nanoseconds(event.get("ts"))
        length = None if start is None or end is None else _text_us(end - start)
        args = begun.get("args"), event.get("args")
        if isinstance(args[1], dict):
            begun = {**begun, "args": {**(args[0] if isinstance(args[0], dict) else {}), **args[1]}}
        self._range(begun, length)

    def _range(self, begun: dict[str, Any], length: int | str | None) -> None:
        self._complete(_with_plain_ids({**begun, "dur": length, **_asynchronous_row(begun)}))

    def _instant(self, event: dict[str, Any]) -> None:
        event = {**event, **_asynchronous_row(event)}
        label = f"{event.get('pid')} {event['tid']}" if event["ph"] in _ASYNCHRONOUS else None
        self._moment(event, self.lanes.host(event.get("pid"), event.get("tid"), label), _INSTANT)

    def _counter(self, event: dict[str, Any]) -> None:
        name = " ".join(str(event[key]) for key in ("name", "id") if event.get(key) is not None)
        self._moment(event, self.lanes.counter(event.get("pid"), name), _COUNTER)

    def _moment(self, event: dict[str, Any], lane: int, kind: int) -> None:
        args, name = event.get("args"), event.get("name")
        text = name if isinstance(name, str) else self._odd_name(name)
        arg = self._args.add(args if isinstance(args, dict) else {"args": args}) if args else -1
        self._values.append((event.get("ts"), 0, self.builder.name(text), kind, lane, -1, -1, arg, self._index))

    def _metadata(self, event: dict[str, Any]) -> None:
        self._describe(event.get("name"), event.get("pid"), event.get("tid"), event.get("args"))

    def _describe(self, name: object, pid: object, tid: object, args: object) -> None:
        self.counts["metadata events"] += 1
        if isinstance(args, dict):
            self.lanes.describe(pid, tid, str(name), args)

    def _flow(self, event: dict[str, Any]) -> None:
        self.counts["flow arrows"] += 1

    def _unread(self, event: dict[str, Any]) -> None:
        kind = event.get("ph")
        self.counts["events of other types"] += 1
        reason = "without a type (ph)" if kind is None else f"of type {str(kind)[:10]!r}, which is not read"
        self._problem(f"events {reason}, left out", event)

    def _odd_name(self, name: object) -> str:
        if name is not None:
            return str(name)
        self._problem("events without a name, called 'unnamed'")
        return "unnamed"

    def _problem(self, reason: str, event: object = None, *, count: int = 1, index: int | None = None) -> None:
        """Of the event at hand, or of the one at ``index`` in the piece."""
        index = self._index if index is None else index
        if event is None and index < len(self._piece.events):
            event = self._piece.events[index]
        offset = -1
        if self._piece.text and reason not in self._told:
            self._told.add(reason)
            offset = self._piece.offset_of(index)
        self.builder.problem(reason, count=count, offset=offset, example="" if event is None else str(event)[:80])

    # -- columns

    def _flush(self) -> None:
        if not self._values:
            return
        self._args.pack()
        starts, durations, *rest, indices = zip(*self._values, strict=True)
        self._values.clear()
        piece = {"start": microseconds.column(starts), "duration": microseconds.column(durations)}
        for column, values in zip(_LATER_COLUMNS, rest, strict=True):
            piece[column] = _whole(values).astype(DTYPES[column], copy=False)
        piece = _without_no_correlation(piece)
        untimed = np.flatnonzero(piece["start"] < microseconds.EARLIEST_NS)  # BAD is
        if len(untimed):
            self.counts["events without a time"] += len(untimed)
            self._problem("events without a time, left out", count=len(untimed), index=indices[untimed[0]])
            piece = {column: np.delete(values, untimed) for column, values in piece.items()}
            indices = tuple(np.delete(indices, untimed).tolist())
        unfinished = np.flatnonzero((piece["duration"] < 0) | (piece["duration"] > microseconds.LONGEST_NS))
        if len(unfinished):
            self._problem(_UNFINISHED, count=len(unfinished), index=indices[unfinished[0]])
            piece["duration"][unfinished] = 0
        self._columns.append(piece)

    def finish(self) -> int:
        """After the last piece: ranges that never ended get length 0 and are a problem. Returns the earliest time in
        ns, 0 without events."""
        self._piece = Piece([], b"", 0)
        for waiting in self._open.values():
            for event in waiting:
                self.builder.problem("ranges that never ended, drawn with length 0", example=str(event)[:80])
                self._range(event, 0)
        self._open.clear()
        self._flush()
        if self._homeless:
            lost = sum(int(np.isin(piece["lane"], list(self._homeless)).sum()) for piece in self._columns)
            self.builder.problem("events without pid or tid", count=lost)
        return min((int(piece["start"].min()) for piece in self._columns if len(piece["start"])), default=0)

    def build(self, info: TraceInfo) -> Trace:
        """The Trace."""
        self.lanes.rank = info.rank
        lanes = self.lanes.lanes()
        places = np.zeros(len(lanes), np.int32)
        for place in self.lanes.sorted_places():
            places[place] = self.builder.lane(lanes[place])
        unknown = own_correlations(self._columns, self.lanes, _RUNTIME)
        if unknown:
            reason = "device work whose correlation id several processes use: no telling which launched it"
            self.builder.problem(reason, count=unknown)
        while self._columns:
            piece = self._columns.pop(0)
            piece["lane"] = places[piece["lane"]]
            self.builder.extend(**piece)
        trace = self.builder.build(info)
        return dataclasses.replace(trace, store=self._args.store())


def _without_no_correlation(piece: dict[str, Array]) -> dict[str, Array]:
    """With -1 for what profilers write where there is none."""
    known = piece["correlation"]
    known[(known <= 0) | (known == _NO_CORRELATION)] = -1
    return piece


def _pair(event: dict[str, Any]) -> tuple[str, ...]:
    """What beginning and end of a range share: the thread, or category and id of an asynchronous one."""
    if event["ph"] in _ASYNCHRONOUS:
        return str(event.get("pid")), str(event.get("cat")), str(event.get("id", event.get("id2")))
    return str(event.get("pid")), str(event.get("tid"))


def _asynchronous_row(event: dict[str, Any]) -> dict[str, Any]:
    """What puts an asynchronous event in a row of its category."""
    return {"tid": f"{event.get('cat')} (asynchronous)"} if event["ph"] in _ASYNCHRONOUS else {}


def _with_plain_ids(event: dict[str, Any]) -> dict[str, Any]:
    odd = {key: str(value) for key, value in event.items() if isinstance(value, (list, dict)) and key != "args"}
    plain, args = {**event, **odd}, event.get("args")
    if isinstance(args, dict):
        ids = {key: str(args[key]) for key in ("device", "stream") if isinstance(args.get(key), (list, dict))}
        plain["args"] = {**args, **ids}
    return plain


def _whole(values: tuple[int, ...]) -> Array:
    """[n] int64; -1 for what is no int64."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([value if abs(value) < 1 << 62 else -1 for value in values], np.int64)


def _text_us(nanoseconds: int) -> str:
    """Exact decimal microseconds."""
    sign, whole = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{whole // 1000}.{whole % 1000:03}"
