"""The rows of a Chrome trace: processes, threads and streams by what the file calls them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from mrv2lab.trace.categories import DEVICE_ROLE
from mrv2lab.trace.trace import KIND, Lane

Array = np.ndarray[Any, Any]

_STREAM = re.compile(r"(?:.*\D)?stream\s*(\d+)", re.IGNORECASE)
_NO_ID = 0xFFFFFFFF
_MAX_SIZE = 1 << 62
_DEVICES = 256
"""A larger number is the id of a process, not of a device."""
_SPANS = ("Spans", "Traces")
_SUFFIX = {KIND["gpu_annotation"]: " annotations", KIND["sync"]: " sync", KIND["event"]: " events"}


class Row(NamedTuple):
    """What events with the same category and ids share."""

    kind: int
    lane: int


def integer(value: object) -> int:
    """A whole number, also written as a text; -1 for anything else."""
    if isinstance(value, bool):
        return -1
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return -1
    return -1


def size(value: object) -> int:
    """Bytes; -1 for no number, or for one whose sums would leave int64."""
    found = integer(value)
    return found if abs(found) < _MAX_SIZE else -1


def _id(value: object) -> int:
    """A device's or stream's id; -1 for none."""
    found = integer(value)
    return found if 0 <= found < _NO_ID else -1


class LaneTable:
    """Lanes get their places while the file is read and their labels afterwards, when the metadata are known."""

    def __init__(self) -> None:
        self.rank = -1
        self._places: dict[Lane, int] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._order: dict[tuple[str, str], int] = {}

    def device(self, pid: object, tid: object, args: dict[str, Any], kind: int) -> int:
        """Place of device work. The arguments rule: rows are also made up, for graphs and for synchronisations."""
        device = _id(args["device"]) if "device" in args else _id(pid)
        device = device if device < _DEVICES else -1
        if "stream" in args:
            stream = _id(args["stream"])
        else:
            named = _STREAM.fullmatch(tid) if isinstance(tid, str) else None
            stream = _id(named[1] if named else tid)
        role = DEVICE_ROLE[kind]
        thread = str(stream) if stream >= 0 else _text(tid)
        where = f"GPU {device}" if device >= 0 else _text(pid) or "GPU"
        label = f"{where} stream {stream}" if stream >= 0 else f"{where} {thread if role == 'stream' else ''}".strip()
        return self._place(Lane(_text(pid), thread, role, device, stream, label=label + _SUFFIX.get(kind, "")))

    def host(self, pid: object, tid: object, label: str | None = None) -> int:
        """Place of a thread's events; with a label, of what a profiler draws beside the threads."""
        process, thread = _text(pid), _text(tid)
        if label is None and process and process not in _SPANS:
            return self._place(Lane(process, thread))
        return self._place(Lane(process, thread, "other", label=label or f"{process} {thread}".strip() or "unnamed"))

    def counter(self, pid: object, name: str) -> int:
        """Place of a counter's values."""
        return self._place(Lane(_text(pid), name, "counter", label=name or "counter"))

    def describe(self, pid: object, tid: object, what: str, args: dict[str, Any]) -> None:
        """One metadata event."""
        process, thread = _text(pid), _text(tid)
        if what == "process_name" and args.get("name"):
            self._names[process, ""] = _text(args["name"])
        elif what == "thread_name" and args.get("name"):
            self._names[process, "=" + thread] = _text(args["name"])
        elif what == "process_sort_index":
            self._order[process, ""] = integer(args.get("sort_index"))
        elif what == "thread_sort_index":
            self._order[process, "=" + thread] = integer(args.get("sort_index"))

    def processes(self) -> list[str]:
        """Of each place, the process."""
        return [lane.process for lane in self._places]

    def lanes(self) -> list[Lane]:
        """All, by place, with labels that tell them apart."""
        threads = [lane for lane in self._places if lane.role == "thread"]
        several = len({lane.process for lane in threads}) > 1
        lanes = [self._labelled(lane, several) for lane in self._places]
        often = Counter(lane.label for lane in lanes)
        return [
            dataclasses.replace(lane, label=f"{lane.label} (process {lane.process}, {lane.thread})")
            if often[lane.label] > 1
            else lane
            for lane in lanes
        ]

    def sorted_places(self) -> list[int]:
        """Places as the file wants its rows sorted: processes by their index, threads by theirs."""

        def key(place: int) -> tuple[int, int, int]:
            lane = lanes[place]
            return (
                self._order.get((lane.process, ""), 0),
                self._order.get((lane.process, "=" + lane.thread), 0),
                place,
            )

        lanes = list(self._places)
        return sorted(range(len(lanes)), key=key)

    def _labelled(self, lane: Lane, several: bool) -> Lane:
        label = lane.label
        if lane.role == "thread":
            label = self._names.get((lane.process, "=" + lane.thread)) or f"thread {lane.thread}".strip()
            if several:
                name = self._names.get((lane.process, ""), "process")
                label = f"{name} {lane.process}: {label}"
        return dataclasses.replace(lane, label=label, rank=self.rank)

    def _place(self, lane: Lane) -> int:
        return self._places.setdefault(lane, len(self._places))


def _text(value: object) -> str:
    return "" if value is None else str(value)


def own_correlations(pieces: list[dict[str, Array]], lanes: LaneTable, runtime: int) -> int:
    """Makes ``correlation`` unique where several processes of the file launch work; how many could not be told.

    Ids that one process alone uses stay as they are. For an id of several, device work belongs to the process of its
    row, or to the only one that unmistakably owns other work of that row's process; else to nobody.
    """
    texts = lanes.processes()
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    process_of = np.array([numbers[text] for text in texts], np.int64)
    launches = []
    for piece in pieces:
        calls = (piece["kind"] == runtime) & (piece["correlation"] >= 0)
        launches.append(np.stack([piece["correlation"][calls], process_of[piece["lane"][calls]]]))
    if not launches:
        return 0
    pairs = np.concatenate(launches, axis=1)
    launching = np.unique(pairs[1])
    if len(launching) < 2:
        return 0
    ids, owners = np.unique(pairs, axis=1)
    single, place, users = np.unique(ids, return_index=True, return_counts=True)
    owner_of = np.where(users == 1, owners[place], -1)
    shared = single[users > 1]
    # Device process -> the host processes that own work of it beyond doubt.
    seen: dict[int, set[int]] = {}
    for piece in pieces:
        rows = np.flatnonzero(np.isin(piece["kind"], list(DEVICE_ROLE)) & np.isin(piece["correlation"], single))
        owner = owner_of[np.searchsorted(single, piece["correlation"][rows])]
        for device, host in np.unique(np.stack([process_of[piece["lane"][rows]], owner])[:, owner >= 0], axis=1).T:
            seen.setdefault(int(device), set()).add(int(host))
    resolved = np.full(len(numbers), -1, np.int64)
    for number in range(len(numbers)):
        hosts = {number} if number in launching else seen.get(number, set())
        resolved[number] = next(iter(hosts)) if len(hosts) == 1 else -1
    unknown = 0
    for piece in pieces:
        rows = np.flatnonzero(np.isin(piece["correlation"], shared))
        owner = resolved[process_of[piece["lane"][rows]]]
        unknown += int((owner < 0).sum())
        piece["correlation"][rows] = np.where(owner < 0, -1, piece["correlation"][rows] + ((owner + 1) << 40))
    return unknown
