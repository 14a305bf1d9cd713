"""Copies of the whole state at some steps, small enough to keep many, so that rewinding replays only a few steps."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from mrv2lab.recording.schema import Array

EVERY = 16
"""Steps between two snapshots at first."""
BUDGET = 128 << 20
"""Bytes of all snapshots; beyond, every second one is dropped."""


@dataclass(frozen=True)
class Packed:
    """A table without the zeros around it: rows that never had an owner and columns that no request reached."""

    # the corner of ``values`` in the table, one index an axis
    corner: tuple[int, ...]
    values: Array

    @classmethod
    def of(cls, table: Array) -> Packed:
        """A copy of the smallest part of ``table`` outside which it is zero."""
        spans = []
        for axis in range(table.ndim):
            others = tuple(a for a in range(table.ndim) if a != axis)
            filled = np.flatnonzero(table.any(axis=others) if others else table)
            spans.append((int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0))
        part = table[tuple(slice(*span) for span in spans)]
        return cls(tuple(first for first, _ in spans), part.copy())

    def restore(self, table: Array) -> None:
        """Make ``table`` what it was."""
        table[...] = 0
        table[tuple(slice(a, a + n) for a, n in zip(self.corner, self.values.shape, strict=True))] = self.values


@dataclass(frozen=True)
class Snapshot:
    """The state after a step."""

    tables: dict[str, Packed]
    owners: dict[str, int]
    num_dirty_rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of its tables."""
        return sum(packed.values.nbytes for packed in self.tables.values())


class Snapshots:
    """Snapshots by step index, thinned out by doubling their distance whenever they outgrow ``budget`` bytes."""

    def __init__(self, every: int = EVERY, budget: int = BUDGET) -> None:
        self.every = every
        self._budget = budget
        self._taken: dict[int, Snapshot] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(snapshot.nbytes for snapshot in self._taken.values())

    def wants(self, index: int) -> bool:
        """Whether a snapshot after step ``index`` is due and not there."""
        return index % self.every == 0 and index not in self._taken

    def add(self, index: int, snapshot: Snapshot) -> None:
        """Keep ``snapshot``, and make room if need be."""
        self._taken[index] = snapshot
        while self.nbytes > self._budget and len(self._taken) > 2:
            self.every *= 2
            self._taken = {i: kept for i, kept in self._taken.items() if i % self.every == 0}
        self._order = sorted(self._taken)

    def latest(self, index: int) -> tuple[int, Snapshot] | None:
        """The snapshot of the last step that is not after ``index``."""
        at = bisect_right(self._order, index)
        return (self._order[at - 1], self._taken[self._order[at - 1]]) if at else None
