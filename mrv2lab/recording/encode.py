"""Steps to columns: a chunk of StepRecords becomes one small JSON part and flat integer columns.

Each list of a step (its batch, its diffs, its marks, ...) is laid end to end over the steps of the chunk, one column a
field; ``counts`` says how many entries each step has (-1: None). Strings and the parts of a mark that repeat are stored
once in the file and referred to by number. Times are kept as differences to their predecessor, which fit into one to
four bytes; the chunk's first value is in ``bases``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np

from mrv2lab.recording.conform import finite
from mrv2lab.recording.layout import Layout, Table
from mrv2lab.recording.npy import narrow
from mrv2lab.recording.schema import Array, NewRequest, RecordingError, StepRecord

GROUPS = ("batch", "diffs", "publishes", "keyframe", "sampled", "top_k", "spans", "marks")
"""What a step has any number of."""
SMALL = (
    "step removed finished preempted unscheduled decisions new_blocks has_prefill finish_reasons paused checksums "
    "owners"
).split()
"""Fields of a StepRecord that stay JSON as they are."""
MARK_DESCRIPTOR = "kind name stream reads writes site phase added".split()
SPAN_DESCRIPTOR = "name depth added".split()

_mark_descriptor = attrgetter(*MARK_DESCRIPTOR)
_span_descriptor = attrgetter(*SPAN_DESCRIPTOR)
_T = TypeVar("_T", bound=Hashable)


class Interner(Generic[_T]):
    """Numbers for values that repeat; ``fresh`` are those seen since it was last taken."""

    def __init__(self) -> None:
        self._ids: dict[_T, int] = {}
        self._fresh: list[_T] = []

    def ids(self, values: Iterable[_T]) -> list[int]:
        """The number of each value, new ones included."""
        known = self._ids
        found = []
        for value in values:
            index = known.get(value)
            if index is None:
                index = known[value] = len(known)
                self._fresh.append(value)
            found.append(index)
        return found

    def take_fresh(self) -> list[_T]:
        """What was added since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh


@dataclass
class Chunk:
    """A chunk as it goes into the file: ``steps.json`` and its columns by name, integers already narrow."""

    small: dict[str, Any]
    columns: dict[str, Array] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, values: Sequence[int] | Array) -> None:
        """A column of integers; an empty one is left out."""
        if len(values):
            self.columns[name] = narrow(np.asarray(values, np.int64))

    def put_deltas(self, name: str, values: Sequence[int] | Array) -> None:
        """A column of differences; wraps at 64 bits, as does the reader's sum."""
        if len(values):
            column = np.asarray(values, np.int64)
            self.bases[name] = int(column[0])
            self.columns[name] = narrow(np.diff(column, prepend=column[:1]))


class ChunkEncoder:
    """Turns steps into chunks; remembers over the whole file which strings and descriptors were stored already."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._requests: Interner[str] = Interner()
        self._marks: Interner[tuple[Any, ...]] = Interner()
        self._spans: Interner[tuple[Any, ...]] = Interner()

    def encode(self, steps: Sequence[StepRecord], texts: Sequence[tuple[int, str]]) -> Chunk:
        """One chunk of ``steps``, with the new token ``texts``. Raises ``RecordingError`` for a step that no reader
        would take: a row outside R, an unknown table, lists of one batch that differ in length."""
        for step in steps:
            _check_lengths(step)
        chunk = Chunk({})
        counts = {group: [_count(step, group) for step in steps] for group in GROUPS}
        self._batch(chunk, steps)
        self._diffs(chunk, steps)
        self._patches(chunk, "publishes", [(p.table, p.index, p.values) for step in steps for p in step.publishes])
        self._patches(chunk, "keyframe", [part for step in steps for part in self._keyframe(step)])
        self._sampled(chunk, steps)
        self._top_k(chunk, steps)
        self._timed(chunk, steps)
        chunk.small = {
            "requests": self._requests.take_fresh(),
            "spans": self._spans.take_fresh(),
            "marks": self._marks.take_fresh(),
            "texts": texts,
            "counts": counts,
            "bases": chunk.bases,
            "steps": [self._small(step) for step in steps],
        }
        return chunk

    def _small(self, step: StepRecord) -> dict[str, Any]:
        for name in step.checksums:
            self._layout.table_id(name)
        small = {name: getattr(step, name) for name in SMALL}
        small["new"] = [_new(request) for request in step.new]
        small["gauges"] = {name: finite(value) for name, value in step.gauges.items()}
        return small

    def _batch(self, chunk: Chunk, steps: Sequence[StepRecord]) -> None:
        rows = _joined([step.rows for step in steps])
        num_scheduled = _joined([step.num_scheduled for step in steps])
        self._layout.check_batch(rows, num_scheduled)
        chunk.put("batch.request", self._requests.ids(req_id for step in steps for req_id in step.req_ids))
        chunk.put("batch.row", rows)
        chunk.put("batch.num_scheduled", num_scheduled)

    def _diffs(self, chunk: Chunk, steps: Sequence[StepRecord]) -> None:
        diffs = [diff for step in steps for diff in step.diffs]
        if not diffs:
            return
        tables = [self._layout.table_id(diff.table) for diff in diffs]
        facts = [(diff.row, diff.start, len(diff.values)) for diff in diffs]
        row, start, length = np.array(facts, np.int64).T
        self._layout.check_diffs(np.array(tables), row, start, length)
        chunk.put("diffs.table", tables)
        chunk.put("diffs.row", row)
        chunk.put("diffs.start", start)
        chunk.put("diffs.length", length)
        bits = [self._layout.tables[i].to_bits(diff.values) for i, diff in zip(tables, diffs, strict=True)]
        chunk.put("diffs.values", np.concatenate(bits))

    def _keyframe(self, step: StepRecord) -> list[tuple[str, Array, Array]]:
        """The whole tables as their elements that are not zero: most of a table is rows that nobody has."""
        parts = []
        for name, values in (step.keyframe or {}).items():
            table = self._table(name)
            if values.shape != table.shape:
                raise RecordingError(f"keyframe of {name!r} has shape {values.shape}, the header says {table.shape}")
            flat = np.ascontiguousarray(values).reshape(-1)
            # By their bits, so that a float's minus zero is kept.
            index = np.flatnonzero(flat.view(f"u{flat.itemsize}"))
            parts.append((name, index, flat[index]))
        return parts

    def _patches(self, chunk: Chunk, group: str, patches: list[tuple[str, Array, Array]]) -> None:
        """``table.flat[index] = values`` for each patch: a publish, or a keyframe's table that starts out as zeros."""
        if not patches:
            return
        tables = [self._layout.table_id(name) for name, _, _ in patches]
        length = np.array([len(index) for _, index, _ in patches], np.int64)
        index = np.concatenate([index for _, index, _ in patches])
        self._layout.check_flat(np.array(tables), length, index)
        chunk.put(f"{group}.table", tables)
        chunk.put(f"{group}.length", length)
        chunk.put_deltas(f"{group}.index", index)
        bits = [self._layout.tables[i].to_bits(values) for i, (_, _, values) in zip(tables, patches, strict=True)]
        chunk.put(f"{group}.values", np.concatenate(bits))

    def _sampled(self, chunk: Chunk, steps: Sequence[StepRecord]) -> None:
        rows = [tokens for step in steps for tokens in step.sampled or ()]
        chunk.put("sampled.length", [len(tokens) for tokens in rows])
        chunk.put("sampled.token", [token for tokens in rows for token in tokens])

    def _top_k(self, chunk: Chunk, steps: Sequence[StepRecord]) -> None:
        tops = [step.top_k for step in steps if step.top_k is not None]
        if not tops:
            return
        chunk.put("top_k.width", [top.token_ids.shape[1] for top in tops])
        chunk.put("top_k.token", np.concatenate([top.token_ids.reshape(-1) for top in tops]))
        logits = np.concatenate([top.logits.reshape(-1) for top in tops])
        if logits.size:
            chunk.columns["top_k.logit"] = logits

    def _timed(self, chunk: Chunk, steps: Sequence[StepRecord]) -> None:
        spans = [span for step in steps for span in step.spans]
        chunk.put("spans.descriptor", self._spans.ids(map(_span_descriptor, spans)))
        start = np.array([span.start_ns for span in spans], np.int64)
        chunk.put_deltas("spans.start_ns", start)
        chunk.put("spans.duration_ns", np.array([span.end_ns for span in spans], np.int64) - start)
        marks = [mark for step in steps for mark in step.marks]
        chunk.put("marks.descriptor", self._marks.ids(map(_mark_descriptor, marks)))
        chunk.put("marks.nbytes", [mark.nbytes for mark in marks])
        chunk.put("marks.wait_ns", [mark.wait_ns for mark in marks])
        chunk.put_deltas("marks.time_ns", [mark.time_ns for mark in marks])

    def _table(self, name: str) -> Table:
        return self._layout.tables[self._layout.table_id(name)]


def _count(step: StepRecord, group: str) -> int:
    """Entries of ``group`` in ``step``; -1 where the field is None."""
    if group == "batch":
        return len(step.req_ids)
    if group == "top_k":
        return -1 if step.top_k is None else len(step.top_k.token_ids)
    value = getattr(step, group)
    return -1 if value is None else len(value)


def _joined(arrays: Sequence[Array]) -> Array:
    """Laid end to end; of none, an empty column."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _new(request: NewRequest) -> dict[str, Any]:
    small = {name: getattr(request, name) for name in NewRequest.__slots__}
    small["temperature"] = finite(request.temperature)
    return small


def _check_lengths(step: StepRecord) -> None:
    r = len(step.req_ids)
    found = {"rows": len(step.rows), "num_scheduled": len(step.num_scheduled)}
    if step.sampled is not None:
        found["sampled"] = len(step.sampled)
    for name, length in found.items():
        if length != r:
            raise RecordingError(f"step {step.step} has {r} requests in its batch, but {length} entries in {name}")
    if any(len(patch.index) != len(patch.values) for patch in step.publishes):
        raise RecordingError(f"step {step.step} publishes a different number of indices and values")
    if step.top_k is not None and step.top_k.token_ids.shape != step.top_k.logits.shape:
        raise RecordingError(f"step {step.step} has top-k token ids and logits of different shapes")
