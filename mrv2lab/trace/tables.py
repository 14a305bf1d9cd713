"""Kernels, copies and launches, each by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.copy_kinds import DIRECTIONS, MEMORIES, copy_kinds
from mrv2lab.trace.devices import NO_GPU
from mrv2lab.trace.links import links
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]


def kernels(trace: Trace) -> pd.DataFrame:
    """One row a kernel name (and one a name of whole graphs), the longest in total first.

    ``name``, ``calls``, ``total_ns``, ``share`` (of the total of all rows), ``median_ns``, ``min_ns``, ``max_ns``,
    ``streams`` (lanes it ran on), ``in_graphs`` (calls launched by a host call that launched several pieces of work, as
    a graph does), ``orphans`` (calls whose launch is not in the file).
    """
    import pandas as pd

    events = np.flatnonzero(trace.mask("kernel", "graph"))
    known = links(trace)
    launch = known.launch[events]
    of = pd.DataFrame(
        {
            "name": trace.name[events],
            "ns": trace.duration[events],
            "lane": trace.lane[events],
            "graph": (launch >= 0) & (known.work[launch] > 1),
            "orphan": launch < 0,
        }
    ).groupby("name", sort=True)
    frame = pd.DataFrame(
        {
            "calls": of.size(),
            "total_ns": of["ns"].sum(),
            "median_ns": of["ns"].median(),
            "min_ns": of["ns"].min(),
            "max_ns": of["ns"].max(),
            "streams": of["lane"].nunique(),
            "in_graphs": of["graph"].sum(),
            "orphans": of["orphan"].sum(),
        }
    )
    frame.insert(2, "share", frame["total_ns"] / max(int(frame["total_ns"].sum()), 1))
    frame.insert(0, "name", pd.array([trace.names[name] for name in frame.index], "str"))
    frame.index.name = None
    frame = frame.sort_values(["total_ns", "name"], ascending=[False, True], ignore_index=True)
    said = []
    if not trace.mask(*DEVICE_KINDS).any():
        said.append(NO_GPU)
    elif trace.mask("graph").any():
        said.append("whole graphs were recorded without their nodes: nsys shows them with --cuda-graph-trace=node")
    frame.attrs["cannot_say"] = said
    return frame


def copies(trace: Trace) -> pd.DataFrame:
    """One row a kind of copy, most bytes first: ``kind`` (HtoD, DtoH, DtoD, ..., unknown), ``source`` and ``target``
    (memory: pageable, pinned, device, managed, array, unknown), ``calls``, ``total_ns``, ``bytes``, ``sized`` (calls
    whose size is known), ``gb_per_s`` (bytes by the time of those calls, 1e9 bytes a second; NA without any)."""
    import pandas as pd

    found = copy_kinds(trace)
    sized = (trace.nbytes[found.events] >= 0) & (trace.duration[found.events] > 0)
    ns = trace.duration[found.events]
    of = pd.DataFrame(
        {
            "kind": pd.array(np.array(DIRECTIONS, object)[found.direction], "str"),
            "source": pd.array(np.array(MEMORIES, object)[found.source], "str"),
            "target": pd.array(np.array(MEMORIES, object)[found.target], "str"),
            "ns": ns,
            "bytes": np.maximum(trace.nbytes[found.events], 0),
            "sized": trace.nbytes[found.events] >= 0,
            "rated_bytes": np.where(sized, trace.nbytes[found.events], 0),
            "rated_ns": np.where(sized, ns, 0),
        }
    ).groupby(["kind", "source", "target"], sort=True)
    rated = of[["rated_bytes", "rated_ns"]].sum()
    frame = pd.DataFrame(
        {
            "calls": of.size(),
            "total_ns": of["ns"].sum(),
            "bytes": of["bytes"].sum(),
            "sized": of["sized"].sum(),
            "gb_per_s": (rated["rated_bytes"] / rated["rated_ns"].where(rated["rated_ns"] > 0)).astype("Float64"),
        }
    ).reset_index()
    frame = frame.sort_values("bytes", ascending=False, kind="stable", ignore_index=True)
    frame.attrs["cannot_say"] = _copies_cannot_say(trace, frame)
    return frame


def launches(trace: Trace) -> pd.DataFrame:
    """One row a call of the runtime or driver by name, the most host time first.

    ``api``, ``calls``, ``launching`` (calls that own device work), ``host_ns`` (durations added), ``median_ns``,
    ``max_ns``, ``work`` (pieces of device work), ``work_per_launch`` (NA without any), ``max_work`` (most pieces that
    one call owns: kernels of a graph), ``max_kernels`` (the same, kernels only).
    """
    import pandas as pd

    known = links(trace)
    events = np.flatnonzero(trace.mask("runtime"))
    work = np.flatnonzero(trace.mask("kernel") & (known.launch >= 0))
    kernels_of = np.bincount(known.launch[work], minlength=len(trace))
    of = pd.DataFrame(
        {
            "name": trace.name[events],
            "ns": trace.duration[events],
            "work": known.work[events],
            "kernels": kernels_of[events].astype(np.int64),
            "launching": known.work[events] > 0,
        }
    ).groupby("name", sort=True)
    launching, total = of["launching"].sum(), of["work"].sum()
    frame = pd.DataFrame(
        {
            "calls": of.size(),
            "launching": launching,
            "host_ns": of["ns"].sum(),
            "median_ns": of["ns"].median(),
            "max_ns": of["ns"].max(),
            "work": total,
            "work_per_launch": (total / launching.where(launching > 0)).astype("Float64"),
            "max_work": of["work"].max(),
            "max_kernels": of["kernels"].max(),
        }
    )
    frame.insert(0, "api", pd.array([trace.names[name] for name in frame.index], "str"))
    frame.index.name = None
    frame = frame.sort_values(["host_ns", "api"], ascending=[False, True], ignore_index=True)
    said = (
        [] if len(events) else ["no calls of a runtime or driver recorded, so no launches: profile with CPU and CUDA"]
    )
    lost = int((trace.mask(*DEVICE_KINDS) & (known.launch < 0)).sum())
    if lost:
        said.append(f"{lost:,} pieces of device work have no launch in the file and are counted nowhere here")
    frame.attrs["cannot_say"] = said
    return frame


def _copies_cannot_say(trace: Trace, frame: pd.DataFrame) -> list[str]:
    if not trace.mask(*DEVICE_KINDS).any():
        return [NO_GPU]
    said = []
    host_ends = ((frame["kind"].str[0] == "H") & (frame["source"] == "unknown")) | (
        (frame["kind"].str[-1] == "H") & (frame["target"] == "unknown")
    )
    if unsaid := int(frame["calls"][host_ends].sum()):
        said.append(f"of {unsaid:,} copies the file does not say whether the host's memory is pinned or pageable")
    if unsized := int((frame["calls"] - frame["sized"]).sum()):
        said.append(f"of {unsized:,} copies the size is not recorded: they are missing from bytes and GB/s")
    return said
