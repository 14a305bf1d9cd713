"""How far the host runs ahead of the devices: launches that wait for their turn, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.devices import NO_GPU
from mrv2lab.trace.links import Links, links, orphans
from mrv2lab.trace.steps import step_of, step_ranges
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]


def queue_depth(trace: Trace) -> pd.DataFrame:
    """How many launches of each stream waited, at every moment at which that changed: a launch waits from the start of
    its host call to the start of its first work, so a graph counts once, on the stream of its first work.

    ``time_ns``, ``lane``, ``device``, ``stream``, ``depth`` (after that moment), in order of time; work that starts at
    the same moment as another is launched leaves first. ``attrs``: ``max_depth`` over all streams, ``launches``
    (counted), ``orphans`` (device work without a launch in the file), ``without_work`` (launches whose work is not in
    the file), ``not_queued`` (launches whose work starts no later than the call, clocks being what they are); the last
    three are left out.
    """
    import pandas as pd

    known = links(trace)
    launch, first, _ = _first_work(trace, known)
    start, begun = trace.start[launch], trace.start[first]
    queued = begun > start
    lane, start, begun = trace.lane[first][queued], start[queued], begun[queued]
    time, lane = np.concatenate([begun, start]), np.concatenate([lane, lane])
    change = np.repeat([-1, 1], len(start))
    order = np.lexsort((change, time, lane))
    time, lane, depth = time[order], lane[order], np.cumsum(change[order])
    # Every lane ends at 0, so the running sum needs no restart.
    order = np.argsort(time, kind="stable")
    time, lane, depth = time[order], lane[order], depth[order]
    lanes = trace.lanes
    frame = pd.DataFrame(
        {
            "time_ns": time,
            "lane": pd.array(np.array([str(one) for one in lanes] or [""], object)[lane], "str"),
            "device": np.array([one.device for one in lanes] or [-1], np.int64)[lane],
            "stream": np.array([one.stream for one in lanes] or [-1], np.int64)[lane],
            "depth": depth.astype(np.int64),
        }
    )
    frame.attrs |= {
        "max_depth": int(depth.max()) if len(depth) else 0,
        "launches": int(queued.sum()),
        "orphans": int(orphans(trace).sum()),
        "without_work": _without_work(trace, known),
        "not_queued": int((~queued).sum()),
    }
    frame.attrs["cannot_say"] = _cannot_say(trace, frame.attrs)
    return frame


def run_ahead(trace: Trace) -> pd.DataFrame:
    """One row a launch that owns device work, in order of launch: how long before its first work the host made it.

    ``api``, ``work`` (name of the first work), ``pieces`` (how many it owns), ``lane``, ``device``, ``stream`` (of the
    first work), ``launch_event``, ``work_event`` (positions), ``launch_ns`` and ``work_ns`` (starts), ``ahead_ns``
    (work minus launch; below 0 where the clocks disagree), ``step`` (row of :func:`mrv2lab.trace.steps.steps`; -1:
    none), ``launch_in_step_ns`` and ``work_in_step_ns`` (the same starts counted from the step's start; -1: no step).
    """
    import pandas as pd

    known = links(trace)
    launch, first, pieces = _first_work(trace, known)
    step = step_of(trace)[launch]
    begun = np.concatenate([trace.start[step_ranges(trace)], [0]])[step]
    names, lanes = np.array(trace.names or ("",), object), trace.lanes
    lane = trace.lane[first]
    found = pd.DataFrame(
        {
            "api": pd.array(names[trace.name[launch]], "str"),
            "work": pd.array(names[trace.name[first]], "str"),
            "pieces": pieces,
            "lane": pd.array(np.array([str(one) for one in lanes] or [""], object)[lane], "str"),
            "device": np.array([one.device for one in lanes] or [-1], np.int64)[lane],
            "stream": np.array([one.stream for one in lanes] or [-1], np.int64)[lane],
            "launch_event": launch,
            "work_event": first,
            "launch_ns": trace.start[launch],
            "work_ns": trace.start[first],
            "ahead_ns": trace.start[first] - trace.start[launch],
            "step": step,
            "launch_in_step_ns": np.where(step >= 0, trace.start[launch] - begun, -1),
            "work_in_step_ns": np.where(step >= 0, trace.start[first] - begun, -1),
        }
    )
    found.attrs["cannot_say"] = _cannot_say(
        trace,
        {
            "orphans": int(orphans(trace).sum()),
            "without_work": _without_work(trace, known),
            "not_queued": int((found["ahead_ns"] <= 0).sum()),
        },
    )
    return found


def _first_work(trace: Trace, known: Links) -> tuple[Array, Array, Array]:
    """[k] int64 each: every launch that owns work, in order of start, its first work, and how many pieces it owns."""
    work = np.flatnonzero(known.launch >= 0)  # in order of start, so the first of a launch is its first work
    launch, place = np.unique(known.launch[work], return_index=True)
    return launch, work[place], known.work[launch]


def _without_work(trace: Trace, known: Links) -> int:
    """Calls by the name of one that launches, as other calls of this file show, that own nothing."""
    launching = np.zeros(max(len(trace.names), 1), bool)
    launching[trace.name[known.work > 0]] = True
    return int((launching[trace.name] & trace.mask("runtime") & (known.work == 0)).sum()) if len(trace) else 0


def _cannot_say(trace: Trace, counts: dict[str, Any]) -> list[str]:
    if not trace.mask(*DEVICE_KINDS).any():
        return [NO_GPU]
    said = []
    if counts["orphans"]:
        said.append(
            f"{counts['orphans']:,} pieces of device work are left out: their launch is not in the file, so nobody "
            "knows since when they waited"
        )
    if counts["without_work"]:
        said.append(f"{counts['without_work']:,} launches are left out: their work is not in the file")
    if counts["not_queued"]:
        said.append(
            f"the work of {counts['not_queued']:,} launches starts no later than its call: it did not wait, or the "
            "clocks of host and device disagree"
        )
    return said
