"""The rows panel of a step: its columns, what each row held before the step, and who wrote what into it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mrv2lab.recording.replay_trace import StepTrace
from mrv2lab.recording.schema import Array, StepRecord
from mrv2lab.recording.watch import PUBLISHED, Write, is_row_table, row_values

TOKENS = frozenset({"last_sampled_tokens", "next_prefill_tokens", "draft_tokens"})
"""Row tables whose values are token ids."""
ORDER = (
    "prompt_len prefill_len total_len num_computed_tokens num_blocks last_sampled_tokens next_prefill_tokens "
    "draft_tokens temperature"
).split()
TITLES = {
    "num_computed_tokens": "num_computed",
    "last_sampled_tokens": "last_sampled",
    "next_prefill_tokens": "next_prefill",
    "draft_tokens": "drafts",
}
TAIL = 40
"""Characters of a row's text that are shown."""
TAIL_BLOCKS = 8
"""Block ids of a row's table that are shown."""

Tail = Callable[[Array], str]


def row_columns(tables: dict[str, Array], transfer: str) -> list[dict[str, str]]:
    """What the rows panel shows, in order; ``transfer`` is the run's policy."""
    columns = [_column("request", "request", "host", "", "request")]
    published = "uva" if transfer == "uva_pool" else "device"
    for table in ORDER:
        place = published if table in PUBLISHED else "device"
        kind = "token" if table in TOKENS else "float" if tables[table].dtype == np.float32 else "int"
        width = len(row_values(table, tables[table], 0))
        for j in range(width):
            title = TITLES.get(table, table) + (f".{j}" if width > 1 else "")
            columns.append(_column(_cell_name(table, j, width), title, place, str(tables[table].dtype), kind))
    columns.append(_column("all_token_ids", "text", "uva", "int32", "text"))
    columns.append(_column("seed", "seed", published, "int64", "text"))
    return columns


def _column(name: str, title: str, place: str, dtype: str, kind: str) -> dict[str, str]:
    return {"name": name, "title": title, "place": place, "dtype": dtype, "kind": kind}


def _cell_name(table: str, column: int, width: int) -> str:
    return table if width == 1 else f"{table}.{column}"


def values_before(values: dict[str, Array]) -> dict[str, Array]:
    """``rows.<column>`` [R] from the row tables before the step; token ids and counts as int32."""
    columns = {}
    for table in ORDER:
        matrix = values[table]
        by_row = matrix.T if table in ("next_prefill_tokens", "num_blocks") else matrix.reshape(len(matrix), -1)
        for j in range(by_row.shape[1]):
            dtype = np.float32 if matrix.dtype == np.float32 else np.int32
            columns[f"rows.{_cell_name(table, j, by_row.shape[1])}"] = by_row[:, j].astype(dtype)
    return columns


def owner_changes(record: StepRecord, index_of: Callable[[str], int]) -> list[dict[str, Any]]:
    """Rows that were freed and rows that were given away, as changes of the column ``request``."""
    holder = {row: index_of(req_id) for req_id, row in record.removed}
    changes = [
        _change("update_states", "request", row, before, -1, "cpu", "remove_request") for row, before in holder.items()
    ]
    for new in record.new:
        changes.append(_change("update_states", "request", new.row, -1, index_of(new.req_id), "cpu", "add_request"))
    return changes


def _change(phase: str, column: str, row: int, before: Any, after: Any, writer: str, by: str) -> dict[str, Any]:
    return {
        "phase": phase, "column": column, "row": row, "before": before, "after": after, "writer": writer, "by": by
    }  # fmt: skip


def table_changes(trace: StepTrace, tables: dict[str, Array], tail: Tail) -> list[dict[str, Any]]:
    """Every write to a row in order: a number a cell, and for texts and block tables what a reader would see."""
    said: list[dict[str, Any]] = []
    undone: dict[tuple[str, int], Array] = {}
    # From the end, so that a row's earlier contents come to light by undoing.
    for write in reversed(trace.writes):
        if write.table == "seeds":
            before, after = str(int(write.before[0])), str(int(write.after[0]))
            said.append(_change(write.phase, "seed", write.row, before, after, write.writer, write.by))
        elif write.table in ORDER:
            said += reversed(_cells(write, tables))
        elif is_row_table(write.table):
            contents = undone.setdefault((write.table, write.row), tables[write.table][write.row].copy())
            after = _shown(contents, write, _values_after(trace, write.phase), tail)
            contents[write.column : write.column + len(write.before)] = write.before
            before = _shown(contents, write, _values_before(trace, write.phase), tail)
            said.append(_change(write.phase, write.table, write.row, before, after, write.writer, write.by))
    return said[::-1]


def _cells(write: Write, tables: dict[str, Array]) -> list[dict[str, Any]]:
    width = len(row_values(write.table, tables[write.table], write.row))
    pairs = zip(write.before, write.after, strict=True)
    return [
        _change(
            write.phase,
            _cell_name(write.table, write.column + j, width),
            write.row,
            number(before),
            number(after),
            write.writer,
            write.by,
        )
        for j, (before, after) in enumerate(pairs)
    ]


def number(value: Any) -> int | float | None:
    """A NumPy number for JSON: the shortest decimals that name a float, None for what is not finite."""
    if isinstance(value, np.floating):
        return float(str(value)) if math.isfinite(value) else None
    return int(value)


def _values_after(trace: StepTrace, phase: str) -> dict[str, Array]:
    return trace.values[phase]


def _values_before(trace: StepTrace, phase: str) -> dict[str, Array]:
    stops = list(trace.values)
    return trace.values[stops[stops.index(phase) - 1]]


def _shown(contents: Array, write: Write, values: dict[str, Array], tail: Tail) -> str:
    if write.table == "all_token_ids":
        return tail(contents[: values["total_len"][write.row]])
    group = int(write.table.rpartition(".")[2])
    ids = contents[: values["num_blocks"][group, write.row]].tolist()
    return ("… " if len(ids) > TAIL_BLOCKS else "") + " ".join(map(str, ids[-TAIL_BLOCKS:]))


def make_tail(texts: dict[int, str]) -> Tail:
    """The end of a row's text; token ids where there is no tokenizer, ``⟨id⟩`` for one that has no text."""

    def tail(token_ids: Array) -> str:
        # A token may have no text of its own (part of a character), so a few more are joined.
        last = token_ids[-2 * TAIL :].tolist()
        if texts:
            return "".join(texts.get(token, f"⟨{token}⟩") for token in last)[-TAIL:]
        shown = " ".join(map(str, last))
        return shown if len(shown) <= TAIL else shown[-TAIL:].partition(" ")[2]

    return tail
