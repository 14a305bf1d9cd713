"""Host buffers that were written while queued work had yet to read them, as far as our marks tell.

The same question as ``check.races`` asks at run time, asked of a recording afterwards: there the bytes are compared,
here there are only names, order and times. On a real device a hazard is a write within the time in which a read was
pending. On a software stream device times are modelled, and a deferred one runs its work when somebody waits for it:
there a hazard is a write without a wait that had made sure of the read. Whether a byte changed is not recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mrv2lab.trace.happens_before import HappensBefore
from mrv2lab.trace.links import links
from mrv2lab.trace.mark_waits import mark_kind
from mrv2lab.trace.members import members
from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

FOREIGN = (
    "host-buffer hazards need marks that name the buffers which the host writes (publish) and queued work reads (h2d): "
    "a trace of torch.profiler or nsys has no addresses; record with mrv2lab's Recorder, or watch with RaceDetector"
)
TEMPORARY = ".tmp"
"""Ending of names of pinned temporaries (``runtime/transfer.py``): each is memory of its own, kept by its copy."""
POOLED = ".uva"
"""Within names of slots of a UVA pool, whose memory is replaced when it grows."""


class _Mark(NamedTuple):
    event: int
    time: int
    step: int
    nbytes: int


def hazards(trace: Trace) -> pd.DataFrame:
    """One row a queued read of a host buffer that the host wrote before the read was done, in order of the write.

    ``buffer``, ``kind`` (``copy``: a queued copy reads it; ``in place``: a kernel does), ``reader`` and ``writer``
    (names of the marks), ``read_step``, ``write_step`` (scheduler's numbers, -1: unknown), ``read_site``,
    ``write_site``, ``queued_ns``, ``read_end_ns`` (when the device was done with it), ``write_ns`` (the first write in
    between), ``overlap_ns`` (from the write to the read's end; -1: not measured), ``evidence`` (``device times`` or
    ``no wait between``), ``write_recorded``, ``read_event``, ``write_event``.

    Buffers that the host fills through NumPy leave no mark when they are written. Of those, the copy that a later step
    queues from the same buffer counts as the write (``write_recorded`` False): it wrote no later than that.
    """
    import pandas as pd

    if parts := members(trace):
        return _of_members(parts)
    rows: list[tuple[Any, ...]] = []
    reads, writes, later, missing = _marks(trace)
    order = HappensBefore(trace) if trace.info.modelled and reads else None
    grown = 0
    for buffer in sorted(reads):
        recorded = buffer in writes
        of_buffer = writes.get(buffer) or later.get(buffer, [])
        if recorded and POOLED in buffer:
            kept = [mark for mark, fits in zip(of_buffer, _fit(of_buffer), strict=True) if fits]
            grown += len(of_buffer) - len(kept)
            of_buffer = kept
        if of_buffer:
            rows += _hit(trace, buffer, reads[buffer], of_buffer, recorded, order)
    columns = "buffer kind reader writer read_step write_step read_site write_site queued_ns read_end_ns write_ns "
    columns += "overlap_ns evidence write_recorded read_event write_event"
    table = pd.DataFrame(rows, columns=columns.split())
    integers = [name for name in table if name.endswith(("_ns", "_step", "_event"))]
    table = table.astype(dict.fromkeys(integers, np.int64) | {"write_recorded": bool})
    table = table.sort_values(["write_ns", "read_event"], kind="stable", ignore_index=True)
    if grown:
        missing.append(
            f"{grown:,} writes to slots of pools were larger than any before: they may have gone to new memory of the "
            "same name, so they are left out"
        )
    table.attrs["cannot_say"] = missing
    return table


def _of_members(parts: list[tuple[Array, Trace]]) -> pd.DataFrame:
    """The rows of every member of a merged trace, whose buffers and streams have names of their own."""
    import pandas as pd

    tables = [(hazards(part), events, part.info.title) for events, part in parts]
    moved = []
    for table, events, _ in tables:
        of_whole = {name: events[table[name].to_numpy(np.int64)] for name in ("read_event", "write_event")}
        moved.append(table.assign(**of_whole))
    found = pd.concat(moved, ignore_index=True).sort_values(
        ["write_ns", "read_event"], kind="stable", ignore_index=True
    )
    found.attrs["cannot_say"] = [f"{title}: {one}" for table, _, title in tables for one in table.attrs["cannot_say"]]
    return found


def _marks(
    trace: Trace,
) -> tuple[dict[str, list[tuple[_Mark, int]]], dict[str, list[_Mark]], dict[str, list[_Mark]], list[str]]:
    """By buffer: pending reads with their ends, publishes, and copies from static buffers; and what is missing."""
    work, launch = np.flatnonzero(links(trace).launch >= 0), links(trace).launch
    ends = dict(zip(launch[work].tolist(), (trace.start[work] + trace.duration[work]).tolist(), strict=True))
    reads: dict[str, list[tuple[_Mark, int]]] = {}
    writes: dict[str, list[_Mark]] = {}
    copies: dict[str, list[_Mark]] = {}
    marked, untimed = False, 0
    queued: list[tuple[str, _Mark]] = []
    for event in np.flatnonzero(trace.mask("runtime") & (trace.arg >= 0)).tolist():
        args = trace.args(event)
        kind = mark_kind(args)
        marked |= bool(kind)
        mark = _Mark(event, int(trace.start[event]), _integer(args.get("step"), -1), _integer(args.get("nbytes"), 0))
        if kind == "publish":
            for name in _static(args.get("writes")):
                writes.setdefault(name, []).append(mark)
        elif kind:
            queued += [(name, mark) for name in _static(args.get("reads"))]
            if kind == "h2d":
                for name in _static(args.get("reads")):
                    copies.setdefault(name, []).append(mark)
    for name, mark in queued:
        if name in writes or name in copies:
            if mark.event in ends or trace.info.modelled:
                reads.setdefault(name, []).append((mark, ends.get(mark.event, -1)))
            else:
                untimed += 1
    missing = [] if marked else [FOREIGN]
    if untimed:
        missing.append(
            f"{untimed:,} reads of host buffers have no device time, so whether they were pending is not known: record "
            "with device_times='launches'"
        )
    unmarked = sorted(copies.keys() - writes.keys())
    if unmarked:
        missing.append(
            f"{len(unmarked):,} buffers are written by the host without a mark ({', '.join(unmarked[:3])}"
            f"{', ...' if len(unmarked) > 3 else ''}): only copies that a later step queued from them were looked at"
        )
    if marked and trace.info.modelled:
        missing.append(
            "device times are modelled, so hazards follow from the order of writes and waits: no write was prevented, "
            "but when each read ran is not recorded; RaceDetector compares the bytes"
        )
    return reads, writes, copies, missing


def _integer(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _static(names: Any) -> list[str]:
    """Names whose memory is the same each time."""
    return [str(name) for name in names if not str(name).endswith(TEMPORARY)] if isinstance(names, list) else []


def _fit(writes: list[_Mark]) -> list[bool]:
    """Whether each write is no larger than one before it."""
    sizes = np.array([mark.nbytes for mark in writes], np.int64)
    before = np.concatenate([[0], np.maximum.accumulate(sizes)[:-1]])
    return [bool(fits) for fits in sizes <= before]


def _hit(
    trace: Trace,
    buffer: str,
    reads: list[tuple[_Mark, int]],
    writes: list[_Mark],
    recorded: bool,
    order: HappensBefore | None,
) -> list[tuple[Any, ...]]:
    """Rows of one buffer: each read with the first write after it was queued, if that came before it was done."""
    moments = np.array([mark.time for mark in writes], np.int64)
    rows = []
    for read, end in reads:
        place = int(np.searchsorted(moments, read.time, side="right"))
        while not recorded and place < len(writes) and writes[place].step == read.step:
            place += 1  # a step may copy one buffer in pieces
        if place == len(writes):
            continue
        write = writes[place]
        asked, told = trace.args(read.event), trace.args(write.event)
        if order.done(str(asked.get("stream", "")), read.time, write.time) if order else write.time >= end:
            continue
        rows.append(
            (
                buffer,
                "copy" if mark_kind(asked) == "h2d" else "in place",
                f"{mark_kind(asked)} {trace.name_of(read.event)}",
                f"{mark_kind(told)} {trace.name_of(write.event)}",
                read.step,
                write.step,
                str(asked.get("site") or ""),
                str(told.get("site") or ""),
                read.time,
                end,
                write.time,
                -1 if order else end - write.time,
                "no wait between" if order else "device times",
                recorded,
                read.event,
                write.event,
            )
        )
    return rows
