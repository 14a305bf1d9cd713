"""Small nsys exports with chosen tables, made with the column names of nsys 2026.2."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
EVENT = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
OVERHEAD = "CUPTI_ACTIVITY_KIND_OVERHEAD"
NVTX = "NVTX_EVENTS"

_DEVICE = "start end deviceId contextId streamId correlationId globalPid"
COLUMNS: dict[str, str] = {
    "StringIds": "id value",
    "PROCESSES": "globalPid pid name",
    "ThreadNames": "nameId priority globalTid",
    "META_DATA_EXPORT": "name value",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime systemClockNs",
    "TARGET_INFO_GPU": "id name busLocation totalMemory smCount",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid uuid numMultiprocessors",
    "ENUM_CUPTI_OVERHEAD_TYPE": "id name label",
    "CUDA_CALLCHAINS": "id symbol module stackDepth",
    KERNEL: f"{_DEVICE} demangledName shortName registersPerThread gridX gridY gridZ blockX blockY blockZ "
    "staticSharedMemory dynamicSharedMemory graphNodeId graphId",
    MEMCPY: f"{_DEVICE} bytes copyKind srcKind dstKind srcDeviceId dstDeviceId graphNodeId",
    MEMSET: f"{_DEVICE} value bytes graphNodeId memKind",
    SYNC: f"{_DEVICE} syncType eventId eventSyncId",
    GRAPH: f"{_DEVICE} graphId graphExecId",
    EVENT: "timestamp deviceId contextId streamId correlationId globalPid eventId",
    RUNTIME: "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "OSRT_API": "start end globalTid nameId",
    OVERHEAD: "start end globalTid correlationId nameId overheadType",
    NVTX: "start end eventType rangeId category text globalTid endGlobalTid textId domainId",
    "SCHED_EVENTS": "start cpu isSchedIn globalTid",
}


def global_id(pid: int, tid: int = 0) -> int:
    """A ``globalTid``, or with a thread of 0 a ``globalPid``."""
    return 1 << 48 | pid << 24 | tid


def write_nsys(path: Path, tables: dict[str, list[dict[str, Any]]], without: tuple[str, ...] = ()) -> Path:
    """An export with these tables and rows; what a row leaves out is NULL, ``without`` names columns to leave out.

    Names may be given as text where the format has string ids: they are put into ``StringIds``.
    """
    strings: dict[str, int] = {}
    for rows in tables.values():
        for row in rows:
            for column in ("nameId", "demangledName", "shortName", "textId", "symbol"):
                if isinstance(row.get(column), str):
                    row[column] = strings.setdefault(row[column], len(strings) + 1)
    if strings:
        tables = {"StringIds": [{"id": key, "value": text} for text, key in strings.items()], **tables}
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    with connection:
        for table, rows in tables.items():
            columns = [name for name in COLUMNS[table].split() if name not in without]
            quoted = ", ".join(f'"{name}"' for name in columns)
            connection.execute(f'CREATE TABLE "{table}" ({quoted})')
            marks = ", ".join("?" * len(columns))
            values = [[row.get(name) for name in columns] for row in rows]
            connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', values)
    connection.close()
    return path


def two_processes() -> dict[str, list[dict[str, Any]]]:
    """Two ranks, each with its GPU as CUDA device 0, whose correlation ids collide; every table of events once."""
    a, b = global_id(100), global_id(200)
    at = {"deviceId": 0, "contextId": 1, "streamId": 7}
    launch_shape = {"gridX": 4, "gridY": 1, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1}
    shape = launch_shape | {"registersPerThread": 32, "staticSharedMemory": 16, "dynamicSharedMemory": 1024}
    return {
        "META_DATA_EXPORT": [
            {"name": "EXPORT_PRODUCT_VERSION", "value": "2026.2.1"},
            {"name": "EXPORT_SCHEMA_VERSION", "value": "3.25.0"},
        ],
        "TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": 1_700_000_000_000_000_000, "systemClockNs": 5}],
        "TARGET_INFO_CUDA_DEVICE": [{"gpuId": 2, "cudaId": 0, "pid": 100}, {"gpuId": 3, "cudaId": 0, "pid": 200}],
        "PROCESSES": [{"globalPid": a, "pid": 100, "name": "python3"}, {"globalPid": b, "pid": 200, "name": None}],
        "ThreadNames": [{"nameId": "main", "globalTid": a + 1}],
        RUNTIME: [
            {"start": 1000, "end": 1100, "globalTid": a + 1, "correlationId": 5, "nameId": "cudaLaunchKernel_v7000"},
            {"start": 1010, "end": 1050, "globalTid": b + 1, "correlationId": 5, "nameId": "cuLaunchKernelEx"}
            | {"returnValue": 700},
            {"start": 1200, "end": 1250, "globalTid": a + 1, "correlationId": 6}
            | {"nameId": "cudaMemcpyAsync_ptsz_v7000"},
            {"start": 1900, "end": 2300, "globalTid": a + 1, "correlationId": 8}
            | {"nameId": "cudaStreamSynchronize_v3020"},
        ],
        KERNEL: [
            {"start": 1500, "end": 1600, "globalPid": a, "correlationId": 5, "demangledName": "gemm<int>"} | at | shape,
            {"start": 1501, "end": 1521, "globalPid": b, "correlationId": 5, "demangledName": "gemm<int>"} | at | shape,
            {"start": 1700, "end": 1701, "globalPid": b, "correlationId": 6, "shortName": "orphan"} | at,
        ],
        MEMCPY: [
            {"start": 1600, "end": 1650, "globalPid": a, "correlationId": 6, "bytes": 4096, "copyKind": 1}
            | {"srcKind": 0, "dstKind": 2}
            | at,
            {"start": 1800, "end": 1810, "globalPid": a, "correlationId": 7, "bytes": 64, "copyKind": 2}
            | {"srcKind": 2, "dstKind": 1}
            | at,
        ],
        MEMSET: [{"start": 1820, "end": 1830, "globalPid": a, "bytes": 256, "value": 0, "memKind": 2} | at],
        GRAPH: [{"start": 1850, "end": 2200, "globalPid": a, "correlationId": 9, "graphId": 3, "graphExecId": 4} | at],
        SYNC: [
            {"start": 1910, "end": 2290, "globalPid": a, "correlationId": 8, "syncType": 3, "eventId": 0xFFFFFFFF} | at,
            {"start": 1910, "end": 1912, "globalPid": b, "correlationId": 9, "syncType": 2, "eventId": 11}
            | at
            | {"streamId": 8},
        ],
        EVENT: [
            {"timestamp": 2250, "globalPid": a, "eventId": 11} | at,
            {"timestamp": 0, "globalPid": a, "eventId": 12} | at,
        ],
        OVERHEAD: [
            {"start": 1020, "end": 1040, "globalTid": a + 1, "nameId": "Command Buffer Full", "overheadType": 8},
        ],
        "ENUM_CUPTI_OVERHEAD_TYPE": [{"id": 8, "name": "X", "label": "Command buffer full (CUDA)"}],
        "OSRT_API": [{"start": 2400, "end": 2500, "globalTid": a + 1, "nameId": "poll"}],
        NVTX: [
            {"start": 0, "eventType": 75, "text": "NCCL", "domainId": 1},
            {"start": 900, "end": 2600, "eventType": 59, "text": "mrv2lab.step#1", "globalTid": a + 1, "domainId": 0},
            {"start": 950, "end": 1300, "eventType": 59, "textId": "mrv2lab.phase.forward", "globalTid": a + 1},
            {"start": 960, "end": 1700, "eventType": 60, "text": "request 7", "globalTid": a + 1, "domainId": 1}
            | {"endGlobalTid": a + 2},
            {"start": 970, "end": None, "eventType": 59, "text": "never popped", "globalTid": a + 1},
            {"start": 980, "eventType": 34, "text": "a mark", "globalTid": a + 1},
            {"start": 990, "end": 991, "eventType": 99, "text": "what?", "globalTid": a + 1},
        ],
        "SCHED_EVENTS": [{"start": 1, "cpu": 0}, {"start": 2, "cpu": 0}],
    }  # fmt: skip
