"""Which cells a spec writes, as it says itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2lab.recording.watch import WatchedTable, Write, runs

Notes = list[tuple[list[int], list[int]]]


def watched(table: np.ndarray[Any, Any]) -> tuple[WatchedTable, Notes]:
    notes: Notes = []
    return WatchedTable.over(table, lambda cells, before: notes.append((cells.tolist(), before.tolist()))), notes


@pytest.mark.parametrize(
    ("assign", "cells"),
    [
        (lambda t: t.__setitem__((1, 2), 9), [6]),
        (lambda t: t.__setitem__((np.int32(2), slice(1, 3)), 9), [9, 10]),
        (lambda t: t.__setitem__(0, 9), [0, 1, 2, 3]),
        (lambda t: t.__setitem__((slice(None), 1), 9), [1, 5, 9]),
        (lambda t: t.__setitem__(..., 9), list(range(12))),
        (lambda t: t[1, 1:].__setitem__(slice(None), 9), [5, 6, 7]),
        (lambda t: t[1].__setitem__(slice(None, None, 2), 9), [4, 6]),
        (lambda t: t.T.__setitem__(3, 9), [3, 7, 11]),
        (lambda t: t[1, 3:].__setitem__(slice(2, 5), 9), []),
    ],
)
def test_cells(assign: Any, cells: list[int]) -> None:
    table = np.arange(12).reshape(3, 4)
    view, notes = watched(table)
    assign(view)
    assert notes == [(cells, cells)], "values were their own indices"
    assert np.flatnonzero(table.ravel() == 9).tolist() == sorted({*cells, 9})


def test_increments_and_copies() -> None:
    table = np.zeros(4, np.int32)
    view, notes = watched(table)
    view[2] += 5
    (view + 1)[0] = 7  # a result is no longer the table
    view.copy()[0] = 7
    assert notes == [([2], [0])]
    assert table.tolist() == [0, 0, 5, 0]


def test_an_index_array_is_refused() -> None:
    view, _ = watched(np.zeros(4, np.int32))
    with pytest.raises(TypeError, match="cannot be watched"):
        view[[1, 2]] = 3


def said(writes: list[Write]) -> list[tuple[int, int, list[int], list[int]]]:
    return [(w.row, w.column, w.before.tolist(), w.after.tolist()) for w in writes]


def test_runs_break_at_rows_and_gaps() -> None:
    table = np.arange(12).reshape(3, 4) + 100
    cells = np.array([10, 2, 3, 4, 9])
    assert said(runs("all_token_ids", table, cells, cells, "p", "gpu", "op")) == [
        (0, 2, [2, 3], [102, 103]),
        (1, 0, [4], [104]),
        (2, 1, [9, 10], [109, 110]),
    ]


def test_a_cell_written_twice_counts_once_with_what_it_held_first() -> None:
    table = np.array([5, 6])
    writes = runs("total_len", table, np.array([1, 1]), np.array([3, 4]), "p", "gpu", "op")
    assert said(writes) == [(1, 0, [3], [6])]


def test_tables_whose_second_axis_is_the_row() -> None:
    table = np.array([[1, 2, 3], [4, 5, 6]])
    writes = runs("num_blocks", table, np.array([1, 4]), np.array([0, 0]), "p", "cpu", "publish")
    assert said(writes) == [(1, 0, [0, 0], [2, 5])]
    assert runs("num_blocks", table, np.array([], int), np.array([], int), "p", "cpu", "publish") == []
