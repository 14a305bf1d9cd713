"""One step as it stands on the device, read at each pause: what a view needs in place of a replay.

Reading synchronises. A cell counts as written in the phase behind which it is first seen changed; a value that was
overwritten by itself shows only where the host staged or published it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import PHASES
from mrv2lab.recorder.listen import RawStep, described
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recorder.steps import StampedTimes, fill_times, step_record, texts_of, token_ids_in
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.replay import Replay
from mrv2lab.recording.replay_program import State
from mrv2lab.recording.replay_trace import BatchTrace, StepTrace
from mrv2lab.recording.schema import Array, StepRecord, TopK
from mrv2lab.recording.view import StepView, step_view
from mrv2lab.recording.watch import COLUMN_TABLES, PUBLISHED, Write, is_row_table, runs

SYNCHRONISED = "the engine stood still behind every phase and was read, which synchronises: these are not a run's times"
TAIL = 80
"""Tokens at the end of a row whose texts are looked up."""


def read_tables(engine: Engine) -> dict[str, Array]:
    """Copies of every integer table after all queued work: this synchronises."""
    rt = engine.rt
    rt.synchronize()
    return {name: np.array(rt.raw(table).cpu().numpy()) for name, table in engine.worker.runner.tables().items()}


class Readback:
    """The step ``raw`` of a recorded engine that stands behind its ``schedule``; :meth:`take` behind each later phase.

    ``top_k``: how many logits a row are kept once there are any.
    """

    def __init__(self, recorder: Recorder, raw: RawStep, top_k: int) -> None:
        self.engine = engine = recorder.engine
        self.core = engine.core
        self.raw = raw
        self.phase = "schedule"
        """The phase behind which the device was read last."""
        self.tables = read_tables(engine)
        owners = dict(engine.worker.runner.req_states.req_id_to_index)
        # complete: nothing in here is an estimate
        self.trace = StepTrace(raw.number, True, owners, owners, {"before": _small(self.tables)})
        self._header = dataclasses.replace(recorder.recording.header, mode="step")
        self._stamps = recorder.stamps
        self._top_k = top_k
        self._logits: TopK | None = None
        self._record = self._recorded("schedule")

    def take(self, phase: str) -> None:
        """Read the device behind ``phase``."""
        runner = self.engine.worker.runner
        before, self.tables = self.tables, read_tables(self.engine)
        self.phase = phase
        self.trace.owners_after = dict(runner.req_states.req_id_to_index)
        if phase == "logits" and runner.logits is not None and self._top_k:
            top = torch.topk(self.engine.rt.read(runner.logits).float(), self._top_k, dim=1)
            self._logits = TopK(top.indices.numpy().astype(np.int32), top.values.numpy())
        self._record = record = self._recorded(phase)
        writes = self._writes(phase, record, before)
        if writes:
            self.trace.writes += writes
            self.trace.values[phase] = _small(self.tables)
        if phase == "gather":
            state = State(self.tables, self.engine.worker.runner.block_tables.block_sizes)
            self.trace.batch = BatchTrace.of(state, record)

    def _recorded(self, phase: str) -> StepRecord:
        rt, runner = self.engine.rt, self.engine.worker.runner
        record = step_record(self.raw, self._header.epoch_host_ns)
        record.top_k = self._logits
        ends, starts = self._stamps.ends_ns(), self._stamps.starts_ns()
        fill_times(record, *StampedTimes(self.raw, self._header.epoch_host_ns).resolve(ends, starts, {}))
        if record.rows.size and record.sampled is None and PHASES.index(phase) >= PHASES.index("sample"):
            count = len(record.rows)
            sampled, lengths = (rt.read(part[:count]) for part in runner.outputs.latest())
            record.sampled = [row[:n] for row, n in zip(sampled.tolist(), lengths.tolist(), strict=True)]
        return record

    def _writes(self, phase: str, record: StepRecord, before: dict[str, Array]) -> list[Write]:
        found: list[Write] = []
        for name, after in self.tables.items():
            if not is_row_table(name):
                continue
            cells = np.flatnonzero(_bits(before[name]) != _bits(after))
            if phase == "apply_writes":
                cells = np.union1d(cells, _told_cells(name, after, record))
            if len(cells):
                by = "publish" if name in PUBLISHED else self._writer(phase, name)
                held = before[name].reshape(-1)[cells]
                found += runs(name, after, cells, held, phase, "cpu" if phase == "apply_writes" else "gpu", by)
        return found

    def _writer(self, phase: str, table: str) -> str:
        """The launch of ``phase`` that said it writes ``table``."""
        names = [
            mark.name
            for mark, _, where, _, added in described(self.raw)
            if where == phase and not added and table in mark.writes
        ]
        return names[-1] if names else phase

    # -- as a view -----------------------------------------------------------------------------------------------------

    def view(self, index: int, count: int, title: str, known: dict[int, str], paused_after: str | None) -> StepView:
        """The step as it stood behind :attr:`phase`. ``known``: texts of token ids; others are looked up."""
        tokenizer = self.engine.tokenizer
        texts = dict(known)
        texts_of(self._token_ids(self._record), texts, tokenizer.decode if tokenizer is not None else None)
        stand_in = cast(Replay, _StandIn(Recording(self._header, [self._record], texts), self.tables, self.trace))
        view = step_view(stand_in, 0, title=title, live=True, paused_after=paused_after, count=count)
        view.meta["index"] = index
        # What a recorder could have kept may still come.
        view.meta["notes"] = [note for note in view.meta["notes"] if "Recorder(" not in note] + [SYNCHRONISED]
        return view

    def _token_ids(self, record: StepRecord) -> list[int]:
        ids = {int(token) for token in token_ids_in(record)}
        if self.trace.batch is not None:
            ids.update(self.trace.batch.input_ids.tolist())
        for row in self.trace.owners_after.values():
            length = int(self.tables["total_len"][row])
            ids.update(self.tables["all_token_ids"][row, max(length - TAIL, 0) : length].tolist())
        for name in ("last_sampled_tokens", "next_prefill_tokens", "draft_tokens"):
            ids.update(np.unique(self.tables[name]).tolist())
        vocab = self.engine.config.model.vocab_size
        return [token for token in ids if 0 <= token < vocab]


class _StandIn:
    """The part of a Replay that ``step_view`` asks for."""

    def __init__(self, recording: Recording, tables: dict[str, Array], trace: StepTrace) -> None:
        self.recording = recording
        self.tables = tables
        self._trace = trace

    def trace(self, index: int) -> StepTrace:
        return self._trace

    def checked(self, index: int) -> bool | None:
        return None

    def divergence(self, index: int) -> str | None:
        return None


def _small(tables: dict[str, Array]) -> dict[str, Array]:
    """The row tables without the two wide ones, as ``StepTrace.values`` wants them."""
    wide = ("all_token_ids", "block_table.")
    return {name: table for name, table in tables.items() if is_row_table(name) and not name.startswith(wide)}


def _bits(table: Array) -> Array:
    """Flat, so that equal bits are equal: NaN too."""
    flat = table.reshape(-1)
    return flat.view(f"i{flat.itemsize}") if flat.dtype.kind == "f" else flat


def _told_cells(name: str, table: Array, record: StepRecord) -> Any:
    """Flat indices of ``table`` that the host staged or, for new owners of a row, published."""
    width = table.shape[-1] if table.ndim > 1 else 1
    if name in PUBLISHED:
        rows = np.array([request.row for request in record.new], np.int64)
        return (np.arange(len(table))[:, None] * width + rows).ravel() if name in COLUMN_TABLES else rows
    parts = [d.row * width + d.start + np.arange(len(d.values)) for d in record.diffs if d.table == name]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
