"""The chain of host time, launches, device work and waits that a step could not have been shorter than.

Walked backwards from the end: each piece of work began late because the work before it on its stream (or the work that
its stream waited for) ended late, or because its launch came late; a launch came late because of what the host did
before it; and where the host stood still, because of the work it waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mrv2lab.trace.devices import NO_GPU
from mrv2lab.trace.path_graph import PathGraph
from mrv2lab.trace.path_names import HOST, HostNames
from mrv2lab.trace.steps import step_of, steps
from mrv2lab.trace.trace import DEVICE_KINDS, Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd

RESOURCES: tuple[str, ...] = (
    "host",  # between launches and waits: named after what ran there, else after what it leads to
    "launch",  # inside a call that launches
    "device",  # kernels, memsets, graphs
    "copy",
    "wait",  # the host waited: until it was back after the work had ended, or all of it where the work is not known
    "queue",  # launched and not begun
    "unknown",  # the launch of what follows is not in the file
)
ADJACENT_NS = 5_000
"""A device needs 1 to 3 us from one piece of queued work to the next. Work that began within this time after the work
before it, and whose launch had begun by then, was held up by that work, not by the launch."""


class Segment(NamedTuple):
    """One row; ``lane`` is the host's, ``towards`` the call that a stretch of its time leads to."""

    resource: str
    name: str
    start: int
    end: int
    event: int
    lane: int = -1
    towards: int = -1


def critical_path(trace: Trace, step: int | str | None = None) -> pd.DataFrame:
    """One row a segment, in order of time, without gaps and overlaps: their durations add up to the length of the path.

    ``resource`` (of :data:`RESOURCES`), ``name``, ``start_ns``, ``end_ns``, ``duration_ns``, ``event`` (position in the
    trace; -1: none), ``lane``. ``step`` is a row number or a name of :func:`mrv2lab.trace.steps.steps`: from the start
    of its host range to the end of its last device work (of its host range if it has none). Without it the whole trace:
    from its first event to the end of the last device work. Work of an earlier step that the path leads through counts
    from the step's start on.

    Raises ``TraceError`` where there is no such step, or no event.
    """
    import pandas as pd

    start, end, last, host = _bounds(trace, step)
    walk = _Walk(trace, start)
    walk.back(end, last, host)
    segments = _named(trace, walk.segments[::-1])
    table = pd.DataFrame(segments, columns=list(Segment._fields)).drop(columns=["lane", "towards"])
    table = table.rename(columns={"start": "start_ns", "end": "end_ns"})
    table.insert(4, "duration_ns", table["end_ns"] - table["start_ns"])
    table["lane"] = [str(trace.lane_of(event)) if event >= 0 else "" for event in table["event"]]
    table = table.astype({"resource": "str", "name": "str", "lane": "str"})
    table.attrs["cannot_say"] = _cannot_say(trace, table, last)
    return table


def _bounds(trace: Trace, step: int | str | None) -> tuple[int, int, int, int]:
    """Start and end of the path, the device work that ends it (-1: none), and the lane of the host (-1)."""
    if not len(trace):
        raise TraceError(f"{trace.info.title}: holds no events, so there is no path through it")
    work = trace.mask(*DEVICE_KINDS)
    ends = trace.end
    if step is None:
        chosen, start, end, lane = np.flatnonzero(work), int(trace.start.min()), int(ends.max()), int(trace.lane[0])
    else:
        table = steps(trace)
        rows = np.flatnonzero(table["step"] == step) if isinstance(step, str) else [step]
        if len(rows) == 0 or not 0 <= rows[0] < len(table):
            raise TraceError(
                f"{trace.info.title}: no step {step!r} among its {len(table)} steps; steps(trace) lists their names"
            )
        row = table.iloc[int(rows[0])]
        chosen = np.flatnonzero(work & (step_of(trace, table) == rows[0]))
        start, end, lane = int(row["host_start_ns"]), int(row["host_end_ns"]), int(trace.lane[int(row["event"])])
    if not len(chosen):
        return start, end, -1, lane
    last = int(chosen[np.argmax(ends[chosen])])
    return start, int(ends[last]), last, lane


class _Walk:
    """``segments`` from the last to the first."""

    def __init__(self, trace: Trace, origin: int) -> None:
        self.trace = trace
        self.graph = PathGraph(trace)
        self.origin = origin
        self.segments: list[Segment] = []
        self._seen: set[int] = set()

    def _add(
        self, resource: str, name: str, start: int, end: int, event: int, lane: int = -1, towards: int = -1
    ) -> None:
        start = max(start, self.origin)
        if end > start:
            self.segments.append(Segment(resource, name, start, end, event, lane, towards))

    def back(self, now: int, work: int, lane: int) -> None:
        """From the moment ``now``, at the end of ``work``, or of host time on ``lane`` where ``work`` is -1."""
        towards = -1
        while now > self.origin:
            if work in self._seen:  # clocks that disagree could lead in a circle
                self._add("unknown", "the order of events contradicts itself", self.origin, now, -1)
                return
            if work >= 0:
                self._seen.add(work)
                now, work, towards = self._work(now, work)
                lane = int(self.trace.lane[towards]) if towards >= 0 else lane
                if work < 0 and towards < 0:
                    return
            else:
                now, work = self._host(now, lane, towards)

    # -- one piece of device work

    def _work(self, now: int, work: int) -> tuple[int, int, int]:
        """Where it leads: the moment, and the work before it, or the call that launched it."""
        trace, graph = self.trace, self.graph
        begin = min(int(trace.start[work]), now)
        kind = "copy" if trace.kind_of(work) == "memcpy" else "device"
        self._add(kind, trace.name_of(work), begin, now, work)
        before = graph.before(work)
        free = min(graph.end(before), begin) if before >= 0 else -1
        launch = graph.launch(work)
        if launch < 0:
            if before < 0:
                self._add("unknown", "its launch is not in the file", self.origin, begin, work)
                return self.origin, -1, -1
            near = begin - free <= ADJACENT_NS
            self._add("queue" if near else "unknown", "its launch is not in the file", free, begin, work)
            return free, before, -1
        called, back = min(int(trace.start[launch]), begin), min(graph.end(launch), begin)
        held = before >= 0 and (
            graph.launch(before) == launch or free >= back or (free > called and begin - free <= ADJACENT_NS)
        )
        if held:
            self._add("queue", "between two pieces of work", free, begin, work)
            return free, before, -1
        self._add("queue", "launched, not begun", back, begin, work)
        self._add("launch", trace.name_of(launch), called, back, launch)
        return called, -1, launch

    # -- host time

    def _host(self, now: int, lane: int, towards: int) -> tuple[int, int]:
        """Back to the wait before ``now``, and through it: the moment, and the work that was waited for (-1: none)."""
        trace, graph = self.trace, self.graph
        wait = graph.wait_before(lane, now)
        if wait is None or wait.end <= self.origin:
            self._stretch(self.origin, now, lane, towards)
            return self.origin, -1
        back = min(wait.end, now)
        self._stretch(back, now, lane, towards)
        name = trace.name_of(wait.event)
        ended = min(graph.end(wait.awaited), back) if wait.awaited >= 0 else -1
        if ended > wait.start and wait.awaited not in self._seen:
            self._add("wait", name, ended, back, wait.event)
            return ended, wait.awaited
        self._add("wait", name, wait.start, back, wait.event)
        return wait.start, -1

    def _stretch(self, start: int, end: int, lane: int, towards: int) -> None:
        """Host time with the launches in it, from its end to its start."""
        for call in self.graph.calls_within(lane, max(start, self.origin), end)[::-1]:
            begin, back = int(self.trace.start[call]), min(self.graph.end(call), end)
            if begin >= end:  # inside the call that was just added
                continue
            self._add("host", HOST, back, end, -1, lane, towards)
            self._add("launch", self.trace.name_of(call), begin, back, call)
            end, towards = begin, call
        self._add("host", HOST, start, end, -1, lane, towards)


def _named(trace: Trace, segments: list[Segment]) -> list[Segment]:
    """Host time, cut and named by what ran in it (:mod:`mrv2lab.trace.path_names`)."""
    names = HostNames(trace, [one.towards for one in segments if one.resource == "host" and one.towards >= 0])
    named = []
    for one in segments:
        if one.resource != "host":
            named.append(one)
            continue
        for start, end, name, event in names.pieces(one.start, one.end, one.lane, one.towards):
            named.append(one._replace(start=start, end=end, name=name, event=event))
    return named


def _cannot_say(trace: Trace, table: pd.DataFrame, last: int) -> list[str]:
    said = []
    if not trace.mask(*DEVICE_KINDS).any():
        said.append(NO_GPU)
    elif last < 0:
        said.append("the step launched no device work, so its path is host time")
    blind = table[(table["resource"] == "wait") & (table["duration_ns"] > ADJACENT_NS)]
    if len(blind):
        said.append(
            f"{len(blind):,} waits of together {blind['duration_ns'].sum() / 1e3:,.1f} us: the file does not say which "
            "work was waited for, or the host came back long after it, so the path stays on the host"
        )
    queued = table[(table["name"] == "launched, not begun") & (table["duration_ns"] > 10 * ADJACENT_NS)]
    if len(queued):
        said.append(
            f"{queued['duration_ns'].sum() / 1e3:,.1f} us between a launch and the start of its work, with nothing "
            "running before it on its stream: whether the device was busy with what is not in the file cannot be told"
        )
    unknown = int(table.loc[table["resource"] == "unknown", "duration_ns"].sum())
    if unknown:
        said.append(f"{unknown / 1e3:,.1f} us lead to work whose launch is not in the file")
    if trace.info.modelled:
        said.append("device times are modelled, so this path is the model's and no measurement")
    return said
