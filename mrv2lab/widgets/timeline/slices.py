"""Traces become slices in lanes: what the timeline draws, in the order in which it draws it.

A host thread holds events of several levels; each level is a lane of its own, so that Python frames, operators and
annotations do not lie through each other. Slices are sorted by lane, start and falling duration, which is what the
page's packing into rows relies on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrv2lab.trace.trace import DEVICE_KINDS, KIND, KINDS, Trace

Array = np.ndarray[Any, Any]

GROUPS = ("annotations", "phases", "Python", "calls", "moments", "device ranges", "streams", "counters")
"""Levels of a trace from top to bottom; a lane belongs to one."""
_GROUP = {name: index for index, name in enumerate(GROUPS)}
_OF_KIND = {
    "annotation": "annotations", "phase": "phases", "python": "Python", "instant": "moments", "counter": "counters",
    "gpu_annotation": "device ranges", "collective": "streams", "event": "streams",
    **dict.fromkeys(DEVICE_KINDS, "streams"),
}  # fmt: skip
_OF_ROLE = {"stream": "streams", "annotation": "device ranges", "counter": "counters"}
_SAID_BY = {"annotations": "annotations|steps", "device ranges": "annotations|phases"}
"""Last words of a lane that its group says already, where they are not the group's own."""
NO_EVENTS = "no events recorded"
NO_DEVICE = "no GPU activity recorded"


@dataclass(frozen=True)
class SliceLane:
    """A lane of the picture."""

    trace: int
    """Position among the traces."""
    lane: int
    """Position in the trace's lanes; -1: none, an empty lane that says why."""
    group: int
    """Position in GROUPS."""
    rank: int
    """Place among the lanes of its trace and group: lanes of two traces with equal group and rank belong together."""
    label: str
    """Short, what tells it from its neighbours first."""
    full: str
    """Group, process and thread, as the file names them."""
    empty: str = ""
    """Why there is nothing in it."""


@dataclass(frozen=True, eq=False)
class Slices:
    """Every event of every trace once; n slices."""

    lanes: tuple[SliceLane, ...]
    # [lanes + 1] int64: where each lane's slices begin
    offsets: Array
    # [n] float64: ns on the axis, exact below 2^53
    start: Array
    # [n] uint32, or float64 where one is longer than 4.29 s: ns
    duration: Array
    # [n] uint16 or uint32: position in names
    name: Array
    # [n] uint8: position in KINDS
    kind: Array
    # [n] int64: position in its trace
    event: Array
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start)

    def lane_of(self, index: int) -> SliceLane:
        """The lane that holds a slice."""
        return self.lanes[int(np.searchsorted(self.offsets, index, side="right")) - 1]

    def find(self, trace: int, event: int) -> int:
        """The slice of an event, -1 if there is none."""
        for index, lane in enumerate(self.lanes):
            if lane.trace == trace:
                first, last = self.offsets[index : index + 2]
                found = np.flatnonzero(self.event[first:last] == event)
                if len(found):
                    return int(first + found[0])
        return -1


def slices_of(traces: Sequence[Trace], offsets: Sequence[int]) -> Slices:
    """The slices of traces whose times are moved by ``offsets`` ns."""
    names: dict[str, int] = {}
    lanes: list[SliceLane] = []
    counts: list[int] = []
    # An empty piece of each column's type, so that no trace at all is fine too.
    parts: dict[str, list[Array]] = {
        "start": [np.empty(0, np.float64)],
        "duration": [np.empty(0, np.int64)],
        "name": [np.empty(0, np.uint32)],
        "kind": [np.empty(0, np.uint8)],
        "event": [np.empty(0, np.int64)],
    }
    for position, (trace, offset) in enumerate(zip(traces, offsets, strict=True)):
        trace_lanes, trace_counts, order = _lanes_of(trace, position)
        lanes += trace_lanes
        counts += trace_counts
        used = np.flatnonzero(np.bincount(trace.name, minlength=len(trace.names)))
        ids = np.zeros(max(len(trace.names), 1), np.uint32)
        ids[used] = [names.setdefault(trace.names[name], len(names)) for name in used]
        parts["start"].append((trace.start[order] + offset).astype(np.float64))
        parts["duration"].append(trace.duration[order])
        parts["name"].append(ids[trace.name[order]])
        parts["kind"].append(trace.kind[order])
        parts["event"].append(order)
    columns = {name: np.concatenate(part) for name, part in parts.items()}
    longest = int(columns["duration"].max(initial=0))
    return Slices(
        lanes=tuple(lanes),
        offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        start=columns["start"],
        duration=columns["duration"].astype(np.uint32 if longest < 2**32 else np.float64),
        name=columns["name"].astype(np.uint16 if len(names) <= 2**16 else np.uint32),
        kind=columns["kind"],
        event=columns["event"],
        names=tuple(names),
    )


def _lanes_of(trace: Trace, position: int) -> tuple[list[SliceLane], list[int], Array]:
    """A trace's lanes, how many slices each has, and its events in the order of the slices."""
    if not len(trace):
        return [SliceLane(position, -1, 0, 0, "events", "events", NO_EVENTS)], [0], np.empty(0, np.int64)
    table = np.array([[_group_of(lane.role, kind) for kind in KINDS] for lane in trace.lanes], np.int64)
    # One number for each pair of group and lane, small enough for a radix sort.
    key = table[trace.lane, trace.kind] * len(trace.lanes) + trace.lane
    found, number, count = np.unique(key, return_inverse=True, return_counts=True)

    def place(pair: int) -> tuple[int, int, int, int]:
        group, lane = divmod(int(found[pair]), len(trace.lanes))
        return group, trace.lanes[lane].device, trace.lanes[lane].stream, lane

    ranked = sorted(range(len(found)), key=place)
    rank = np.empty(len(found), np.uint16 if len(found) < 2**16 else np.int64)
    rank[ranked] = np.arange(len(found))
    rank_of = rank[number]
    end_to_end = (np.diff(trace.start) > 0) | ((np.diff(trace.start) == 0) & (np.diff(trace.duration) <= 0))
    if end_to_end.all():
        order = np.argsort(rank_of, kind="stable")
    else:  # a selection by positions may be in any order
        order = np.lexsort((-trace.duration, trace.start, rank_of))
    lanes: list[SliceLane] = []
    counts = [int(count[pair]) for pair in ranked]
    seen = [0] * len(GROUPS)
    pairs = [divmod(int(found[pair]), len(trace.lanes)) for pair in ranked]
    for (group, lane), (label, full) in zip(pairs, _labels(trace, pairs), strict=True):
        lanes.append(SliceLane(position, lane, group, seen[group], label, full))
        seen[group] += 1
    if not np.isin(trace.kind, [KIND[kind] for kind in DEVICE_KINDS]).any() and not seen[_GROUP["streams"]]:
        at = sum(seen[: _GROUP["streams"]])
        lanes.insert(at, SliceLane(position, -1, _GROUP["streams"], 0, "streams", "streams", NO_DEVICE))
        counts.insert(at, 0)
    return lanes, counts, order


def _group_of(role: str, kind: str) -> int:
    if kind == "gpu_annotation":
        return _GROUP["device ranges"]
    return _GROUP[_OF_ROLE.get(role) or _OF_KIND.get(kind, "calls")]


def _labels(trace: Trace, pairs: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    """Short and full label of each pair of group and lane. Words that all lanes share say nothing and are left out."""
    used = [trace.lanes[lane] for _, lane in pairs]
    one_device = len({one.device for one in used if one.device >= 0}) == 1
    one_process = len({one.process for one in used if one.role == "thread"}) == 1
    siblings = Counter(group for group, _ in pairs)
    made = []
    for (group, _), one in zip(pairs, used, strict=True):
        word, text = GROUPS[group], str(one)
        on_stream = word == "streams" and one.role == "stream"
        full = text if on_stream else f"{word} · {text}"
        if one_device:
            text = re.sub(r"^gpu \d+ (?=stream )", "", text, flags=re.IGNORECASE)
        if one.role == "thread" and one_process:
            text = text.removeprefix(one.process).lstrip(": ") or text
        text = re.sub(r"^(?:.*: )?thread (\d+)(?: \(.*\))?$", r"\1", text)
        text = re.sub(rf"[, ]+({_SAID_BY.get(word, word)})$", "", text)
        alone = siblings[group] == 1 and one.role in ("thread", "annotation") and word != "streams"
        label = text if on_stream else word if alone else f"{word} · {text}"
        device_time = trace.info.modelled and one.role in ("stream", "annotation") and "modelled" not in label
        made.append((label + " (modelled)" * device_time, full))
    twice = Counter(label for label, _ in made)
    return [(label if twice[label] == 1 else full, full) for label, full in made]
