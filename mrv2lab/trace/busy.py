"""How much of the time each device worked, when it had nothing to do, and what the host did meanwhile.

A gap ends with the start of some work, and that work was launched by one host call. So a gap has three parts: until
that call began, while it ran, and after it had returned. In the first part the launching thread was blocked (in a call
that waits), launching other work, busy otherwise, or nothing of it was recorded. The longest of these is the cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.devices import NO_GPU, device_work
from mrv2lab.trace.host_threads import host_threads, thread_of_lane
from mrv2lab.trace.intervals import leaders, union
from mrv2lab.trace.links import callers, links
from mrv2lab.trace.members import member_of_lane
from mrv2lab.trace.steps import step_of
from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

PARTS: tuple[str, ...] = ("waiting_ns", "host_ns", "unrecorded_ns", "launch_ns", "queued_ns")
"""Columns that add up to a gap's duration."""
CAUSES: tuple[str, ...] = (
    "waiting",  # the launching thread sat in a blocking call
    "host late",  # it worked, and had not come to the launch
    "nothing queued",  # no launch, and nothing recorded on that thread: nothing to do, or not recorded
    "launch-bound",  # it was inside launch calls: this one, or many small ones back to back
    "device late",  # the work was launched; the device began it only now, the file does not say why
    "device-side wait",  # the same, and a wait for an event was queued ahead of it on its stream
    "orphan",  # the work's launch is not in the file
)
"""The first five in the order of PARTS; of equal parts the earlier one wins."""

USUAL_NS = 5_000
"""A device needs 1 to 3 us from one piece of queued work to the next: no gap up to this length asks for a reason."""


def busy(trace: Trace) -> pd.DataFrame:
    """One row a device and a last one, ``all``, in which any device counts as busy.

    ``rank``, ``device`` (the number, or "all"), ``process`` (merged traces only), ``start_ns``, ``end_ns``, ``span_ns``
    (from the first work's start to the last one's end), ``busy_ns`` (time in which any work ran: the union), ``sum_ns``
    (durations added: more than the union where work overlaps), ``busy_share`` (of the span, 0 to 1), ``events``,
    ``streams``. Without device work the frame is empty, which is not the same as an idle device.
    """
    import pandas as pd

    work = device_work(trace)
    rows = [
        {"rank": one.rank, "device": one.device, "process": one.process, **_row(trace, work.of(place))}
        for place, one in enumerate(work.devices)
    ]
    if rows:
        rows.append({"rank": -1, "device": "all", "process": "", **_row(trace, work.events)})
    columns = ["rank", "device", "process", *_row(trace, np.empty(0, np.int64))]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["cannot_say"] = [] if rows else [NO_GPU]
    return frame


def gaps(trace: Trace, min_ns: int = 0) -> pd.DataFrame:
    """One row a stretch of at least ``min_ns`` in which a device ran nothing, between its first and
    its last work, in order of start.

    ``rank``, ``device``, ``process`` (merged traces only), ``start_ns``, ``end_ns``, ``duration_ns``, ``before`` and
    ``after`` (names of the work around it), ``before_event``, ``after_event``, ``launch_event`` (positions; -1: not in
    the file), ``step`` (row of :func:`mrv2lab.trace.steps.steps` that ``after`` belongs to; -1: none), ``cause`` (of
    :data:`CAUSES`), the parts ``waiting_ns``, ``host_ns``, ``unrecorded_ns``, ``launch_ns``, ``queued_ns`` that add up
    to the duration, and ``overhead_ns``: how much of it the profiler's own recorded overhead covers, in any part.
    """
    import pandas as pd

    work = device_work(trace)
    before, after, device = _around(trace, [work.of(place) for place in range(len(work.devices))])
    start, end = trace.end[before], trace.start[after]
    chosen = np.flatnonzero(end - start >= min_ns)
    chosen = chosen[np.argsort(start[chosen], kind="stable")]
    before, after, device, start, end = before[chosen], after[chosen], device[chosen], start[chosen], end[chosen]
    launch = links(trace).launch[after]
    parts = _parts(trace, start, end, launch)
    names = np.array(trace.names or ("",), object)
    frame = pd.DataFrame(
        {
            "rank": np.array([one.rank for one in work.devices] or [-1], np.int64)[device],
            "device": np.array([one.device for one in work.devices] or [-1], np.int64)[device],
            "process": pd.array(np.array([one.process for one in work.devices] or [""], object)[device], "str"),
            "start_ns": start,
            "end_ns": end,
            "duration_ns": end - start,
            "before": pd.array(names[trace.name[before]], "str"),
            "after": pd.array(names[trace.name[after]], "str"),
            "before_event": before,
            "after_event": after,
            "launch_event": launch,
            "step": step_of(trace)[after],
            "cause": pd.array(np.array(CAUSES, object)[_causes(trace, parts, after, launch)], "str"),
            **dict(zip(PARTS, parts, strict=True)),
            "overhead_ns": _overhead(trace, after, start, end),
        }
    )
    frame.attrs["cannot_say"] = _cannot_say(trace, frame, bool(work.devices))
    return frame


def _row(trace: Trace, events: Array) -> dict[str, Any]:
    start, end = trace.start[events], trace.end[events]
    first, last = (int(start.min()), int(end.max())) if len(events) else (0, 0)
    busy_ns = union(start, end).total_ns
    return {
        "start_ns": first,
        "end_ns": last,
        "span_ns": last - first,
        "busy_ns": busy_ns,
        "sum_ns": int(trace.duration[events].sum()),
        "busy_share": busy_ns / (last - first) if last > first else 0.0,
        "events": len(events),
        "streams": len(np.unique(trace.lane[events])),
    }


def _around(trace: Trace, devices: list[Array]) -> tuple[Array, Array, Array]:
    """[k] int64 each: of every gap, the work that ended last before it, the work that ends it, and the device."""
    found = [np.empty((3, 0), np.int64)]
    for device, events in enumerate(devices):
        events = events[trace.duration[events] > 0]
        leader = events[leaders(trace.end[events])]
        first = np.flatnonzero(trace.start[events][1:] > trace.end[leader][:-1])
        found.append(np.stack([leader[first], events[first + 1], np.full(len(first), device)]))
    before, after, device = np.concatenate(found, axis=1)
    return before, after, device


def _parts(trace: Trace, start: Array, end: Array, launch: Array) -> Array:
    """[5, k] int64: the PARTS of each gap."""
    parts = np.zeros((5, len(start)), np.int64)
    known = launch >= 0
    parts[2, ~known] = (end - start)[~known]
    begin = np.where(known, np.clip(trace.start[launch], start, end), end)
    back = np.where(known, np.clip(trace.end[launch], start, end), end)
    thread = np.where(known, thread_of_lane(trace)[trace.lane[launch]], -1) if len(trace) else launch
    for number, host in host_threads(trace, thread[known]).items():
        rows = np.flatnonzero(thread == number)
        low, high = start[rows], begin[rows]
        waiting, launching, working = (
            times.length_within(low, high) for times in (host.blocked, host.launching, host.working)
        )
        parts[0, rows], parts[1, rows] = waiting, working
        parts[2, rows] = high - low - waiting - launching - working
        parts[3, rows] = launching + back[rows] - high
        parts[4, rows] = end[rows] - back[rows]
    return parts


def _causes(trace: Trace, parts: Array, after: Array, launch: Array) -> Array:
    """[k] int64: position in CAUSES."""
    cause: Array = np.argmax(parts, axis=0)
    cause[(cause == CAUSES.index("device late")) & _held(trace)[after]] = CAUSES.index("device-side wait")
    cause[launch < 0] = CAUSES.index("orphan")
    return cause


def _overhead(trace: Trace, after: Array, start: Array, end: Array) -> Array:
    """[k] int64: how much of each gap the overhead of the profiler that recorded it covers."""
    found = np.zeros(len(start), np.int64)
    member = member_of_lane(trace)
    overhead = np.flatnonzero(trace.mask("overhead"))
    of_overhead, of_gap = member[trace.lane[overhead]], member[trace.lane[after]]
    for number in np.unique(of_overhead):
        events, rows = overhead[of_overhead == number], of_gap == number
        found[rows] = union(trace.start[events], trace.end[events]).length_within(start[rows], end[rows])
    return found


def _held(trace: Trace) -> Array:
    """[n] bool: device work that was launched next after a wait for an event was queued on its stream.

    Only waits whose stream the file names count: a call of cudaStreamWaitEvent alone does not say which stream waits.
    """
    from mrv2lab.trace.syncs import syncs

    held = np.zeros(len(trace), bool)
    if not trace.mask("sync").any():
        return held
    frame = syncs(trace)
    waits = frame[(frame["kind"] == "device-side wait") & (frame["stream"] >= 0)]
    if not len(waits):
        return held
    launch = links(trace).launch
    records = waits["event"].to_numpy(np.int64)
    calls = callers(trace, records)
    moments = trace.start[np.where(calls >= 0, calls, records)]
    streams, devices = waits["stream"].to_numpy(np.int64), waits["device"].to_numpy(np.int64)
    member = member_of_lane(trace)
    waiting = member[trace.lane[records]]
    work = np.flatnonzero(launch >= 0)
    for lane in np.unique(trace.lane[work]):
        events = work[trace.lane[work] == lane]
        launched = np.sort(trace.start[launch[events]])
        one = trace.lanes[lane]
        of_lane = (streams == one.stream) & ((devices < 0) | (devices == one.device)) & (waiting == member[lane])
        place = np.searchsorted(launched, moments[of_lane], side="left")
        held[events] = np.isin(trace.start[launch[events]], launched[place[place < len(launched)]])
    return held


def _cannot_say(trace: Trace, frame: pd.DataFrame, any_work: bool) -> list[str]:
    if not any_work:
        return [NO_GPU]
    said = []
    cause, duration = frame["cause"].to_numpy(object), frame["duration_ns"].to_numpy()
    if orphans := int((cause == "orphan").sum()):
        said.append(f"{orphans:,} gaps end with work whose launch is not in the file: no cause can be given")
    late = duration[(cause == "device late") & (duration > USUAL_NS)]
    if len(late):
        said.append(
            f"{len(late):,} gap{'s' * (len(late) != 1)} of more than {USUAL_NS / 1e3:g} us, together "
            f"{late.sum() / 1e3:,.1f} us, end with work that had been launched before: latency between two pieces of "
            "work, or a wait that is not recorded (which stream waits for an event is known from cuda_sync records "
            "only)"
        )
    if nothing := int((cause == "nothing queued").sum()):
        said.append(
            f"{nothing:,} gaps without anything on the launching thread: it had nothing to do, or did what is not "
            "recorded (profile with CPU activities and with_stack to see it)"
        )
    if trace.info.modelled:
        said.append("device times are modelled, so these gaps are the model's and no measurement")
    return said
