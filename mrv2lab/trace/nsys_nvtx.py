"""NVTX ranges and marks of an nsys export."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.nsys_device import lengths
from mrv2lab.trace.nsys_lanes import Lanes
from mrv2lab.trace.nsys_tables import NULL, Columns, NsysFile, shared_args
from mrv2lab.trace.trace import KIND

Array = np.ndarray[Any, Any]

TABLE = "NVTX_EVENTS"
PUSH_POP, START_END, MARK, CATEGORY, DOMAIN = 59, 60, 34, 33, 75
SILENT = (CATEGORY, DOMAIN, 39, 76)
"""Rows that name something and are no events: categories, domains, threads, destroyed domains."""
PHASE = "mrv2lab.phase."
"""Ranges of ours that are phases."""


def add_nvtx(file: NsysFile, builder: TraceBuilder, lanes: Lanes) -> None:
    """Push/pop ranges on their threads; start/end ranges, which cross threads and each other, in one row a process."""
    rows = file.integers(TABLE, ["start", "end", "eventType", "globalTid", "domainId", "category", "textId"])
    texts = [
        text if text is not None else file.string(key) if key != NULL else "unnamed range"
        for text, key in zip(file.texts(TABLE, "text"), rows["textId"].tolist(), strict=True)
    ]
    domains = _named(rows, texts, DOMAIN, ("domainId",))
    categories = _named(rows, texts, CATEGORY, ("domainId", "category"))
    kept = np.isin(rows["eventType"], (PUSH_POP, START_END, MARK))
    _note_others(builder, rows["eventType"][~kept])
    used = np.flatnonzero(kept)
    rows = {name: column[used] for name, column in rows.items()}
    texts = [texts[place] for place in used.tolist()]

    mark = rows["eventType"] == MARK
    rows["end"] = np.where(mark, rows["start"], rows["end"])
    rows["unfinished"] = (rows["end"] == NULL).astype(np.int64)

    def args(row: dict[str, int]) -> bytes | None:
        domain, category = row["domainId"], row["category"]
        known: dict[str, Any] = {}
        if (domain,) in domains:
            known["domain"] = domains[domain,]
        if category not in (NULL, 0):
            known["category"] = categories.get((domain, category), category)
        if row["unfinished"]:
            known["unfinished"] = True
        return orjson.dumps(known) if known else None

    names = np.array([builder.name(text) for text in texts], np.int64)
    phases = [builder.name(text) for text in set(texts) if text.startswith(PHASE)]
    kind = np.where(np.isin(names, phases), KIND["phase"], KIND["annotation"])
    placed, duration = lengths(builder, rows, "NVTX range")
    lane = np.where(rows["eventType"] == START_END, lanes.ranges(rows["globalTid"]), lanes.threads(rows["globalTid"]))
    builder.extend(
        start=rows["start"][placed],
        duration=duration[placed],
        name=names[placed],
        kind=np.where(mark, KIND["instant"], kind)[placed],
        lane=lane[placed],
        arg=shared_args(builder, {name: rows[name] for name in ("domainId", "category", "unfinished")}, args)[placed],
    )


def _named(rows: Columns, texts: list[str], kind: int, keys: tuple[str, ...]) -> dict[tuple[int, ...], str]:
    """Names of domains or categories, by their numbers."""
    return {
        tuple(int(rows[key][place]) for key in keys): texts[place]
        for place in np.flatnonzero(rows["eventType"] == kind)
    }


def _note_others(builder: TraceBuilder, kinds: Array) -> None:
    other = kinds[~np.isin(kinds, SILENT)]
    for kind, count in zip(*np.unique(other, return_counts=True), strict=True):
        builder.problem(f"an NVTX row of type {kind} is left out", count=int(count))
