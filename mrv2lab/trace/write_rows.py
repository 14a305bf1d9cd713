"""Rows of a written trace: pid, tid and names of each lane, and where overlapping slices of a stream go.

Slices of one row must nest: Perfetto before June 2026 drops what does not, kernels of a programmatic launch among
them. They go to a row beside it, ``overlap of stream 7``, which readers still take for stream 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import orjson

from mrv2lab.trace.trace import KIND, Lane, Trace

Array = np.ndarray[Any, Any]

UNSLICED: tuple[int, ...] = (KIND["instant"], KIND["counter"])
"""Kinds that are no slices."""


def json_text(value: Any) -> bytes:
    """JSON of a value; text that is no valid Unicode comes out with replacement characters."""
    try:
        return orjson.dumps(value)
    except TypeError:
        if isinstance(value, str):
            return orjson.dumps(value.encode("utf-8", "replace").decode())
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)


def identifier(text: str) -> int | str:
    """A pid or tid as the file had it: a number where it reads like one."""
    digits = text.removeprefix("-")
    plain = digits.isascii() and digits.isdigit() and len(digits) < 16 and str(int(text)) == text
    return int(text) if plain else text


def overflow(trace: Trace) -> Array:
    """[n] int64: for each event the row beside its lane's that it must go to, 1 and more; 0: its own row."""
    found = np.zeros(len(trace), np.int64)
    lanes = trace.lanes
    rows: dict[tuple[str, str], list[int]] = {}
    for place, lane in enumerate(lanes):
        if lane.device >= 0 and lane.stream >= 0:
            rows.setdefault((lane.process, lane.thread), []).append(place)
    slices = ~np.isin(trace.kind, UNSLICED)
    for places in rows.values():
        events = np.flatnonzero(np.isin(trace.lane, places) & slices)
        if len(events):
            found[events] = _levels(trace.start[events], trace.end[events])
    return found


def _levels(start: Array, end: Array) -> Array:
    """The first row, 0, 1, .., in which each slice nests with those before it."""
    level = np.zeros(len(start), np.int64)
    reach = np.maximum.accumulate(end)[:-1]
    if not ((start[1:] < reach) & (start[1:] < end[1:])).any():
        return level  # one behind the other, as on most streams
    open_ends: list[list[int]] = []
    for place, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        row = 0
        while True:
            if row == len(open_ends):
                open_ends.append([])
            stack = open_ends[row]
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or until <= stack[-1]:
                break
            row += 1
        open_ends[row].append(until)
        level[place] = row
    return level


class Rows:
    """pid and tid of a trace's rows."""

    def __init__(self, trace: Trace) -> None:
        self.lanes = trace.lanes
        self._hosts = {lane.process for lane in trace.lanes if lane.role == "thread"}

    def tid(self, lane: Lane, level: int) -> str:
        """The row of a lane, or the one beside it for what overlaps."""
        numbered = lane.stream >= 0 and lane.thread == str(lane.stream)
        if level and lane.stream >= 0:
            return f"overlap{f' {level}' if level > 1 else ''} of stream {lane.stream}"
        # Beside threads of its process a bare number might be one of theirs.
        return f"stream {lane.stream}" if numbered and lane.process in self._hosts else lane.thread

    def metadata(self, used: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Names and order of processes and threads. ``used``: (lane, level) of every row."""
        processes: dict[str, int] = {}
        threads: dict[tuple[str, str], int] = {}
        rows: dict[tuple[str, str], tuple[Lane, int]] = {}
        for place, level in used:
            lane = self.lanes[place]
            row = (lane.process, self.tid(lane, level))
            if lane.role != "counter" and (row not in rows or lane.role == "stream"):
                rows[row] = lane, level  # a stream shares its row with its annotations; a counter's is its name
        for (pid, tid), (lane, level) in rows.items():
            process, thread = _names(lane)
            if pid not in processes:
                processes[pid] = len(processes)
                if process:
                    yield _entry("process_name", pid, "", "name", process)
                yield _entry("process_sort_index", pid, "", "sort_index", len(processes) - 1)
            if level:
                thread = f"{thread or lane.thread}, {tid.partition(' of ')[0]}"
            if thread:
                yield _entry("thread_name", pid, tid, "name", thread)
            order = threads.setdefault((pid, lane.thread), sum(process == pid for process, _ in threads))
            yield _entry("thread_sort_index", pid, tid, "sort_index", order)


def _entry(what: str, process: str, thread: str, key: str, value: str | int) -> bytes:
    entry = {"ph": "M", "name": what, "pid": identifier(process), "tid": identifier(thread) if thread else 0}
    return json_text(entry | {"args": {key: value}})


def _names(lane: Lane) -> tuple[str, str]:
    """Names of a lane's process and thread; empty: the file said none. A reader puts labels together from these."""
    number = isinstance(identifier(lane.process), int)
    if lane.role != "thread":
        return (f"GPU {lane.device}" if number and lane.device >= 0 else "" if number else lane.process), lane.label
    label = lane.label.removesuffix(f" (process {lane.process}, {lane.thread})")
    before, between, thread = label.partition(f" {lane.process}: ")
    process = before if between else ""
    thread = thread if between else label
    if not number and not process:
        process = lane.process
    if thread == f"thread {lane.thread}":
        thread = ""
    elif not thread and not isinstance(identifier(lane.thread), int):
        thread = lane.thread
    return ("" if process == "process" else process), thread
