"""Host tables of an nsys export: CUDA calls, library calls, operating system calls and overhead."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import orjson

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.nsys_device import lengths
from mrv2lab.trace.nsys_lanes import Lanes
from mrv2lab.trace.nsys_tables import NULL, Columns, NsysFile, shared_args, spread
from mrv2lab.trace.trace import KIND

Array = np.ndarray[Any, Any]

VERSION = re.compile(r"(_ptsz|_ptds)?_v\d+$")
"""``cudaLaunchKernel_ptsz_v7000`` is cudaLaunchKernel, per-thread default stream, since CUDA 7."""
CALLS: dict[str, str] = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "runtime",
    "CUPTI_ACTIVITY_KIND_DRIVER": "runtime",
    "CUDNN_EVENTS": "op",
    "CUBLAS_EVENTS": "op",
    "OSRT_API": "other",
}
"""Tables of named calls on a thread, and the kind of their events."""
OVERHEADS: tuple[str, ...] = ("CUPTI_ACTIVITY_KIND_OVERHEAD", "PROFILER_OVERHEAD")


class HostTables:
    """Adds the rows of each table to the builder."""

    def __init__(self, file: NsysFile, builder: TraceBuilder, lanes: Lanes) -> None:
        self._file = file
        self._builder = builder
        self._lanes = lanes
        self._chains = self._callchains()

    def add(self) -> None:
        """Everything that happened on the host."""
        for table, kind in CALLS.items():
            self._calls(table, kind)
        for table in OVERHEADS:
            self._overhead(table)

    def _callchains(self) -> dict[int, list[str]]:
        """Stack of each call chain, innermost frame first."""
        rows = self._file.integers("CUDA_CALLCHAINS", ["id", "stackDepth", "symbol"])
        chains: dict[int, list[str]] = {}
        order = np.lexsort((rows["stackDepth"], rows["id"]))
        for chain, symbol in zip(rows["id"][order].tolist(), rows["symbol"][order].tolist(), strict=True):
            chains.setdefault(chain, []).append(self._file.string(symbol))
        return chains

    # -- calls

    def _calls(self, table: str, kind: str) -> None:
        said = ["nameId", "returnValue", "callchainId"]
        rows = self._file.integers(table, ["start", "end", "globalTid", "correlationId", *said])
        names = spread(rows["nameId"], lambda key: self._builder.name(VERSION.sub("", self._file.string(key))))
        traced = kind == "runtime"
        self._extend(
            rows,
            kind,
            names,
            shared_args(self._builder, {name: rows[name] for name in said}, self._call_args),
            self._lanes.correlations(rows["globalTid"], rows["correlationId"]) if traced else None,
        )

    def _call_args(self, row: dict[str, int]) -> bytes | None:
        args: dict[str, Any] = {}
        name = self._file.string(row["nameId"])
        if VERSION.search(name):
            args["api"] = name
        if row["returnValue"] not in (0, NULL):
            args["return value"] = row["returnValue"]
        if row["callchainId"] in self._chains:
            args["callchain"] = self._chains[row["callchainId"]]
        return orjson.dumps(args) if args else None

    def _overhead(self, table: str) -> None:
        rows = self._file.integers(table, ["start", "end", "globalTid", "nameId", "overheadType"])
        types = self._labels("ENUM_CUPTI_OVERHEAD_TYPE")
        names = spread(rows["nameId"], lambda key: self._builder.name(self._file.string(key)))

        def args(row: dict[str, int]) -> bytes | None:
            kind = row["overheadType"]
            return None if kind == NULL else orjson.dumps({"overhead": types.get(kind, f"type {kind}")})

        said = shared_args(self._builder, {"overheadType": rows["overheadType"]}, args)
        self._extend(rows, "overhead", names, said)

    def _labels(self, table: str) -> dict[int, str]:
        ids, labels = self._file.integers(table, ["id"])["id"], self._file.texts(table, "label")
        return {int(key): label for key, label in zip(ids, labels, strict=True) if label}

    def _extend(self, rows: Columns, kind: str, names: Array, args: Array, correlation: Array | None = None) -> None:
        kept, duration = lengths(self._builder, rows, kind)
        self._builder.extend(
            start=rows["start"][kept],
            duration=duration[kept],
            name=names[kept],
            kind=np.full(len(names), KIND[kind])[kept],
            lane=self._lanes.threads(rows["globalTid"])[kept],
            correlation=(np.full(len(names), -1, np.int64) if correlation is None else correlation)[kept],
            arg=args[kept],
        )
