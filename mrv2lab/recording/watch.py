"""Which cells of the row tables a step wrote, what was there before, and who wrote.

A spec is run on a :class:`WatchedTable`, a view that notes every assignment through it: so what an op writes is said by
the op's own spec, and a write of the value that was there already is a write all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mrv2lab.recording.schema import Array

COLUMN_TABLES = frozenset({"next_prefill_tokens", "num_blocks"})
"""Row tables whose second axis is the row: [lookahead, R] and [G, R]."""
PUBLISHED = ("prompt_len", "prefill_len", "num_blocks", "temperature", "seeds")
"""Row tables whose truth is the host's. A new owner's row is overwritten in each of them."""
ROW_TABLES = COLUMN_TABLES | {
    "all_token_ids",
    "total_len",
    "num_computed_tokens",
    "draft_tokens",
    "last_sampled_tokens",
    *PUBLISHED,
}
"""Tables that hold something for each request row; and ``block_table.{g}``."""


def row_values(name: str, table: Array, row: int) -> Array:
    """What the table holds for a request row, as a view [k]."""
    if name in COLUMN_TABLES:
        return table[:, row]
    return table[row] if table.ndim > 1 else table[row : row + 1]


def is_row_table(name: str) -> bool:
    """Whether the table has an entry for each request row."""
    return name in ROW_TABLES or name.startswith("block_table.")


@dataclass
class Write:
    """Consecutive cells of one row, written in one phase by one launch or publish."""

    phase: str
    table: str
    row: int
    """The request row, whichever axis of the table that is."""
    column: int
    """Where in the row the cells begin; KV-cache group or lookahead for tables [.., R]."""
    # [k], dtype of the table
    before: Array
    # [k]
    after: Array
    writer: str
    """``cpu`` (staged or published by the host) or ``gpu`` (computed by a kernel)."""
    by: str
    """The op, or ``publish``."""


class WatchedTable(np.ndarray[Any, np.dtype[Any]]):
    """A view of a table that notes, for every assignment through it or a view of it, the cells and what they held."""

    _root: Array | None = None
    _note: Callable[[Array, Array], None] | None = None

    @classmethod
    def over(cls, table: Array, note: Callable[[Array, Array], None]) -> WatchedTable:
        """A watched view of ``table``; ``note(cells, before)`` gets flat indices before each assignment."""
        view = table.view(cls)
        view._root, view._note = table, note
        return view

    def __array_finalize__(self, parent: object) -> None:
        if isinstance(parent, WatchedTable):
            self._root, self._note = parent._root, parent._note

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._note is not None and self._root is not None and np.may_share_memory(self, self._root):
            index = key if isinstance(key, tuple) else (key,)
            if not any(part is ... for part in index):
                index = (*index, ...)  # so that even a single cell comes as a view
            cells = self.view(np.ndarray)[index]
            self._note(_flat_indices(cells, self._root), cells.ravel().copy())
        super().__setitem__(key, value)


def _flat_indices(view: Array, root: Array) -> Array:
    """Where in ``root`` (C order) the elements of ``view``, a basic-indexing view of it, are."""
    if not np.may_share_memory(view, root) and view.size:
        raise TypeError("a spec assigns through an index array, which cannot be watched; use slices")
    start = (view.__array_interface__["data"][0] - root.__array_interface__["data"][0]) // root.itemsize
    cells = np.full(view.shape, start, np.int64)
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        shape = [1] * view.ndim
        shape[axis] = size
        cells += (np.arange(size) * (stride // root.itemsize)).reshape(shape)
    return cells.ravel()


def runs(table: str, values: Array, cells: Array, before: Array, phase: str, writer: str, by: str) -> list[Write]:
    """Writes to the flat ``cells`` of ``values``, which hold the new values already, cut into runs within a row.

    A cell that was written twice counts once, with what it held first.
    """
    cells, first = np.unique(cells, return_index=True)
    before, after = before[first], values.reshape(-1)[cells]
    width = values.shape[1] if values.ndim > 1 else 1
    rows, columns = np.divmod(cells, width)
    if table in COLUMN_TABLES:
        rows, columns = columns, rows
        order = np.lexsort((columns, rows))
        rows, columns, before, after = rows[order], columns[order], before[order], after[order]
    cuts = np.flatnonzero((np.diff(rows) != 0) | (np.diff(columns) != 1)) + 1
    bounds = [0, *cuts.tolist(), len(cells)]
    return [
        Write(phase, table, int(rows[a]), int(columns[a]), before[a:b], after[a:b], writer, by)
        for a, b in pairwise(bounds)
        if b > a
    ]
