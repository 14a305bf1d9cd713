"""Device tables of an nsys export: kernels, copies, memsets, whole graphs, synchronisations and CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.nsys_lanes import NO_ID, Lanes
from mrv2lab.trace.nsys_tables import NULL, Columns, NsysFile, shared_args, spread
from mrv2lab.trace.trace import KIND

Array = np.ndarray[Any, Any]

COPIES: dict[int, tuple[str, str]] = {
    1: ("HtoD", ""),
    2: ("DtoH", ""),
    3: ("HtoA", ""),
    4: ("AtoH", ""),
    5: ("AtoA", ""),
    6: ("AtoD", ""),
    7: ("DtoA", ""),
    8: ("DtoD", ""),
    9: ("HtoH", ""),
    10: ("PtoP", ""),
    11: ("HtoD", "unified memory"),
    12: ("DtoH", "unified memory"),
    13: ("DtoD", "unified memory"),
}
"""``ENUM_CUDA_MEMCPY_OPER``: direction, and who asked for the copy if not the program."""
MEMORY: tuple[str, ...] = ("pageable", "pinned", "device", "array", "managed", "device", "managed")
"""``ENUM_CUDA_MEM_KIND``; static ones are called as the others."""
SYNCS: dict[int, str] = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
"""``ENUM_CUPTI_SYNC_TYPE`` in Kineto's words."""
DEVICE_SIDE = 2
"""The one that makes a stream wait, not the host."""

PLACE = ["start", "end", "globalPid", "deviceId", "contextId", "streamId", "correlationId"]
KERNEL = ["gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "staticSharedMemory"]
KERNEL += ["dynamicSharedMemory", "graphId", "graphNodeId"]
COPY = ["copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId", "graphNodeId"]

Make = Callable[[dict[str, int]], bytes | None]


class DeviceTables:
    """Adds the rows of each table to the builder."""

    def __init__(self, file: NsysFile, builder: TraceBuilder, lanes: Lanes) -> None:
        self._file = file
        self._builder = builder
        self._lanes = lanes

    def add(self) -> None:
        """Everything that happened on a device."""
        kernel, memcpy, memset, graph, sync, event = self._read()
        for rows in (kernel, memcpy, memset, graph):
            self._lanes.note_contexts(rows)
        self._kernels(kernel)
        self._extend(memcpy, "memcpy", spread(_pack(memcpy), self._copy_name), COPY, _copy_args, memcpy["bytes"])
        self._extend(memset, "memset", spread(memset["memKind"], self._set_name), SET, _set_args, memset["bytes"])
        if len(graph["start"]):
            self._builder.problem(
                "a CUDA graph is one piece of work, its kernels unknown; --cuda-graph-trace=node traces them",
                count=len(graph["start"]),
            )
        self._extend(graph, "graph", spread(graph["graphId"], self._graph_name), GRAPH, _graph_args)
        self._syncs(sync)
        self._events(event)

    def _read(self) -> tuple[Columns, ...]:
        prefix = "CUPTI_ACTIVITY_KIND_"
        read = self._file.integers
        return (
            read(f"{prefix}KERNEL", [*PLACE, *KERNEL, "demangledName", "shortName"]),
            read(f"{prefix}MEMCPY", [*PLACE, *COPY, "bytes"]),
            read(f"{prefix}MEMSET", [*PLACE, *SET, "bytes"]),
            read(f"{prefix}GRAPH_TRACE", [*PLACE, *GRAPH]),
            read(f"{prefix}SYNCHRONIZATION", [*PLACE, *SYNC]),
            read(f"{prefix}CUDA_EVENT", [*PLACE[2:], "timestamp", "eventId"]),
        )

    def _kernels(self, rows: Columns) -> None:
        names = np.where(rows["demangledName"] == NULL, rows["shortName"], rows["demangledName"])
        names = spread(names, lambda key: self._builder.name(self._file.string(key)))
        self._extend(rows, "kernel", names, KERNEL, _kernel_args)

    def _extend(
        self, rows: Columns, kind: str, names: Array, said: list[str], make: Make, nbytes: Array | None = None
    ) -> None:
        count = len(names)
        kept, duration = lengths(self._builder, rows, kind)
        self._builder.extend(
            start=rows["start"][kept],
            duration=duration[kept],
            name=names[kept],
            kind=np.full(count, KIND[kind])[kept],
            lane=self._lanes.streams(rows)[kept],
            correlation=self._lanes.correlations(rows["globalPid"], rows["correlationId"])[kept],
            nbytes=(np.full(count, -1, np.int64) if nbytes is None else np.where(nbytes == NULL, -1, nbytes))[kept],
            arg=shared_args(self._builder, {name: rows[name] for name in said}, make)[kept],
        )

    def _copy_name(self, packed: int) -> int:
        copy, source, target = packed >> 16, packed >> 8 & 0xFF, packed & 0xFF
        direction = COPIES.get(copy, ("unknown", ""))[0]
        ends = [_memory(end).title() or "Unknown" for end in (source, target)]
        return self._builder.name(f"Memcpy {direction} ({ends[0]} -> {ends[1]})")

    def _set_name(self, memory: int) -> int:
        return self._builder.name(f"Memset ({_memory(memory).title() or 'Unknown'})")

    def _graph_name(self, graph: int) -> int:
        return self._builder.name("CUDA graph" if graph == NULL else f"CUDA graph {graph}")

    def _syncs(self, rows: Columns) -> None:
        """In rows of their own beside the streams, since the host's waits lie across a stream's work."""
        kept, duration = lengths(self._builder, rows, "synchronisation")
        names = spread(rows["syncType"], lambda key: self._builder.name(SYNCS.get(key, "Unknown Sync")))
        self._builder.extend(
            start=rows["start"][kept],
            duration=duration[kept],
            name=names[kept],
            kind=np.full(len(names), KIND["sync"])[kept],
            lane=self._lanes.streams(rows, "other", " sync")[kept],
            correlation=self._lanes.correlations(rows["globalPid"], rows["correlationId"])[kept],
            arg=shared_args(self._builder, {name: rows[name] for name in SYNC}, _sync_args)[kept],
        )

    def _events(self, rows: Columns) -> None:
        timed = rows["timestamp"] > 0
        if not timed.all():
            self._builder.problem("a CUDA event has no device time", count=int((~timed).sum()))
        count = int(timed.sum())
        if not count:
            return
        self._builder.extend(
            start=rows["timestamp"][timed],
            duration=np.zeros(count, np.int64),
            name=np.full(count, self._builder.name("CUDA event")),
            kind=np.full(count, KIND["event"]),
            lane=self._lanes.streams(rows, "other", " events")[timed],
            correlation=self._lanes.correlations(rows["globalPid"], rows["correlationId"])[timed],
            arg=shared_args(self._builder, {"eventId": rows["eventId"]}, _event_args)[timed],
        )


SET = ["memKind", "value", "graphNodeId"]
GRAPH = ["graphId", "graphExecId"]
SYNC = ["syncType", "eventId", "eventSyncId"]


def lengths(builder: TraceBuilder, rows: Columns, what: str) -> tuple[Array, Array]:
    """[n] bool: rows that have a start; [n] int64: durations, 0 where the end is missing or before the start."""
    start, end = rows["start"], rows["end"]
    placed, ended = start != NULL, end != NULL
    backwards = placed & ended & (end < start)
    for mask, reason in (
        (~placed, "has no start and is left out"),
        (placed & ~ended, "has no end and is shown with length 0"),
        (backwards, "ends before it starts and is shown with length 0"),
    ):
        if mask.any():
            builder.problem(f"{_article(what)} {reason}", count=int(mask.sum()))
    return placed, np.where(placed & ended & ~backwards, np.where(ended, end, 0) - np.where(placed, start, 0), 0)


def _article(what: str) -> str:
    return f"an {what}" if what[0] in "aeiouN" else f"a {what}"


def _pack(rows: Columns) -> Array:
    """Kind of copy and of both ends in one integer."""
    ends = [np.where((rows[name] >= 0) & (rows[name] < 0xFF), rows[name], 0xFF) for name in ("srcKind", "dstKind")]
    packed: Array = (np.maximum(rows["copyKind"], 0) << 16) | (ends[0] << 8) | ends[1]
    return packed


def _memory(kind: int) -> str:
    return MEMORY[kind] if 0 <= kind < len(MEMORY) else ""


def _text(args: dict[str, Any]) -> bytes | None:
    """JSON without what is not known; None where nothing is."""
    known = {key: value for key, value in args.items() if value not in (NULL, "", None)}
    return orjson.dumps(known) if known else None


def _kernel_args(row: dict[str, int]) -> bytes | None:
    static, dynamic = row["staticSharedMemory"], row["dynamicSharedMemory"]
    return _text(
        {
            "grid": _triple(row, "grid"),
            "block": _triple(row, "block"),
            "registers per thread": row["registersPerThread"],
            "shared memory": NULL if NULL in (static, dynamic) else static + dynamic,
            "graph id": row["graphId"],
            "graph node id": row["graphNodeId"],
        }
    )


def _triple(row: dict[str, int], name: str) -> list[int] | None:
    sides = [row[f"{name}{axis}"] for axis in "XYZ"]
    return None if NULL in sides else sides


def _copy_args(row: dict[str, int]) -> bytes | None:
    direction, cause = COPIES.get(row["copyKind"], (f"unknown ({row['copyKind']})", ""))
    return _text(
        {
            "copy_kind": direction,
            "src": _memory(row["srcKind"]),
            "dst": _memory(row["dstKind"]),
            "cause": cause,
            "src device": row["srcDeviceId"],
            "dst device": row["dstDeviceId"],
            "graph node id": row["graphNodeId"],
        }
    )


def _set_args(row: dict[str, int]) -> bytes | None:
    memory = _memory(row["memKind"])
    return _text({"value": row["value"], "dst": memory, "graph node id": row["graphNodeId"]})


def _graph_args(row: dict[str, int]) -> bytes | None:
    return _text({"graph id": row["graphId"], "graph exec id": row["graphExecId"]})


def _sync_args(row: dict[str, int]) -> bytes | None:
    kind, event = row["syncType"], row["eventId"]
    args: dict[str, Any] = {
        "cuda_sync_kind": SYNCS.get(kind, f"unknown ({kind})"),
        "event id": NULL if event == NO_ID else event,
        "event sync id": NULL if event in (NULL, NO_ID) else row["eventSyncId"],
    }
    return _text(args | ({"device_side": True} if kind == DEVICE_SIDE else {}))


def _event_args(row: dict[str, int]) -> bytes | None:
    return _text({"event id": row["eventId"]})
