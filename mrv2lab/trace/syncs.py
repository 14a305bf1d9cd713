"""Where the host or a stream waited, why, and what the wait was made of: five figures that are easily confused.

How long the runtime's call took, how long the caller of ``event.synchronize()`` was away, how long the device was still
busy with what was waited for, and how much was the profiler's own doing are four different answers to "how long is the
sync?", and what is left over is the fifth: unexplained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mrv2lab.trace.awaited import Awaited
from mrv2lab.trace.call_site import RANGES, frame
from mrv2lab.trace.intervals import Intervals, union
from mrv2lab.trace.mark_waits import mark_points, of_ours
from mrv2lab.trace.members import members
from mrv2lab.trace.sync_kinds import READING_OPS, plain
from mrv2lab.trace.sync_points import Finder, SyncPoint
from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

WORTH_SAYING_NS = 10_000
"""Unexplained time below this is how long Python takes to call a function under a profiler."""
_NOTHING_ELSE = ("device", "stream", "event", "python frame only")
"""Kinds of wait that do nothing but wait: operators do other things as well."""

_KNOWN: WeakKeyDictionary[Trace, tuple[list[SyncPoint], list[str]]] = WeakKeyDictionary()


def syncs(trace: Trace) -> pd.DataFrame:
    """One row a point where the host or a stream waited, in order of start. Times are int64 ns, -1: not recorded.

    ``kind`` (of ``sync_kinds.KINDS_OF_WAIT``), ``call`` (the API, operator or frame), ``api`` (the runtime's call that
    ``event`` and ``start_ns`` are of; empty: not recorded), and

    - ``api_ns``: the runtime's calls: of an operator that copies and waits, both;
    - ``frame_ns``: the innermost Python frame or operator that does nothing but wait; ``caller_ns``: the outermost one,
      which is what the caller sees;
    - ``gpu_wait_ns``: the part of the call in which work that it waited for was still running on the device; what that
      work is follows from the profiler's synchronisation records, or from the copy in the same operator;
    - ``overhead_ns``: the profiler's overhead within the caller's stretch (the call's, where there is no caller).
      No other column has it subtracted;
    - ``unexplained_ns``: the caller's stretch without calls and overhead; ``before_ns`` and ``after_ns`` say where it
      lies: in front of the (first) call and behind the (last) one. Between two calls is the rest.

    ``host_waits`` (False: a stream waited, an event was only asked for, or an asynchronous copy returned before it was
    done), ``site`` (``file:line`` where the innermost frame of the user was entered), ``caller`` (functions,
    ``outer > inner``), ``thread``, ``device`` and ``stream`` (-1: unknown), ``step`` (None: outside every step),
    ``barrier`` (vLLM's ``synchronize_input_prep`` or the phase ``barrier_wait``), ``event`` (position in the trace).
    """
    import pandas as pd

    if parts := members(trace):
        return _of_members(parts)
    found, cannot_say = points_of(trace)
    points = sorted(found, key=lambda point: int(trace.start[point.event]))
    event = np.array([point.event for point in points], np.int64)
    api = np.array([point.api_ns for point in points], np.int64)
    seen, inner = (_stretch(trace, [getattr(point, name) for point in points]) for name in ("outermost", "frame"))
    known = seen[1] >= 0
    overhead = _overhead(trace)
    begin = np.where(known, seen[0], trace.start[event])
    end = np.where(known, seen[0] + seen[1], trace.start[event] + np.maximum(api, trace.duration[event]))
    table = pd.DataFrame(
        {
            "kind": pd.array([point.kind for point in points], "str"),
            "call": pd.array([point.call for point in points], "str"),
            "api": pd.array([plain(trace.name_of(point.event)) if point.calls else "" for point in points], "str"),
            "start_ns": trace.start[event],
            "api_ns": api,
            "frame_ns": inner[1],
            "caller_ns": seen[1],
            "gpu_wait_ns": np.array([point.gpu_wait_ns for point in points], np.int64),
            "overhead_ns": overhead.length_within(begin, end),
            **_unexplained(trace, points, seen, overhead),
            "host_waits": np.array([bool(point.waits) for point in points], bool),
            "site": pd.array([point.site for point in points], "str"),
            "caller": pd.array([point.caller for point in points], "str"),
            "thread": pd.array([str(trace.lane_of(point.event)) for point in points], "str"),
            "device": np.array([point.device for point in points], np.int64),
            "stream": np.array([point.stream for point in points], np.int64),
            "step": pd.Series(_steps(trace, points), dtype=object),
            "barrier": np.array([point.barrier for point in points], bool),
            "event": event,
        }
    )
    table.attrs["cannot_say"] = [*cannot_say, *_cannot_say(trace, table)]
    return table


def blocked(trace: Trace, lane: int | None = None) -> Intervals:
    """The time in which a host thread (that of ``lane``, any without it) stood still in a wait: in the runtime's call,
    and where none was recorded, in the frame or the record."""
    events = waits_of(trace)
    events = events if lane is None else events[trace.lane[events] == lane]
    return union(trace.start[events], trace.start[events] + trace.duration[events])


def waits_of(trace: Trace) -> Array:
    """[k] int64: positions of the calls, frames and records in which the host stood still."""
    return np.array([event for point in points_of(trace)[0] for event in point.waits], np.int64)


def blocking(trace: Trace, start: Array, end: Array, lane: int | None = None) -> Array:
    """[m] int64: ns of each stretch ``[start[i], end[i])`` that the host spent in :func:`blocked`."""
    return blocked(trace, lane).length_within(start, end)


def frames(trace: Trace, name: str) -> pd.DataFrame:
    """Python frames by function name: one row a function so named in one file.

    ``file``, ``function``, ``calls``, ``total_ns``, ``overhead_ns`` (the profiler's, within them), ``longest_ns``,
    ``longest_overhead_ns``, ``longest_event`` (position in the trace). A call inside a call counts twice.
    """
    import pandas as pd

    parsed = [frame(text) for text in trace.names]
    wanted = np.array([one is not None and one.function == name for one in parsed] or [False])
    events = np.flatnonzero(trace.mask("python") & wanted[trace.name]) if len(trace) else np.empty(0, np.int64)
    overhead = _overhead(trace).length_within(trace.start[events], trace.start[events] + trace.duration[events])
    table = pd.DataFrame(
        {
            "file": [one.file or one.owner if (one := parsed[int(trace.name[event])]) else "" for event in events],
            "function": name,
            "event": events,
            "ns": trace.duration[events],
            "overhead": overhead,
        }
    )
    rows = []
    for (file, function), calls in table.groupby(["file", "function"], sort=True):
        longest = calls.loc[calls["ns"].idxmax()]
        longest_figures = (int(longest["ns"]), int(longest["overhead"]), int(longest["event"]))
        rows.append((file, function, len(calls), calls["ns"].sum(), calls["overhead"].sum(), *longest_figures))
    columns = "file function calls total_ns overhead_ns longest_ns longest_overhead_ns longest_event".split()
    found = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[2:], np.int64))
    missing = f"no Python frame of a function named {name!r}"
    if not trace.mask("python").any():
        missing = "no Python frames in the file: record them with with_stack=True"
    found.attrs["cannot_say"] = [] if rows else [missing]
    return found


# -- parts -------------------------------------------------------------------------------------------------------------


def points_of(trace: Trace) -> tuple[list[SyncPoint], list[str]]:
    """Found once a trace."""
    if trace not in _KNOWN and (parts := members(trace)):
        each = [(events, *points_of(part)) for events, part in parts]
        moved = [point.moved(events) for events, points, _ in each for point in points]
        _KNOWN[trace] = moved, [one for _, _, said in each for one in said]
    if trace not in _KNOWN:
        awaited = Awaited(trace)
        ours = of_ours(trace)
        finder = Finder(trace, awaited)
        points = finder.find(np.flatnonzero(trace.mask("sync") & ~ours))
        said = finder.cannot_say
        if ours.any():
            found, missing = mark_points(trace, np.flatnonzero(trace.mask("sync") & ours), awaited)
            points, said = [*points, *found], [*said, *missing]
        _KNOWN[trace] = points, said
    return _KNOWN[trace]


def _of_members(parts: list[tuple[Array, Trace]]) -> pd.DataFrame:
    """The rows of every member of a merged trace, whose records name streams and events of their own."""
    import pandas as pd

    tables = [(syncs(part), events, part.info.title) for events, part in parts]
    moved = [table.assign(event=events[table["event"].to_numpy(np.int64)]) for table, events, _ in tables]
    found = pd.concat(moved, ignore_index=True).sort_values("start_ns", kind="stable", ignore_index=True)
    found.attrs["cannot_say"] = [f"{title}: {one}" for table, _, title in tables for one in table.attrs["cannot_say"]]
    return found


def _stretch(trace: Trace, events: list[int]) -> tuple[Array, Array]:
    """Start and length of each event; -1: no event."""
    found = np.array(events, np.int64)
    safe = np.maximum(found, 0)
    if not len(trace):
        return found, found
    return np.where(found >= 0, trace.start[safe], -1), np.where(found >= 0, trace.duration[safe], -1)


def _overhead(trace: Trace) -> Intervals:
    events = np.flatnonzero(trace.mask("overhead"))
    return union(trace.start[events], trace.start[events] + trace.duration[events])


def _unexplained(
    trace: Trace, points: list[SyncPoint], seen: tuple[Array, Array], overhead: Intervals
) -> dict[str, Array]:
    """``unexplained_ns``, the caller's stretch less the union of calls and overhead within it, and of that
    ``before_ns`` and ``after_ns`` the calls; each [m] int64, -1: no caller, or (of the latter two) no call."""
    left = np.full((3, len(points)), -1, np.int64)
    for row, point in enumerate(points):
        if seen[1][row] < 0:
            continue
        begin, end = int(seen[0][row]), int(seen[0][row] + seen[1][row])
        calls = np.array(point.calls, np.int64)
        low, high = np.searchsorted(overhead.end, begin, side="right"), np.searchsorted(overhead.start, end)
        starts = np.concatenate([trace.start[calls], overhead.start[low:high]])
        ends = np.concatenate([trace.start[calls] + trace.duration[calls], overhead.end[low:high]])
        told = union(np.clip(starts, begin, end), np.clip(ends, begin, end))
        left[0, row] = end - begin - told.total_ns
        if len(calls):
            first, last = np.clip([starts[: len(calls)].min(), ends[: len(calls)].max()], begin, end)
            within = told.length_within(np.array([begin, last]), np.array([first, end]))
            left[1:, row] = first - begin - within[0], end - last - within[1]
    return dict(zip(("unexplained_ns", "before_ns", "after_ns"), left, strict=True))


def _steps(trace: Trace, points: list[SyncPoint]) -> list[str | None]:
    from mrv2lab.trace.steps import step_of, step_ranges

    if not points:
        return []
    names = [trace.name_of(event) for event in step_ranges(trace).tolist()]
    rows = step_of(trace)[[point.event for point in points]].tolist()
    return [
        point.step if point.step is not None else names[row] if row >= 0 else None
        for point, row in zip(points, rows, strict=True)
    ]


def _cannot_say(trace: Trace, table: pd.DataFrame) -> list[str]:
    said = []
    if not trace.mask("runtime", "sync").any():
        reading = trace.named(lambda name: name in READING_OPS) & trace.mask("op") if len(trace) else np.zeros(0, bool)
        asks = f" ({int(reading.sum()):,} operators that read a value, such as aten::item, among them)"
        said.append(
            "no calls of the CUDA or HIP runtime recorded, so whether anything waited for a device is not in the file"
            f"{asks if reading.any() else ''}: record with CUDA activities"
        )
    waits = table["host_waits"].to_numpy()
    unknown = waits & (table["gpu_wait_ns"].to_numpy() < 0)
    if unknown.any():
        remedy = "torch.profiler writes it with _ExperimentalConfig(enable_cuda_sync_events=True)"
        if trace.info.producer == "recording":
            remedy = "record with device_times='launches'"
        said.append(
            f"for {int(unknown.sum()):,} of {int(waits.sum()):,} waits of the host the file does not say "
            f"which work was waited for, so not how long the device kept them: {remedy}"
        )
    if len(table) and not trace.mask("python").any() and not (table["site"] != "").any():
        how = "torch.profiler: with_stack=True" if trace.info.producer != "recording" else "Recorder: call_sites=True"
        said.append(f"no call sites in the file ({how})")
    lanes = np.unique(trace.lane[trace.mask("runtime", *RANGES)]).tolist()
    threads = [lane for lane in lanes if trace.lanes[lane].role == "thread"]
    if len(threads) > 1 and (table["overhead_ns"].to_numpy() > 0).any():
        said.append("overhead records name no thread: what overlaps a wait in time may have been another thread's")
    said += _long_unexplained(table, len(threads))
    return said


def _long_unexplained(table: pd.DataFrame, threads: int) -> list[str]:
    """One sentence a call and site, about waits of which most is in nobody's record; the longest first."""
    names = [table[name].to_numpy(object) for name in ("kind", "call", "site")]
    figures = np.stack([table[name].to_numpy() for name in ("unexplained_ns", "caller_ns", "before_ns", "after_ns")])
    groups: dict[tuple[str, str], list[int]] = {}
    for row in np.flatnonzero((figures[0] >= WORTH_SAYING_NS) & (2 * figures[0] > figures[1])).tolist():
        kind, call, site = (column[row] for column in names)
        if kind in _NOTHING_ELSE:
            groups.setdefault((call, site), []).append(row)
    others = "one host thread only" if threads == 1 else f"{threads} host threads"
    said = []
    for (call, site), rows in sorted(groups.items(), key=lambda group: -int(figures[0, group[1]].sum())):
        unexplained, caller = figures[:2, rows].sum(axis=1) / 1e3
        times = f" in {len(rows):,} calls together" if len(rows) > 1 else ""
        known = [row for row in rows if figures[2, row] >= 0]
        where = ""
        if known:
            before, after = figures[2:, known].sum(axis=1) / 1e3
            where = f" ({before:,.1f} us before it, {after:,.1f} us after it)"
        said.append(
            f"{unexplained:,.1f} us of the {caller:,.1f} us that {call} took for its caller at "
            f"{site or 'an unknown place'}{times} are neither the runtime's call{where} nor recorded overhead; the "
            f"file holds {others}, so what filled them (another thread holding the GIL, say) cannot be told from it"
        )
    return said
