"""Nsight Systems: read what ``nsys export --type sqlite`` made of a report, without changing the file.

Times are nanoseconds from the session's start, which ``TARGET_INFO_SESSION_START_TIME`` gives by the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.nsys_device import DeviceTables
from mrv2lab.trace.nsys_host import CALLS, OVERHEADS, HostTables
from mrv2lab.trace.nsys_lanes import Lanes
from mrv2lab.trace.nsys_nvtx import TABLE as NVTX
from mrv2lab.trace.nsys_nvtx import add_nvtx
from mrv2lab.trace.nsys_tables import NULL, NsysFile, quoted
from mrv2lab.trace.trace import Trace, TraceError, TraceInfo

DEVICE_TABLES: tuple[str, ...] = tuple(
    f"CUPTI_ACTIVITY_KIND_{name}" for name in "KERNEL MEMCPY MEMSET GRAPH_TRACE SYNCHRONIZATION CUDA_EVENT".split()
)
EVENTS: frozenset[str] = frozenset((*DEVICE_TABLES, *CALLS, *OVERHEADS, NVTX))
"""Tables whose rows become events."""

TOLD: frozenset[str] = frozenset(
    "EXPORT_PRODUCT_NAME EXPORT_PRODUCT_VERSION EXPORT_SCHEMA_VERSION EXPORT_PARAM_TIME_NORMALIZE "
    "EXPORT_PARAM_TIME_SHIFT CUDA_GRAPH_TRACE_OPTIONS:MODE CUDA_TRACE_SCOPE RUN_DURATION_MS START_TRIGGER".split()
)
"""What is kept of the export's and the capture's own words. They hold the user's name, command line and environment,
secrets included, which must not travel on into what is written from a trace."""


def read_nsys(
    path: str | Path,
    *,
    progress: bool = True,
    max_bytes: int = 2 << 30,
    cancel: Callable[[], bool] | None = None,
) -> Trace:
    """The trace in an export. ``cancel`` is asked between pieces; ``progress`` shows a bar for large files.

    The file is opened immutable: nothing is written to it or beside it. Raises :class:`TraceError` for what is no
    export, is damaged, holds no event or has over ``max_bytes``, ``TraceCancelled`` where ``cancel`` said so.
    """
    with NsysFile(path, max_bytes, progress, cancel) as file:
        if not EVENTS & file.tables.keys() and "META_DATA_EXPORT" not in file.tables:
            there = ", ".join(sorted(file.tables)[:8]) or "none"
            raise TraceError(f"{path}: an SQLite file without tables of Nsight Systems (its tables: {there})")
        builder = TraceBuilder()
        lanes = Lanes(file, builder)
        HostTables(file, builder, lanes).add()
        add_nvtx(file, builder, lanes)
        DeviceTables(file, builder, lanes).add()
        _note_unread(file, builder)
        trace = builder.build(_info(file, lanes))
    if not len(trace):
        tables = ", ".join(sorted(EVENTS & file.tables.keys())) or "none"
        raise TraceError(f"{path}: an export without events (tables for them: {tables}); trace cuda,nvtx with nsys")
    return trace


def _note_unread(file: NsysFile, builder: TraceBuilder) -> None:
    """Tables of timed rows that no reader here knows, and what SQLite kept beside the file."""
    for table, columns in file.tables.items():
        if table not in EVENTS and not table.startswith("TARGET_INFO_") and {"start", "timestamp"} & set(columns):
            count = file.count(table)
            if count:
                builder.problem(f"table {table} is not read", count=count)
    journal = file.path.with_name(f"{file.path.name}-wal")
    if journal.is_file() and journal.stat().st_size:
        builder.problem("changes that SQLite has not merged into the file are not read", example=journal.name)


def _info(file: NsysFile, lanes: Lanes) -> TraceInfo:
    export = file.lookup("META_DATA_EXPORT")
    start = int(file.integers("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"][:1].sum())
    by_wall_clock = export.get("EXPORT_PARAM_TIME_NORMALIZE") == "true"
    known = start > 0 or by_wall_clock
    versions = {"nsys": export.get("EXPORT_PRODUCT_VERSION", ""), "schema": export.get("EXPORT_SCHEMA_VERSION", "")}
    return TraceInfo(
        producer="nsys",
        title=file.path.name,
        path=str(file.path),
        clock="unix" if known else "session",
        origin_ns=start if start > 0 and not by_wall_clock else 0,
        devices=_devices(file, lanes),
        versions={name: version for name, version in versions.items() if version},
        extra={name: value for name, value in (export | file.lookup("META_DATA_CAPTURE")).items() if name in TOLD},
    )


def _devices(file: NsysFile, lanes: Lanes) -> tuple[dict[str, Any], ...]:
    """What TARGET_INFO_GPU says, or the bare numbers of the devices that worked."""
    wanted = ("id", "name", "busLocation", "totalMemory", "smCount", "chipName", "computeMajor", "computeMinor", "uuid")
    columns = [name for name in wanted if name in file.tables.get("TARGET_INFO_GPU", ())]
    if "id" not in columns:
        return tuple({"id": device} for device in sorted(lanes.devices) if device >= 0)
    sql = f"SELECT {', '.join(quoted(name) for name in columns)} FROM TARGET_INFO_GPU ORDER BY id"
    rows = [dict(zip(columns, row, strict=True)) for row in file.rows(sql)]
    return tuple({name: value for name, value in row.items() if value not in (None, NULL)} for row in rows)
