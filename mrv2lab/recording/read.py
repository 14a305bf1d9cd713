"""A recording file back into values, also one that is cut off, still being written, damaged, or made to do harm.

What a reader can be sure of, it keeps: every whole chunk in front of the first damage. What no writer of ours makes is
refused with ``RecordingError`` and one sentence; no other error comes out of any sequence of bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mrv2lab.recording.conform import NUMBER, Int, Map, conform
from mrv2lab.recording.decode import ChunkDecoder
from mrv2lab.recording.layout import MAX_BYTES, Budget, Layout, header_from_json
from mrv2lab.recording.members import CHUNK, COLUMN_SUFFIX, DEVICE, END, HEADER, STEPS, read_members
from mrv2lab.recording.npy import from_npy
from mrv2lab.recording.schema import Array, Header, MarkRecord, RecordingError, SpanRecord, StepRecord

_JSON_FACTOR = 32
"""Bytes of Python objects that a byte of JSON becomes at worst (``[],[],[],``)."""
_END = {
    "clock": (NUMBER, NUMBER, str),
    "problems": [str],
    "chunks": Int(0),
    "counts": {"spans": Int(0), "marks": Int(0)},
    "bases": Map(Int()),
}


@dataclass
class Contents:
    """What a file holds. See ``recording.Recording`` for the fields."""

    header: Header
    steps: list[StepRecord] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    clock: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read(path: str | Path, max_bytes: int = MAX_BYTES) -> Contents:
    """The recording at ``path``. Takes at most about ``max_bytes`` of memory.

    Raises ``RecordingError``, beginning with the file's name, for what is no recording or must not be read, and
    ``OSError`` (``FileNotFoundError``, ``IsADirectoryError``, ``PermissionError``) for what cannot be opened.
    """
    path = Path(path)
    budget = Budget(max_bytes)
    try:
        with path.open("rb") as file:
            found = read_members(file, budget)
        return _interpret(found.contents, found.damage, budget)
    except RecordingError as error:
        raise RecordingError(f"{path.name}: {error}") from None


def _interpret(members: dict[str, bytes], damage: str | None, budget: Budget) -> Contents:
    if HEADER not in members:
        raise RecordingError(f"{damage}, before its header" if damage else "is a zip file without a header.json")
    contents = Contents(header_from_json(_json(members.pop(HEADER), HEADER, budget)))
    decoder = ChunkDecoder(Layout(contents.header, budget.max_bytes), budget)
    ending = members.pop(END, None)
    chunks = 0
    for number in count():
        folder = CHUNK.format(number)
        small = members.pop(folder + STEPS, None)
        if small is None:
            break
        columns = _take_columns(members, folder)
        try:
            steps, texts = decoder.decode(_json(small, STEPS, budget), columns)
        except RecordingError as error:
            raise RecordingError(f"{folder}: {error}") from None
        contents.steps += steps
        contents.texts |= texts
        chunks = number + 1
    if ending is None:
        _say_cut(contents, damage or "the file's directory is there, but not its end.json")
        return contents
    device = _take_columns(members, DEVICE)
    if members:
        raise RecordingError(f"holds {min(members)!r}, which belongs to no whole chunk")
    end = conform(_json(ending, END, budget), _END, END)
    _apply_end(contents, end, chunks, device, budget)
    return contents


def _say_cut(contents: Contents, damage: str) -> None:
    if contents.steps:
        where = f"cut off after step {contents.steps[-1].step}"
    else:
        where = "cut off before its first steps"
    contents.problems.append(
        f"{where}: {damage}; later steps and all device times are missing (it may still be in writing)"
    )


def _apply_end(contents: Contents, end: dict[str, Any], chunks: int, device: dict[str, bytes], budget: Budget) -> None:
    spans = [span for step in contents.steps for span in step.spans]
    marks = [mark for step in contents.steps for mark in step.marks]
    found = {"chunks": chunks, "spans": len(spans), "marks": len(marks)}
    said = {"chunks": end["chunks"], **end["counts"]}
    if found != said:
        raise RecordingError(f"end.json speaks of {said}, but the file holds {found}")
    uncertainty, drift, method = end["clock"]
    if method:
        contents.clock = {"uncertainty_ns": uncertainty, "drift_ppm": drift, "method": method}
    contents.problems += end["problems"]
    targets: tuple[tuple[str, str, list[SpanRecord] | list[MarkRecord]], ...] = (
        ("span_end", "device_end_ns", spans),
        ("mark_start", "device_start_ns", marks),
        ("mark_end", "device_end_ns", marks),
    )
    for column, attribute, records in targets:
        index, times = (_deltas(device, f"{column}.{part}", end["bases"], budget) for part in ("index", "ns"))
        if len(index) != len(times) or ((index < 0) | (index >= len(records))).any():
            raise RecordingError(f"device/{column} does not fit the {len(records)} records that it belongs to")
        for i, time in zip(index.tolist(), times.tolist(), strict=True):
            setattr(records[i], attribute, time)
    if device:
        raise RecordingError(f"unknown column {DEVICE}{min(device)}")


def _deltas(columns: dict[str, bytes], name: str, bases: dict[str, int], budget: Budget) -> Array:
    data = columns.pop(name, None)
    if data is None:
        return np.empty(0, np.int64)
    values = from_npy(data, DEVICE + name)
    if values.dtype.kind not in "iu":
        raise RecordingError(f"{DEVICE}{name} holds {values.dtype} values")
    budget.take(_JSON_FACTOR * len(values), DEVICE + name)
    return np.cumsum(values.astype(np.int64)) + np.int64(bases.get(name, 0))


def _take_columns(members: dict[str, bytes], folder: str) -> dict[str, bytes]:
    """The columns of ``folder`` by bare name, taken out of ``members``."""
    names = [name for name in members if name.startswith(folder)]
    return {name[len(folder) :].removesuffix(COLUMN_SUFFIX): members.pop(name) for name in names}


def _json(data: bytes, name: str, budget: Budget) -> Any:
    budget.take(_JSON_FACTOR * len(data), name)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RecordingError(f"{name} is no JSON: {re.sub(r'[^ -~]+', ' ', str(error))}") from None
