"""The steps of a trace, and which step every event belongs to.

A step is a named range of the host (:mod:`mrv2lab.trace.annotations`). Host events belong to it by containment in its
process; device work belongs to the step in whose range its launch lies, never to the range it runs in: a host that runs
ahead launches a step long before the device begins it. A range projected onto the device is not a step. A recording
of ours says of every event which step it is of, and that is believed: its steps overlap where a step's output is waited
for after the next one was launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.annotations import SOURCES, StepName, parse_step
from mrv2lab.trace.copy_kinds import DIRECTIONS, copy_kinds
from mrv2lab.trace.devices import NO_GPU
from mrv2lab.trace.host_threads import RECORDING_LANES
from mrv2lab.trace.intervals import union
from mrv2lab.trace.links import callers, links
from mrv2lab.trace.step_batches import with_batches
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

NAMED: tuple[str, ...] = (
    "number",
    "context_requests",
    "context_tokens",
    "generation_requests",
    "generation_tokens",
)
"""Columns of :func:`steps` that are missing (NA) where the name does not say them."""


def steps(trace: Trace) -> pd.DataFrame:
    """One row a step, in order of start.

    ``step`` (the range's name), ``number``, ``source`` (of :data:`SOURCES`), ``kind`` (prefill, decode, mixed,
    unknown), ``context_requests``, ``context_tokens``, ``generation_requests``, ``generation_tokens``, ``requests``,
    ``tokens`` (both halves together; nullable integers), ``event`` (the range's position in the trace), ``lane``,
    ``host_start_ns``, ``host_end_ns``, ``host_ns``, ``gpu_start_ns``, ``gpu_end_ns`` (-1: no device work), ``gpu_ns``
    (first start to last end), ``gpu_busy_ns`` (any of its work running), ``gpu_events``, ``gpu_events_inside`` (that
    ran within the host range), ``launches`` (host calls that own device work), ``bytes_h2d``, ``bytes_d2h`` (of copies
    whose size is known).

    Ranges of one name within another of that name in one process are the same step. Where several sources name steps,
    ``attrs["source"]`` says which was used. Without steps the frame is empty and ``attrs["cannot_say"]`` says why.
    """
    import pandas as pd

    events, names, source = _ranges(trace)
    notes: list[str] = []
    if source == "mrv2lab":
        names, notes = with_batches(trace, events, names)
    owner = _owners(trace, events)
    start, end = trace.start[events], trace.end[events]
    columns: dict[str, Any] = {
        "step": [trace.name_of(event) for event in events],
        "number": pd.array([name.number for name in names], "Int64"),
        "source": [name.source for name in names],
        "kind": [name.kind for name in names],
    }
    for column in NAMED[1:]:
        columns[column] = pd.array([getattr(name, column) for name in names], "Int64")
    for column in ("requests", "tokens"):
        together = columns[f"context_{column}"] + columns[f"generation_{column}"]
        columns[column] = pd.Series(together).fillna(
            pd.Series([getattr(name, column) for name in names], dtype="Int64")
        )
    columns |= {
        "event": events,
        "lane": [str(trace.lane_of(event)) for event in events],
        "host_start_ns": start,
        "host_end_ns": end,
        "host_ns": end - start,
        **_device(trace, owner, start, end),
    }
    frame = pd.DataFrame(columns)
    for column in ("step", "source", "kind", "lane"):
        frame[column] = frame[column].astype("str")
    frame.attrs["source"] = source
    frame.attrs["cannot_say"] = [*_cannot_say(trace, names, owner, end - start), *notes]
    return frame


def step_ranges(trace: Trace) -> Array:
    """[k] int64: positions in the trace of the ranges that are the rows of :func:`steps`."""
    return _ranges(trace)[0]


def step_of(trace: Trace, frame: pd.DataFrame | None = None) -> Array:
    """[n] int64: for every event the row of its step in ``frame`` (:func:`steps` of this trace, or some rows of it);
    -1: none. Of nested steps the innermost; of overlapping ones of two threads, that of the event's own thread."""
    events = step_ranges(trace) if frame is None else frame["event"].to_numpy(np.int64)
    return _owners(trace, events)


def _ranges(trace: Trace) -> tuple[Array, list[StepName], str]:
    """Positions of the outermost step ranges of the best source, what their names say, and the source ("" if none)."""
    is_range = trace.mask("annotation", "phase")
    parsed: list[StepName | None] = [None] * len(trace.names)
    for place in trace.names_in(is_range):
        parsed[place] = parse_step(trace.names[place])
    for source in SOURCES:
        of_source = np.array([name is not None and name.source == source for name in parsed] or [False])
        candidates = np.flatnonzero(is_range & of_source[trace.name])
        if not len(candidates):
            continue
        events, reach = [], dict[tuple[str, int, int], int]()
        for event in candidates.tolist():
            lane = trace.lane_of(event)
            key = (lane.process, lane.rank, int(trace.name[event]))
            end = int(trace.start[event] + trace.duration[event])
            if end > reach.get(key, -1):
                events.append(event)
                reach[key] = end
        names = [name for event in events if (name := parsed[int(trace.name[event])]) is not None]
        return np.array(events, np.int64), names, source
    return np.empty(0, np.int64), [], ""


def _owners(trace: Trace, ranges: Array) -> Array:
    """[n] int64: position in ``ranges`` (the step ranges' events) of every event's step."""
    owner = np.full(len(trace), -1, np.int64)
    if not len(ranges):
        return owner
    process = [(lane.process, lane.rank) for lane in trace.lanes]
    host = trace.by_lane(lambda lane: lane.role in ("thread", "other")) & ~trace.mask(*DEVICE_KINDS)
    rows = np.argsort(trace.start[ranges], kind="stable")
    for key in {process[lane] for lane in np.unique(trace.lane[ranges])}:
        here = np.array([one == key for one in process])
        events = np.flatnonzero(host & here[trace.lane])
        of_process = [int(row) for row in rows if here[trace.lane[ranges[row]]]]
        _contain(trace, events, ranges, of_process, owner)
        lanes = np.unique(trace.lane[ranges[of_process]])
        if len(lanes) > 1:
            for lane in lanes:
                own = [row for row in of_process if trace.lane[ranges[row]] == lane]
                _contain(trace, events[trace.lane[events] == lane], ranges, own, owner)
    _told(trace, ranges, owner)
    elsewhere = np.flatnonzero((owner < 0) & (trace.correlation >= 0))
    launch = callers(trace, elsewhere)
    owner[elsewhere[launch >= 0]] = owner[launch[launch >= 0]]
    return owner


def _told(trace: Trace, ranges: Array, owner: Array) -> None:
    """Give the events of a recording to the step that their arguments name."""
    recorded = trace.by_lane(lambda lane: lane.thread in RECORDING_LANES) & (trace.arg >= 0)
    if not recorded[ranges].any():
        return
    row_of = {}
    for row, event in enumerate(ranges.tolist()):
        lane, name = trace.lane_of(event), parse_step(trace.name_of(event))
        if name is not None:
            row_of[lane.process, lane.rank, name.number] = row
    for event in np.flatnonzero(recorded).tolist():
        if isinstance(number := trace.args(event).get("step"), int):
            lane = trace.lane_of(event)
            owner[event] = row_of.get((lane.process, lane.rank, number), -1)


def _contain(trace: Trace, events: Array, ranges: Array, rows: list[int], owner: Array) -> None:
    """Give ``events`` that start in a range of ``rows`` to it; both in order of start, later rows win."""
    starts, ends = trace.start[events], trace.end[events]
    begin, end = trace.start[ranges[rows]], trace.end[ranges[rows]]
    first, last = np.searchsorted(starts, begin), np.searchsorted(starts, end)
    for row, low, high, start, stop in zip(rows, first, last, begin, end, strict=True):
        encloses = (starts[low:high] == start) & (ends[low:high] > stop)
        owner[events[low:high][~encloses]] = row
        owner[ranges[row]] = row


def _device(trace: Trace, owner: Array, start: Array, end: Array) -> dict[str, Array]:
    """The columns about device work; k steps."""
    count = len(start)
    work = np.flatnonzero(trace.mask(*DEVICE_KINDS) & (owner >= 0))
    work = work[np.argsort(owner[work], kind="stable")]  # by step, then by start
    edges = np.searchsorted(owner[work], np.arange(count + 1))
    first, last, busy = np.full(count, -1, np.int64), np.full(count, -1, np.int64), np.zeros(count, np.int64)
    starts, ends = trace.start[work], trace.end[work]
    for row in range(count):
        mine = slice(edges[row], edges[row + 1])
        if edges[row] < edges[row + 1]:
            first[row], last[row] = starts[mine][0], ends[mine].max()
            busy[row] = union(starts[mine], ends[mine]).total_ns
    within = (starts >= start[owner[work]]) & (ends <= end[owner[work]])
    launches = np.flatnonzero((links(trace).work > 0) & (owner >= 0))
    return {
        "gpu_start_ns": first,
        "gpu_end_ns": last,
        "gpu_ns": last - first,
        "gpu_busy_ns": busy,
        "gpu_events": np.diff(edges).astype(np.int64),
        "gpu_events_inside": np.bincount(owner[work[within]], minlength=count).astype(np.int64),
        "launches": np.bincount(owner[launches], minlength=count).astype(np.int64),
        **_copied(trace, owner, count),
    }


def _copied(trace: Trace, owner: Array, count: int) -> dict[str, Array]:
    copies = copy_kinds(trace)
    found = {}
    for column, direction in (("bytes_h2d", "HtoD"), ("bytes_d2h", "DtoH")):
        events = copies.events[copies.direction == DIRECTIONS.index(direction)]
        events = events[(owner[events] >= 0) & (trace.nbytes[events] > 0)]
        found[column] = np.zeros(count, np.int64)
        np.add.at(found[column], owner[events], trace.nbytes[events])
    return found


def _cannot_say(trace: Trace, names: list[StepName], owner: Array, length: Array) -> list[str]:
    if not names:
        return [
            "no steps: no range is named by vLLM (execute_context_..), SGLang (step[..]), this project "
            "(mrv2lab.step#N) or torch.profiler (ProfilerStep#N; call profiler.step() once a step to record them)"
        ]
    said = []
    device = trace.mask(*DEVICE_KINDS)
    lost = int((device & (owner < 0) & (links(trace).launch < 0)).sum())
    if lost:
        said.append(
            f"{lost:,} of {int(device.sum()):,} pieces of device work belong to no step: their launch is not in the "
            "file (it came before the profiler started, or was cut from the file)"
        )
    outside = int((device & (owner < 0)).sum()) - lost
    if outside:
        said.append(f"{outside:,} pieces of device work were launched outside every step")
    empty = int((length == 0).sum())
    if empty:
        said.append(f"{empty:,} step ranges have no length (never ended?), so nothing belongs to them")
    if not device.any():
        said.append(NO_GPU)
    return said
