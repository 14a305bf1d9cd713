"""One step as the step explorer shows it: a value with a small JSON part and typed columns.

The contract between Python and the explorer's ES module (``widgets/``). ``meta`` is JSON-ready; ``columns`` are
NumPy arrays that travel as bytes; names with a dot group them. Everything a panel needs for one step is in here, so a
panel is a pure function of the view and of the phase cursor.

``meta``::

    index, count        position among the recording's steps, and their number (live: may grow)
    step                the scheduler's number
    title               of the source: file name, or "live engine"
    mode                "record" or "step" (paused: read from the device, synchronised); a badge says it
    live                whether the source can advance
    paused_after        step mode only: the phase behind which the engine stands, else null
    runner, device, backend, transfer, modelled
    block_size, num_blocks, max_num_reqs
    requests            [str] every request named below; other places use its index
    texts               {token id: text} of every token id named below (text null: no tokenizer)
    notes               [str] what this source cannot say, and how to get it
    diverged            null, or one sentence: the device's checksum differs from the rebuilt state
    words               [str] the scheduler's decisions in words
    phases              [str] cursor stops, in order: "before", then the phases at which something below changes
    row_columns         [{name, title, place, dtype, kind}] columns of the rows panel; place: host|uva|device;
                        kind: int | token | float | text | request. Texts: all_token_ids is in tails, seed in seeds
    changes             [{phase, column, row, before, after, writer, by}] in order; writer: "cpu" (staged or published)
                        or "gpu"; by: op or chokepoint that wrote, e.g. "fused_apply_write", "publish", "post_update".
                        before, after: a number; a request index or -1 (column request); a string for all_token_ids
                        (end of the text), seed and block_table.0 (ids; no column of the panel). A write of the value
                        that was there is a change too
    tails               {"row": text} the last ~40 characters of each live row's text, after the step
    seeds               {row: "seed as decimal string"}
    diffs               [{table, row, request, start, length, values (first 64), by}] staged, before they are applied
    new, removed, resumed, finished, preempted, unscheduled     request indices
    batch               [{request, row, kind}] batch order; kind: prefill | chunk | decode
                        (chunk = a prefill that does not reach its end)
    tables              [[block ids]] block table of each batch position, as gathered
    gauges              {name: number}
    sampled             null, or [[token ids]] by batch position
    finish_reasons      {request index: reason}
    top_k               null, or {token_ids: [[..]], logits: [[..]]} by logits row
    spans               [{name, start, end, depth, device_end, added}] us from the step's first span; device_end null
                        if unknown
    marks               [{kind, name, stream, phase, time, device_start, device_end, nbytes, wait, reads, writes, site,
                        added}] us as above
    device_phases       [{kind "phase", name, phase, stream, device_start, device_end, added}] us as above: phases on
                        the device, where phases were stamped and single launches were not; else empty
    gap                 null, or {at, hidden}: a picture may leave ``hidden`` us out behind ``at``, between launch and
                        settling
    checked             null, or {ok: bool, tables: int}: this step carried a device checksum

``columns``::

    rows.request        [R] int32, index into requests before the step, -1 = free
    rows.<column>       [R] value BEFORE the step, one for each of row_columns of kind int, token or float
    batch.num_scheduled, batch.seq_lens, batch.num_computed     [r] int32
    batch.query_start_loc   [r + 1] int32
    tokens.input_ids [t] int32, tokens.positions [t] int32, tokens.slots [t] int32 (-1 = nowhere)
    tokens.logits_indices   [n] int32
    pages.owner         [num_blocks] int32: row that owns the block after the step, -1 free, -2 the null block
    pages.shared        [num_blocks] int32: how many rows hold it
    pages.fill          [num_blocks] int32: tokens of the block whose KV is valid after the step
    pages.written       [num_blocks] int32: tokens that this step writes into it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2lab.observer import PHASES
from mrv2lab.recording.pages import pages
from mrv2lab.recording.replay import Replay, StateUnknown
from mrv2lab.recording.replay_program import staged_together
from mrv2lab.recording.replay_trace import STAGED_ALONE, STAGED_FUSED, BatchTrace, StepTrace
from mrv2lab.recording.schema import Array, StepRecord
from mrv2lab.recording.view_rows import make_tail, number, owner_changes, row_columns, table_changes, values_before
from mrv2lab.recording.view_times import timeline
from mrv2lab.recording.words import Share, step_words

MOST_VALUES = 64
"""Values of one staged diff that travel."""


@dataclass
class StepView:
    """See the module's docstring."""

    meta: dict[str, Any]
    columns: dict[str, Array] = field(default_factory=dict)


def step_view(
    replay: Replay,
    index: int,
    *,
    texts: dict[int, str] | None = None,
    title: str | None = None,
    live: bool = False,
    paused_after: str | None = None,
    count: int | None = None,
) -> StepView:
    """The step at ``index``. What is not said comes from ``replay.recording``.

    ``count``: how many steps the source has, where that is not the number of recorded ones. A step whose state is not
    known (it was in flight when the engine was reset) has a view without batch, and a note.
    Raises ``IndexError`` outside the recording and ``RecordingError`` for a step that does not fit its tables.
    """
    recording = replay.recording
    texts = getattr(recording, "texts", {}) if texts is None else texts
    notes: list[str] = list(getattr(recording, "problems", ()))
    try:
        trace = replay.trace(index)
        if not trace.complete:
            notes.append("the tokens of this step are not known yet; its state is shown up to its gather")
    except StateUnknown as error:
        notes.append(str(error))
        trace = replay.standstill(index)
    view = _View(replay, recording.steps[index], trace, texts)
    columns = view.columns()
    meta = {
        "index": index,
        "count": len(recording.steps) if count is None else count,
        "title": getattr(recording, "title", "recording") if title is None else title,
        "live": live,
        "paused_after": paused_after,
        **view.header(),
        **view.schedule(),
        **view.rows(),
        **view.outputs(),
        "requests": view.requests,
        "notes": notes + view.notes(),
        "diverged": replay.divergence(index),
        "checked": view.checked(index),
    }
    meta["phases"] = view.stops(meta["changes"])
    meta["texts"] = {str(token): texts.get(token) for token in view.named_tokens(columns)}
    return StepView(meta, columns)


class _View:
    """One step on its way to a :class:`StepView`."""

    def __init__(self, replay: Replay, record: StepRecord, trace: StepTrace, texts: dict[int, str]) -> None:
        self._header = replay.recording.header
        self._replay = replay
        self._record = record
        self._trace = trace
        self._texts = texts
        self._tail = make_tail(texts)
        self.requests: list[str] = []
        self._index: dict[str, int] = {}
        self._row_owner = {row: req_id for req_id, row in (trace.owners_before | trace.owners_after).items()}

    def index_of(self, req_id: str) -> int:
        """Of a request among ``meta.requests``, which it joins."""
        if req_id not in self._index:
            self._index[req_id] = len(self.requests)
            self.requests.append(req_id)
        return self._index[req_id]

    def _indices(self, req_ids: list[str]) -> list[int]:
        return [self.index_of(req_id) for req_id in req_ids]

    # -- meta ----------------------------------------------------------------------------------------------------------

    def header(self) -> dict[str, Any]:
        """What holds for the whole run, and the step's number."""
        header, config = self._header, self._header.config
        return {
            "step": self._record.step,
            "mode": "step" if self._record.paused else header.mode,
            "runner": header.runner,
            "device": header.device,
            "backend": header.backend,
            "transfer": self._transfer(),
            "modelled": header.modelled,
            "block_size": config["cache"]["block_size"],
            "num_blocks": config["cache"]["num_blocks"],
            "max_num_reqs": len(self._replay.tables["total_len"]),
        }

    def _transfer(self) -> str:
        runner = self._header.config.get("runner")
        return str(runner.get("transfer", "")) if isinstance(runner, dict) else ""

    def schedule(self) -> dict[str, Any]:
        """What the scheduler decided and the host staged."""
        record, batch = self._record, self._trace.batch
        shares = self._shares()
        gathered: list[list[int]] = []
        if batch is not None:
            counts = batch.num_blocks[0].tolist()
            gathered = [row[:n].tolist() for row, n in zip(batch.block_tables[0], counts, strict=True)]
        return {
            "words": step_words(record, shares, self._trace.owners_after),
            "diffs": [self._diff(diff.table, diff.row, diff.start, diff.values) for diff in record.diffs],
            "new": self._indices([new.req_id for new in record.new if not new.resumed]),
            "resumed": self._indices([new.req_id for new in record.new if new.resumed]),
            "removed": self._indices([req_id for req_id, _ in record.removed]),
            "finished": self._indices(record.finished),
            "preempted": self._indices(record.preempted),
            "unscheduled": self._indices(record.unscheduled),
            "batch": [
                {"request": self.index_of(share.req_id), "row": int(row), "kind": share.kind}
                for share, row in zip(shares, record.rows, strict=False)
            ],
            "tables": gathered,
            "gauges": {name: number(np.float64(value)) for name, value in record.gauges.items()},
        }

    def _diff(self, table: str, row: int, start: int, values: Array) -> dict[str, Any]:
        owner = self._row_owner.get(row)
        return {
            "table": table,
            "row": row,
            "request": -1 if owner is None else self.index_of(owner),
            "start": start,
            "length": len(values),
            "values": [number(value) for value in values[:MOST_VALUES]],
            "by": STAGED_FUSED if staged_together(table) else STAGED_ALONE,
        }

    def _shares(self) -> list[Share]:
        batch = self._trace.batch
        if batch is None:
            return []
        numbers = zip(*(a.tolist() for a in _counts(batch)), strict=True)
        return [
            Share(req_id, _kind(computed, seq_len, prefill), tokens, computed, prefill)
            for req_id, (tokens, computed, seq_len, prefill) in zip(self._record.req_ids, numbers, strict=True)
        ]

    def rows(self) -> dict[str, Any]:
        """The rows' columns and what was written, in the order of the phases."""
        tables, owners = self._replay.tables, self._trace.owners_after
        total_len, seeds = tables["total_len"], tables["seeds"]
        written = table_changes(self._trace, tables, self._tail)
        return {
            "row_columns": row_columns(tables, self._transfer()),
            "changes": owner_changes(self._record, self.index_of) + written if self._trace.values else [],
            "tails": {str(row): self._tail(tables["all_token_ids"][row, : total_len[row]]) for row in owners.values()},
            "seeds": {str(row): str(int(seeds[row])) for row in owners.values()},
        }

    def outputs(self) -> dict[str, Any]:
        """What came back, and when."""
        record = self._record
        top = record.top_k
        logits = [[number(x) for x in row] for row in top.logits] if top is not None else []
        return {
            "sampled": record.sampled,
            "finish_reasons": {str(self.index_of(req_id)): why for req_id, why in record.finish_reasons.items()},
            "top_k": None if top is None else {"token_ids": top.token_ids.tolist(), "logits": logits},
        } | timeline(record)

    def notes(self) -> list[str]:
        """What this recording does not say, and how to get it."""
        record, notes = self._record, []
        if not self._texts:
            notes.append("token texts are not known (no tokenizer); tokens are shown by their ids")
        if record.top_k is None and record.rows.size:
            notes.append("logits were not recorded; Recorder(engine, top_k=10) keeps the greatest ten of each row")
        problems = getattr(self._replay.recording, "problems", [])
        if record.spans and all(span.device_end_ns < 0 for span in record.spans) and not problems:
            notes.append(
                'device times were not recorded; Recorder(engine, device_times="launches") stamps every launch'
            )
        return notes

    def checked(self, index: int) -> dict[str, Any] | None:
        """Whether the device's checksums of this step agree."""
        ok = self._replay.checked(index)
        return None if ok is None else {"ok": ok, "tables": len(self._record.checksums)}

    def stops(self, changes: list[dict[str, Any]]) -> list[str]:
        """Phases at which something that a panel shows changes, in order, behind ``"before"``."""
        record, batch = self._record, self._trace.batch
        phases = {change["phase"] for change in changes}
        if record.new or record.removed or record.diffs:
            phases.add("update_states")
        if batch is not None:
            phases |= {"prepare_inputs", "gather"}
        if record.top_k is not None:
            phases.add("logits")
        if record.rows.size and record.sampled is not None:
            phases.add("sample")
        return ["before", *(phase for phase in PHASES if phase in phases)]

    def named_tokens(self, columns: dict[str, Array]) -> list[int]:
        """Every token id that the view names."""
        ids = [columns["tokens.input_ids"]]
        token_columns = {column["name"] for column in row_columns(self._replay.tables, "") if column["kind"] == "token"}
        ids += [columns[f"rows.{name}"] for name in token_columns]
        writes = [write for write in self._trace.writes if write.table in token_columns]
        ids += [values for write in writes for values in (write.before, write.after)]
        ids += [
            diff.values[:MOST_VALUES] for diff in self._record.diffs if diff.table in ("all_token_ids", "draft_tokens")
        ]
        ids += [np.array(tokens, np.int64) for tokens in self._record.sampled or ()]
        if self._record.top_k is not None:
            ids.append(self._record.top_k.token_ids)
        return list(map(int, np.unique(np.concatenate([np.asarray(a, np.int64).ravel() for a in ids]))))

    # -- columns -------------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Array]:
        """The arrays of the view."""
        tables, trace = self._replay.tables, self._trace
        request = np.full(len(tables["total_len"]), -1, np.int32)
        for req_id, row in trace.owners_before.items():
            request[row] = self.index_of(req_id)
        columns = {"rows.request": request, **values_before(trace.values["before"])}
        columns |= _batch_columns(trace.batch)
        cache, batch = self._header.config["cache"], trace.batch
        valid = tables["num_computed_tokens"]
        if batch is not None and not trace.complete:
            valid = valid.copy()
            valid[batch.rows] += batch.num_scheduled
        slots = batch.slots if batch is not None else np.empty((1, 0), np.int64)
        rows = list(trace.owners_after.values())
        blocks = pages(tables, rows, valid, slots, num_blocks=cache["num_blocks"], block_size=cache["block_size"])
        return columns | {f"pages.{name}": values for name, values in vars(blocks).items()}


def _counts(batch: BatchTrace) -> tuple[Array, Array, Array, Array]:
    return batch.num_scheduled, batch.num_computed, batch.seq_lens, batch.prefill_len


def _kind(num_computed: int, seq_len: int, prefill_len: int) -> str:
    if num_computed >= prefill_len:
        return "decode"
    return "chunk" if seq_len < prefill_len else "prefill"


def _batch_columns(batch: BatchTrace | None) -> dict[str, Array]:
    none = np.empty(0, np.int32)
    if batch is None:
        names = "num_scheduled seq_lens num_computed".split()
        tokens = "input_ids positions slots logits_indices".split()
        empty = {f"batch.{name}": none for name in names} | {f"tokens.{name}": none for name in tokens}
        return empty | {"batch.query_start_loc": np.zeros(1, np.int32)}
    found = {
        "batch.num_scheduled": batch.num_scheduled,
        "batch.seq_lens": batch.seq_lens,
        "batch.num_computed": batch.num_computed,
        "batch.query_start_loc": batch.query_start_loc,
        "tokens.input_ids": batch.input_ids,
        "tokens.positions": batch.positions,
        "tokens.slots": batch.slots[0],
        "tokens.logits_indices": batch.logits_indices,
    }
    return {name: values.astype(np.int32) for name, values in found.items()}
