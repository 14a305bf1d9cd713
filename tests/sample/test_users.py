"""Rows with a flag, against a set of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.sample.users import UserRows
from tests.runner_v1.test_mutants import mutate

SETS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30)


@settings(max_examples=50, database=None)
@given(SETS)
def test_it_is_a_set(moves: list[tuple[int, bool]]) -> None:
    users, wanted = UserRows(5), set[int]()
    for row, uses in moves:
        assert users.set(row, uses) == (uses or row in wanted)
        wanted = wanted | {row} if uses else wanted - {row}
        assert users.count == len(wanted)
        for rows in ([row], [0, 1], [2, 3, 4], []):
            assert users.any_of(np.array(rows, np.int32)) == bool(wanted & set(rows))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("set", "1 if uses else -1", "1"), ("set", "uses or before", "uses"), ("any_of", "[rows]", "")],
)
def test_mutants_are_caught(name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, UserRows, name, old, new)
    with pytest.raises(AssertionError):
        test_it_is_a_set()
