"""Work of one stream that overlaps. A stream runs in order, so there is a reason: a kernel that was allowed to begin
before the one ahead of it had ended (programmatic dependent launch), or time stamps that are not that exact."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.intervals import leaders
from mrv2lab.trace.links import links
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

CLOCK_NOISE_NS = 1_000
"""Longest overlap that is put down to the clocks: device ticks mapped to the host's clock have been reported to be off
by up to 1 us (pytorch/kineto #914, #944). A label of last resort: how the work was launched is asked first."""
# The only launches that can ask for programmatic dependent launch; nsys adds a version (_v11060), Kineto may not.
_EXTENSIBLE = re.compile(r"(cuda|cu|hip)LaunchKernelEx(C)?(_ptsz)?(_v\d+)?")
LABELS: tuple[str, ...] = ("zero length", "programmatic launch", "clock noise", "unknown")


def same_stream_overlaps(trace: Trace) -> pd.DataFrame:
    """One row a piece of device work that begins before all earlier work of its stream has ended.

    ``lane``, ``device``, ``stream``, ``earlier``, ``later`` (names; the earlier is what ends last), ``earlier_event``,
    ``later_event`` (positions), ``start_ns``, ``overlap_ns``, ``label``:

    - ``zero length``: one of the two has no duration, so nothing overlaps, but one lies within the other;
    - ``programmatic launch``: the later one was launched by cudaLaunchKernelExC, cuLaunchKernelEx or hip's like, the
      calls that can ask for it. That call is the evidence; the attribute itself is not in any trace;
    - ``clock noise``: launched otherwise, and at most :data:`CLOCK_NOISE_NS`;
    - ``unknown``: the rest.

    ``attrs["counts"]`` has the rows of each label.
    """
    import pandas as pd

    earlier, later = _pairs(trace)
    start = trace.start[later]
    overlap = np.minimum(trace.end[earlier], trace.end[later]) - start
    label = _labels(trace, earlier, later, overlap)
    lanes = [trace.lane_of(event) for event in later]
    frame = pd.DataFrame(
        {
            "lane": pd.array([str(lane) for lane in lanes], "str"),
            "device": np.array([lane.device for lane in lanes], np.int64),
            "stream": np.array([lane.stream for lane in lanes], np.int64),
            "earlier": pd.array([trace.name_of(event) for event in earlier], "str"),
            "later": pd.array([trace.name_of(event) for event in later], "str"),
            "earlier_event": earlier,
            "later_event": later,
            "start_ns": start,
            "overlap_ns": overlap,
            "label": pd.array(np.array(LABELS, object)[label], "str"),
        }
    )
    frame.attrs["counts"] = {name: int((label == place).sum()) for place, name in enumerate(LABELS)}
    frame.attrs["cannot_say"] = _cannot_say(trace, earlier, later, label)
    return frame


def _pairs(trace: Trace) -> tuple[Array, Array]:
    """[k] int64 each: of every stream, work and the earlier work that it overlaps and that ends last."""
    work = np.flatnonzero(trace.mask(*DEVICE_KINDS))
    earlier, later = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for lane in np.unique(trace.lane[work]):
        events = work[trace.lane[work] == lane]
        leader = events[leaders(trace.end[events])]
        over = np.flatnonzero(trace.start[events][1:] < trace.end[leader][:-1])
        earlier.append(leader[over])
        later.append(events[over + 1])
    first, second = np.concatenate(earlier), np.concatenate(later)
    order = np.argsort(second, kind="stable")
    return first[order], second[order]


def _labels(trace: Trace, earlier: Array, later: Array, overlap: Array) -> Array:
    launch = links(trace).launch[later]
    extensible = trace.named(lambda name: _EXTENSIBLE.fullmatch(name) is not None)
    programmatic = (launch >= 0) & extensible[launch]
    empty = (trace.duration[earlier] == 0) | (trace.duration[later] == 0)
    found: Array = np.select([empty, programmatic, overlap <= CLOCK_NOISE_NS], [0, 1, 2], 3)
    return found


def _cannot_say(trace: Trace, earlier: Array, later: Array, label: Array) -> list[str]:
    said = []
    launch = links(trace).launch
    orphans = int((launch[later] < 0).sum())
    if orphans:
        said.append(f"{orphans:,} overlaps are of work whose launch is not in the file: it may be a programmatic one")
    graph = int(((launch[later] >= 0) & (launch[later] == launch[earlier]) & (label >= 2)).sum())
    if graph:
        said.append(
            f"{graph:,} overlaps lie within one graph launch, whose branches and programmatic edges are not recorded"
        )
    return said
