"""One step taken apart: what each phase wrote into which row, and what the batch looked like."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mrv2lab.observer import PHASES
from mrv2lab.recording.replay_program import OpCall, State, num_reqs
from mrv2lab.recording.schema import Array, Publish, StepRecord
from mrv2lab.recording.watch import PUBLISHED, WatchedTable, Write, is_row_table, row_values, runs

STAGED_ALONE, STAGED_FUSED = "apply_write", "fused_apply_write"
"""Ops that only apply what the host staged: for one table, and for several at once."""


@dataclass
class BatchTrace:
    """The device's arrays of the step's batch as the model gets them. r requests, t tokens, n logits rows."""

    # [r] int32
    rows: Array
    # [r] int32
    num_scheduled: Array
    # [r] int32: tokens whose KV was valid before the step
    num_computed: Array
    # [r] int32
    prefill_len: Array
    # [r] int32
    seq_lens: Array
    # [r + 1] int32
    query_start_loc: Array
    # [t] int32, [t] int64
    input_ids: Array
    positions: Array
    # [G, t] int64
    slots: Array
    # [n] int64
    logits_indices: Array
    # G x [r, B_g] int32, as gathered
    block_tables: tuple[Array, ...]
    # [G, r] int32
    num_blocks: Array

    @classmethod
    def of(cls, state: State, record: StepRecord) -> BatchTrace:
        """Copies of what stands in ``state`` between gather and postprocess."""
        tables, count = state.tables, num_reqs(record)
        tokens = int(tables["query_start_loc"][count])
        rows = tables["idx_mapping"][:count].copy()
        return cls(
            rows=rows,
            num_scheduled=np.asarray(record.num_scheduled, np.int32).copy(),
            num_computed=tables["num_computed_tokens"][rows],
            prefill_len=tables["prefill_len"][rows],
            seq_lens=tables["seq_lens"][:count].copy(),
            query_start_loc=tables["query_start_loc"][: count + 1].copy(),
            input_ids=tables["input_ids"][:tokens].copy(),
            positions=tables["positions"][:tokens].copy(),
            slots=tables["slot_mappings"][:, :tokens].copy(),
            logits_indices=tables["logits_indices"][:count].copy(),
            block_tables=tuple(table[:count].copy() for table in state.group("input_block_table")),
            num_blocks=tables["num_blocks"][:, rows],
        )


@dataclass
class StepTrace:
    """What a step did to the rows, phase by phase."""

    index: int
    complete: bool
    """False: the step's tokens are not known, and nothing behind ``gather`` was rebuilt."""
    owners_before: dict[str, int]
    """Live request -> row before the step, in the order of admission."""
    owners_after: dict[str, int]
    values: dict[str, dict[str, Array]]
    """``"before"`` and each phase that writes rows -> row table -> its values behind that phase, [R] or as the table
    is. ``all_token_ids`` and the block tables are left out: see ``writes``."""
    writes: list[Write] = field(default_factory=list)
    batch: BatchTrace | None = None
    """None where the step had no tokens."""


class Tracer:
    """Runs the items of a step and notes what they write."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.writes: list[Write] = []
        self.values: dict[str, dict[str, Array]] = {"before": self._small_tables()}

    def _small_tables(self) -> dict[str, Array]:
        return {
            name: table.copy()
            for name, table in self._state.tables.items()
            if is_row_table(name) and name != "all_token_ids" and not name.startswith("block_table.")
        }

    def __call__(self, item: Publish | OpCall) -> None:
        """Do it, and keep what it wrote."""
        if isinstance(item, Publish):
            phase, writes = "apply_writes", self._publish(item)
        else:
            phase, writes = item.phase, self._launch(item)
        if writes:
            self.writes += writes
            self.values[phase] = self._small_tables()

    def confirm(self, record: StepRecord) -> None:
        """Published tables are recorded as differences; a new owner's row was overwritten though it stayed the same."""
        known = {(write.table, write.row) for write in self.writes}
        for request in record.new:
            for name in PUBLISHED:
                if (name, request.row) not in known:
                    values = row_values(name, self._state.tables[name], request.row).copy()
                    self.writes.append(Write("apply_writes", name, request.row, 0, values, values, "cpu", "publish"))
        self.writes.sort(key=lambda write: PHASES.index(write.phase))

    def _publish(self, item: Publish) -> list[Write]:
        table = self._state.tables[item.table]
        before = table.reshape(-1)[item.index]
        table.reshape(-1)[item.index] = item.values
        if not is_row_table(item.table):
            return []
        return runs(item.table, table, item.index, before, "apply_writes", "cpu", "publish")

    def _launch(self, call: OpCall) -> list[Write]:
        noted: dict[str, list[tuple[Array, Array]]] = {}

        def watched(name: str, table: Array) -> Array:
            if not is_row_table(name):
                return table
            notes = noted.setdefault(name, [])
            return WatchedTable.over(table, lambda cells, before: notes.append((cells, before)))

        args = dict(call.args)
        for position in call.op.write_index:
            param = call.op.params[position]
            names = call.tables.get(param)
            if isinstance(names, tuple):
                args[param] = tuple(watched(name, table) for name, table in zip(names, args[param], strict=True))
            elif names is not None:
                args[param] = watched(names, args[param])
        call.op.spec(*args.values())
        writer = "cpu" if call.name in (STAGED_ALONE, STAGED_FUSED) else "gpu"
        return [
            write
            for name, notes in noted.items()
            if notes
            for write in runs(
                name,
                self._state.tables[name],
                np.concatenate([cells for cells, _ in notes]),
                np.concatenate([before for _, before in notes]),
                call.phase,
                writer,
                call.name,
            )
        ]
