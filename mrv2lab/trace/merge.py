"""Several traces as one value, on one axis: to analyse, draw or write ranks, or two runs, together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrv2lab.trace.align import Alignment
from mrv2lab.trace.args import ArgStore
from mrv2lab.trace.trace import Lane, Problem, Trace, TraceError, TraceInfo, problems_of

Array = np.ndarray[Any, Any]


def merge(traces: Sequence[Trace], alignment: Alignment) -> Trace:
    """One trace of all events. Lanes get the trace's rank (or title) in front of their process, which also keeps apart
    devices of one number (:mod:`mrv2lab.trace.devices`); correlation ids are numbered anew.

    ``info.extra`` holds ``traces`` (title, path, rank, offset of each, and what :mod:`mrv2lab.trace.members` needs to
    tell them apart again) and ``alignment``. Time 0 is the earliest event,
    on the first trace's clock.

    Raises:
        TraceError: no trace, or an alignment of another number of traces.
    """
    if not traces or len(traces) != len(alignment.offsets_ns):
        raise TraceError(
            f"{len(traces)} traces and an alignment of {len(alignment.offsets_ns)}: merge what align() was given"
        )
    prefixes = _prefixes(traces)
    names: dict[str, int] = {}
    lanes: dict[Lane, int] = {}
    columns: dict[str, list[Array]] = {}
    devices: list[dict[str, Any]] = []
    correlations, arguments = 1, 0  # a file takes 0 for none
    for trace, prefix, offset in zip(traces, prefixes, alignment.offsets_ns, strict=True):
        name_at = np.array([names.setdefault(name, len(names)) for name in trace.names] or [0], np.int32)
        moved = [_moved(lane, prefix, trace.info.rank) for lane in trace.lanes]
        lane_at = np.array([lanes.setdefault(lane, len(lanes)) for lane in moved] or [0], np.int32)
        ids = _numbered(trace.correlation, correlations)
        piece = {
            "start": trace.start + offset,
            "duration": trace.duration,
            "name": name_at[trace.name],
            "kind": trace.kind,
            "lane": lane_at[trace.lane],
            "correlation": ids,
            "nbytes": trace.nbytes,
            "arg": np.where(trace.arg >= 0, trace.arg + arguments, -1).astype(np.int32),
        }
        correlations = max(correlations, int(ids.max(initial=-1)) + 1)
        arguments += len(trace.store)
        for column, values in piece.items():
            columns.setdefault(column, []).append(values)
        devices += [{**device, "trace": prefix, "rank": trace.info.rank} for device in trace.info.devices]
    joined = {column: np.concatenate(pieces) for column, pieces in columns.items()}
    order = np.lexsort((-joined["duration"], joined["start"]))
    joined = {column: values[order] for column, values in joined.items()}
    first = int(joined["start"][0]) if len(order) else 0
    joined["start"] -= first
    return Trace(
        info=_info(traces, alignment, prefixes, tuple(devices), first),
        names=tuple(names),
        lanes=tuple(lanes),
        **joined,
        store=_stores(traces),
        problems=_problems(traces, prefixes),
    )


def _numbered(ids: Array, first: int) -> Array:
    """The same ids, -1 kept, as consecutive numbers from ``first``."""
    fresh = np.full(len(ids), -1, np.int64)
    known = ids >= 0
    fresh[known] = first + np.unique(ids[known], return_inverse=True)[1]
    return fresh


def _prefixes(traces: Sequence[Trace]) -> list[str]:
    """``rank 3`` where ranks are known and differ, else the titles, numbered where two are the same."""
    ranks = [trace.info.rank for trace in traces]
    if min(ranks) >= 0 and len(set(ranks)) == len(ranks):
        return [f"rank {rank}" for rank in ranks]
    titles = [trace.info.title for trace in traces]
    if len(set(titles)) == len(titles):
        return titles
    return [f"{index}: {title}" for index, title in enumerate(titles)]


def _moved(lane: Lane, prefix: str, rank: int) -> Lane:
    return dataclasses.replace(
        lane,
        process=f"{prefix}: {lane.process}" if lane.process else prefix,
        label=f"{prefix}: {lane}",
        rank=lane.rank if lane.rank >= 0 else rank,
    )


def _info(
    traces: Sequence[Trace], alignment: Alignment, prefixes: list[str], devices: tuple[dict[str, Any], ...], first: int
) -> TraceInfo:
    infos = [trace.info for trace in traces]
    items = [set(info.versions.items()) for info in infos]
    members = [
        {
            "title": info.title,
            "path": info.path,
            "rank": info.rank,
            "prefix": prefix,
            "offset_ns": offset,
            "producer": info.producer,
            "modelled": info.modelled,
            "extra": info.extra if info.producer == "merged" else {},
        }
        for info, prefix, offset in zip(infos, prefixes, alignment.offsets_ns, strict=True)
    ]
    return TraceInfo(
        producer="merged",
        title=" + ".join(info.title for info in infos),
        clock=infos[0].clock,
        origin_ns=infos[0].origin_ns + first,
        world_size=max(info.world_size for info in infos),
        devices=devices,
        modelled=any(info.modelled for info in infos),
        versions=dict(sorted(set.intersection(*items))),
        extra={"traces": members, "alignment": alignment.to_dict()},
    )


def _stores(traces: Sequence[Trace]) -> ArgStore:
    """All arguments in one block. A selection brings its whole trace's."""
    starts = np.cumsum([0] + [len(trace.store.blob) for trace in traces], dtype=np.int64)
    pieces = [trace.store.offsets[:-1] + start for trace, start in zip(traces, starts, strict=False)]
    return ArgStore(b"".join(trace.store.blob for trace in traces), np.concatenate([*pieces, starts[-1:]]))


def _problems(traces: Sequence[Trace], prefixes: list[str]) -> tuple[Problem, ...]:
    """Everyone's, with the trace named."""
    found = [
        dataclasses.replace(problem, reason=f"{prefix}: {problem.reason}")
        for trace, prefix in zip(traces, prefixes, strict=True)
        for problem in trace.problems
    ]
    if len({trace.info.modelled for trace in traces}) > 1:
        modelled = [prefix for trace, prefix in zip(traces, prefixes, strict=True) if trace.info.modelled]
        found.append(Problem(f"device times of {', '.join(modelled)} are modelled, the others' are measured"))
    return problems_of(found)
