"""What runs at the same time: copies and compute, streams beside each other, communication, host and device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.devices import NO_GPU, Device, device_work
from mrv2lab.trace.host_threads import host_threads, thread_of_lane
from mrv2lab.trace.intervals import Intervals, intersect, union
from mrv2lab.trace.links import links
from mrv2lab.trace.trace import KIND, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

PAIRS: tuple[str, ...] = ("copy / compute", "compute / compute", "communication / compute", "host / device")
_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE
)


def overlap(trace: Trace) -> pd.DataFrame:
    """One row a device and pair of :data:`PAIRS`.

    ``rank``, ``device``, ``process`` (merged traces only), ``pair``, ``a_ns``, ``b_ns`` (how long each side ran: the
    union), ``overlap_ns`` (both at once), ``a_share`` and ``b_share`` (the overlap's share of each side; 0 where the
    side never ran, which ``attrs["cannot_say"]`` then says).

    - copy / compute: memcpy and memset against kernels and graphs that are no communication;
    - compute / compute: kernels against kernels of another stream; both sides are all compute, the overlap is the time
      in which two or more streams compute (work of one stream that overlaps: :mod:`mrv2lab.trace.same_stream`);
    - communication / compute: kernels with the name of a collective (NCCL, RCCL, vLLM's custom all-reduce, ...);
    - host / device: the threads that launched this device's work, each while it did anything but wait, against any
      work of the device.
    """
    import pandas as pd

    work = device_work(trace)
    talks = trace.named(lambda name: _COMMUNICATION.search(name) is not None) if len(trace) else np.empty(0, bool)
    hosts = _launching_hosts(trace, [work.of(place) for place in range(len(work.devices))])
    rows = [
        {"rank": device.rank, "device": device.device, "process": device.process, **row}
        for place, device in enumerate(work.devices)
        for row in _of_device(trace, work.of(place), talks, hosts[place])
    ]
    columns = ["rank", "device", "process", "pair", "a_ns", "b_ns", "overlap_ns", "a_share", "b_share"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["cannot_say"] = _cannot_say(trace, rows, work.devices)
    return frame


def _of_device(trace: Trace, events: Array, talks: Array, host: Intervals) -> list[dict[str, Any]]:
    kind = trace.kind[events]
    copies = (kind == KIND["memcpy"]) | (kind == KIND["memset"])
    compute = events[~copies & ~talks[events]]
    computing, copying = _union(trace, compute), _union(trace, events[copies])
    talking = _union(trace, events[~copies & talks[events]])
    sides = {
        "copy / compute": (copying, computing, intersect(copying, computing)),
        "compute / compute": (computing, computing, _several_streams(trace, compute)),
        "communication / compute": (talking, computing, intersect(talking, computing)),
        "host / device": (host, device := _union(trace, events), intersect(host, device)),
    }
    return [
        {
            "pair": pair,
            "a_ns": a.total_ns,
            "b_ns": b.total_ns,
            "overlap_ns": both.total_ns,
            "a_share": both.total_ns / max(a.total_ns, 1),
            "b_share": both.total_ns / max(b.total_ns, 1),
        }
        for pair, (a, b, both) in sides.items()
    ]


def _union(trace: Trace, events: Array) -> Intervals:
    return union(trace.start[events], trace.end[events])


def _several_streams(trace: Trace, events: Array) -> Intervals:
    """When two or more lanes run any of ``events``."""
    lanes = trace.lane[events]
    each = [_union(trace, events[lanes == lane]) for lane in np.unique(lanes)]
    empty = np.empty(0, np.int64)
    edges = np.concatenate([empty, *(one.start for one in each), *(one.end for one in each)])
    order = np.argsort(edges, kind="stable")
    running = np.cumsum(np.repeat([1, -1], len(edges) // 2)[order])
    several = np.flatnonzero(running[:-1] >= 2)
    return union(edges[order][several], edges[order][several + 1])


def _launching_hosts(trace: Trace, devices: list[Array]) -> list[Intervals]:
    """For each device, when the threads that launched its work did anything but wait."""
    of_lane, launch = thread_of_lane(trace), links(trace).launch
    launching = [np.unique(of_lane[trace.lane[calls[calls >= 0]]]) for calls in (launch[events] for events in devices)]
    hosts = host_threads(trace, np.concatenate([np.empty(0, np.int64), *launching]))
    found = []
    for threads in launching:
        parts = [part for one in threads.tolist() for part in (hosts[one].launching, hosts[one].working)]
        starts, ends = [part.start for part in parts], [part.end for part in parts]
        empty = np.empty(0, np.int64)
        found.append(union(np.concatenate([empty, *starts]), np.concatenate([empty, *ends])))
    return found


def _cannot_say(trace: Trace, rows: list[dict[str, Any]], devices: tuple[Device, ...]) -> list[str]:
    if not devices:
        return [NO_GPU]
    never = {pair: all(row["a_ns"] == 0 for row in rows if row["pair"] == pair) for pair in PAIRS}
    said = []
    if never["copy / compute"]:
        said.append("no copies recorded: their overlap is 0 because there is nothing to overlap")
    if never["compute / compute"]:
        said.append("no kernels recorded: only copies")
    if never["communication / compute"]:
        said.append("no communication recorded (no kernel with the name of a collective): its overlap is 0")
    if never["host / device"]:
        said.append("no launches of the device work recorded, so nothing is known about the host that made them")
    if trace.mask("graph").any():
        said.append("whole graphs were recorded without their nodes: each counts as compute from start to end")
    if trace.info.modelled:
        said.append("device times are modelled, so these overlaps are the model's and no measurement")
    return said
