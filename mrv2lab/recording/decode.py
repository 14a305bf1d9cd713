"""Columns to steps: the inverse of ``encode``, which believes nothing that a file says.

Every number is compared with what it refers to before it is used, and every list is paid for from the budget before it
is built, since a few compressed bytes can stand for millions of objects.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from mrv2lab.recording.conform import NUMBER, Int, Map, Maybe, conform
from mrv2lab.recording.encode import GROUPS, MARK_DESCRIPTOR
from mrv2lab.recording.layout import Budget, Layout
from mrv2lab.recording.npy import from_npy
from mrv2lab.recording.schema import (
    Array,
    Diff,
    MarkRecord,
    NewRequest,
    Publish,
    RecordingError,
    SpanRecord,
    StepRecord,
    TopK,
)

_INT32 = Int(0, 2**31 - 1)
_NULLABLE = {"keyframe", "sampled", "top_k"}
_MARK = (str, str, str, [str], [str], Maybe(str), str, bool)
_SPAN = (str, _INT32, bool)
_RECORD_BYTES = 256
"""About what one small Python record with its integers takes."""
_INT_BYTES = 40
"""An integer in a list."""


def _step_shape(num_rows: int) -> dict[str, Any]:
    row = Int(0, num_rows - 1)
    new = {
        "req_id": str,
        "row": row,
        "prompt_len": _INT32,
        "prefill_len": _INT32,
        "num_computed_tokens": _INT32,
        "block_ids": [[_INT32]],
        "temperature": NUMBER,
        "seed": Int(),
        "seed_given": bool,
        "max_tokens": _INT32,
        "resumed": bool,
    }
    return {
        "step": Int(),
        "new": [new],
        "removed": [(str, row)],
        "finished": [str],
        "preempted": [str],
        "unscheduled": [str],
        "decisions": [(str, str, Int(), Int())],
        "gauges": Map(NUMBER),
        "new_blocks": Map([[_INT32]]),
        "has_prefill": bool,
        "finish_reasons": Map(str),
        "paused": bool,
        "checksums": Map(Int(-(2**63), 2**64 - 1)),
        "owners": Map(row),
    }


class _Columns:
    """The columns of one chunk, each taken once and checked."""

    def __init__(self, columns: dict[str, bytes], bases: dict[str, int], budget: Budget) -> None:
        self._columns, self._bases, self._budget = columns, bases, budget

    def ints(self, name: str, count: int, end: int | None = None) -> Array:
        """int64 [count], within 0..end-1 if ``end`` is given. An empty column is not stored."""
        values = self._take(name, count, "iu").astype(np.int64)
        if end is not None and ((values < 0) | (values >= end)).any():
            raise RecordingError(f"{name} holds a value outside 0..{end - 1}")
        return values

    def deltas(self, name: str, count: int) -> Array:
        """int64 [count] from a column of differences."""
        values = self._take(name, count, "iu").astype(np.int64)
        return np.cumsum(values) + np.int64(self._bases.get(name, 0))

    def floats(self, name: str, count: int) -> Array:
        """float32 [count]."""
        return self._take(name, count, "f").astype(np.float32)

    def _take(self, name: str, count: int, kinds: str) -> Array:
        data = self._columns.pop(name, None)
        values = np.empty(0, np.float32 if kinds == "f" else np.int64) if data is None else from_npy(data, name)
        if len(values) != count:
            raise RecordingError(f"{name} holds {len(values)} values, expected {count}")
        if values.dtype.kind not in kinds:
            raise RecordingError(f"{name} holds {values.dtype} values")
        self._budget.take(8 * count, name)
        return values


class ChunkDecoder:
    """Turns chunks into steps, in the file's order: later chunks refer to the strings of earlier ones."""

    def __init__(self, layout: Layout, budget: Budget) -> None:
        self._layout, self._budget = layout, budget
        self._steps = [_step_shape(layout.num_rows)]
        self._requests: list[str] = []
        self._spans: list[tuple[str, int, bool]] = []
        self._marks: list[dict[str, Any]] = []

    def decode(self, small: Any, raw: dict[str, bytes]) -> tuple[list[StepRecord], dict[int, str]]:
        """The steps of one chunk from its ``steps.json`` and columns, and its new token texts."""
        shape = {
            "requests": [str],
            "spans": [_SPAN],
            "marks": [_MARK],
            "texts": [(Int(), str)],
            "counts": {group: [Int(-1 if group in _NULLABLE else 0, 2**31 - 1)] for group in GROUPS},
            "bases": Map(Int()),
            "steps": self._steps,
        }
        found = conform(small, shape, "steps.json")
        counts, total = found["counts"], {}
        for group in GROUPS:
            if len(counts[group]) != len(found["steps"]):
                raise RecordingError(f"counts.{group} has {len(counts[group])} entries for {len(found['steps'])} steps")
            total[group] = sum(max(count, 0) for count in counts[group])
        self._budget.take(_RECORD_BYTES * (sum(total.values()) + 4 * len(found["steps"])), "its steps")
        self._requests += found["requests"]
        self._spans += found["spans"]
        for mark in found["marks"]:
            names = dict(zip(MARK_DESCRIPTOR, mark, strict=True))
            self._marks.append(names | {"reads": tuple(names["reads"]), "writes": tuple(names["writes"])})

        steps = [
            StepRecord(**fields | {"new": [NewRequest(**new) for new in fields["new"]]}) for fields in found["steps"]
        ]
        for step in steps:
            for name in step.checksums:
                self._layout.table_id(name)
        columns = _Columns(raw, found["bases"], self._budget)
        self._batch(steps, counts["batch"], columns)
        self._sampled(steps, counts["sampled"], columns)
        self._top_k(steps, counts["top_k"], columns)
        diffs = self._diffs(total["diffs"], columns)
        publishes = [Publish(*patch) for patch in self._patches("publishes", total["publishes"], columns)]
        spans, marks = self._span_records(total["spans"], columns), self._mark_records(total["marks"], columns)
        _deal(steps, "diffs", diffs, counts["diffs"])
        _deal(steps, "publishes", publishes, counts["publishes"])
        _deal(steps, "spans", spans, counts["spans"])
        _deal(steps, "marks", marks, counts["marks"])
        self._keyframes(steps, counts["keyframe"], total["keyframe"], columns)
        if raw:
            raise RecordingError(f"unknown column {min(raw)!r}")
        return steps, dict(found["texts"])

    def _batch(self, steps: list[StepRecord], counts: list[int], columns: _Columns) -> None:
        n = sum(counts)
        request = columns.ints("batch.request", n, len(self._requests)).tolist()
        rows, num_scheduled = columns.ints("batch.row", n), columns.ints("batch.num_scheduled", n, 2**31)
        self._layout.check_batch(rows, num_scheduled)
        end = 0
        for step, count in zip(steps, counts, strict=True):
            start, end = end, end + count
            step.req_ids = [self._requests[i] for i in request[start:end]]
            step.rows = rows[start:end].astype(np.int32)
            step.num_scheduled = num_scheduled[start:end].astype(np.int32)

    def _sampled(self, steps: list[StepRecord], counts: list[int], columns: _Columns) -> None:
        for step, count in zip(steps, counts, strict=True):
            if count not in (-1, len(step.rows)):
                raise RecordingError(f"step {step.step} samples {count} rows of a batch of {len(step.rows)}")
        lengths = columns.ints("sampled.length", sum(max(count, 0) for count in counts), 2**31)
        self._budget.take(_INT_BYTES * int(lengths.sum()), "sampled.token")
        tokens = iter(columns.ints("sampled.token", int(lengths.sum())).tolist())
        rows = (list(islice(tokens, length)) for length in lengths.tolist())
        for step, count in zip(steps, counts, strict=True):
            step.sampled = None if count < 0 else list(islice(rows, count))

    def _top_k(self, steps: list[StepRecord], counts: list[int], columns: _Columns) -> None:
        kept = [(step, count) for step, count in zip(steps, counts, strict=True) if count >= 0]
        widths = columns.ints("top_k.width", len(kept), 2**31).tolist()
        n = sum(count * width for (_, count), width in zip(kept, widths, strict=True))
        tokens, logits = columns.ints("top_k.token", n, 2**31), columns.floats("top_k.logit", n)
        end = 0
        for (step, count), width in zip(kept, widths, strict=True):
            start, end = end, end + count * width
            shape = (count, width)
            step.top_k = TopK(tokens[start:end].astype(np.int32).reshape(shape), logits[start:end].reshape(shape))

    def _diffs(self, n: int, columns: _Columns) -> list[Diff]:
        tables = columns.ints("diffs.table", n, len(self._layout.tables))
        row, start = columns.ints("diffs.row", n), columns.ints("diffs.start", n)
        length = columns.ints("diffs.length", n, 2**31)
        self._layout.check_diffs(tables, row, start, length)
        values = columns.ints("diffs.values", int(length.sum()))
        ends = np.cumsum(length)
        bounds = (ends - length).tolist(), ends.tolist()
        named = [self._layout.tables[i] for i in tables.tolist()]
        return [
            Diff(table.name, at, first, table.from_bits(values[a:b]))
            for table, at, first, a, b in zip(named, row.tolist(), start.tolist(), *bounds, strict=True)
        ]

    def _patches(self, group: str, n: int, columns: _Columns) -> list[tuple[str, Array, Array]]:
        """(table, index, values) of each publish, or of each table of a keyframe."""
        tables = columns.ints(f"{group}.table", n, len(self._layout.tables))
        length = columns.ints(f"{group}.length", n, 2**31)
        size = int(length.sum())
        index, values = columns.deltas(f"{group}.index", size), columns.ints(f"{group}.values", size)
        self._layout.check_flat(tables, length, index)
        ends = np.cumsum(length)
        named = [self._layout.tables[i] for i in tables.tolist()]
        return [
            (table.name, index[a:b].copy(), table.from_bits(values[a:b]))
            for table, a, b in zip(named, (ends - length).tolist(), ends.tolist(), strict=True)
        ]

    def _keyframes(self, steps: list[StepRecord], counts: list[int], n: int, columns: _Columns) -> None:
        patches = iter(self._patches("keyframe", n, columns))
        for step, count in zip(steps, counts, strict=True):
            tables: dict[str, Array] = {}
            for name, index, values in islice(patches, max(count, 0)):
                table = self._layout.tables[self._layout.ids[name]]
                self._budget.take(table.size * table.dtype.itemsize, f"a keyframe of table {name!r}")
                whole = np.zeros(table.size, table.dtype)
                whole[index] = values
                tables[name] = whole.reshape(table.shape)
            step.keyframe = None if count < 0 else tables

    def _span_records(self, n: int, columns: _Columns) -> list[SpanRecord]:
        which = columns.ints("spans.descriptor", n, len(self._spans)).tolist()
        start = columns.deltas("spans.start_ns", n)
        end = (start + columns.ints("spans.duration_ns", n)).tolist()
        known = [self._spans[i] for i in which]
        return [
            SpanRecord(name, first, last, depth, added=added)
            for (name, depth, added), first, last in zip(known, start.tolist(), end, strict=True)
        ]

    def _mark_records(self, n: int, columns: _Columns) -> list[MarkRecord]:
        which = columns.ints("marks.descriptor", n, len(self._marks)).tolist()
        numbers = [columns.ints(f"marks.{name}", n).tolist() for name in ("nbytes", "wait_ns")]
        numbers.append(columns.deltas("marks.time_ns", n).tolist())
        return [
            MarkRecord(**self._marks[i], nbytes=nbytes, wait_ns=wait, time_ns=time)
            for i, nbytes, wait, time in zip(which, *numbers, strict=True)
        ]


def _deal(steps: list[StepRecord], name: str, items: list[Any], counts: list[int]) -> None:
    """Give each step its ``counts`` next ``items`` as the attribute ``name``."""
    end = 0
    for step, count in zip(steps, counts, strict=True):
        start, end = end, end + count
        setattr(step, name, items[start:end])
