from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace import intervals
from mrv2lab.trace.intervals import Intervals, complement, intersect, leaders, subtract, union

SPANS = st.lists(
    st.tuples(st.integers(-20, 20), st.integers(0, 12)).map(lambda one: (one[0], one[0] + one[1])), max_size=12
)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


def of(spans: list[tuple[int, int]]) -> Intervals:
    return union(np.array([start for start, _ in spans]), np.array([end for _, end in spans]))


def check(found: Intervals, expected: set[int]) -> None:
    """The same moments, and in the form that the class promises."""
    spans = list(zip(found.start.tolist(), found.end.tolist(), strict=True))
    assert covered(spans) == expected
    assert all(start < end for start, end in spans)
    assert all(before[1] < after[0] for before, after in pairwise(spans)), "touch or overlap"
    assert found.total_ns == len(expected)
    assert found.start.dtype == found.end.dtype == np.int64


@given(SPANS)
def test_union(spans: list[tuple[int, int]]) -> None:
    check(of(spans), covered(spans))


@given(SPANS, SPANS)
def test_two_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    check(intersect(of(a), of(b)), covered(a) & covered(b))
    check(subtract(of(a), of(b)), covered(a) - covered(b))


@given(SPANS, st.integers(-25, 25), st.integers(0, 30))
def test_complement(spans: list[tuple[int, int]], start: int, length: int) -> None:
    check(complement(of(spans), start, start + length), set(range(start, start + length)) - covered(spans))


@given(SPANS, SPANS)
def test_length_within(spans: list[tuple[int, int]], stretches: list[tuple[int, int]]) -> None:
    start, end = np.array([one[0] for one in stretches], int), np.array([one[1] for one in stretches], int)
    expected = [len(covered(spans) & set(range(*one))) for one in stretches]
    assert of(spans).length_within(start, end).tolist() == expected


@given(SPANS)
def test_leaders(spans: list[tuple[int, int]]) -> None:
    ends = [end for _, end in sorted(spans)]
    expected = [max(range(place + 1), key=lambda one: (ends[one], -one)) for place in range(len(ends))]
    assert leaders(np.array(ends, np.int64)).tolist() == expected


def test_touching_stretches_are_one() -> None:
    found = union(np.array([5, 0]), np.array([9, 5]))
    assert (found.start.tolist(), found.end.tolist()) == ([0], [9])


def test_large_times_stay_exact() -> None:
    """Above 2**53 a float would lose nanoseconds."""
    base = 2**62
    found = intersect(
        union(np.array([base + 1]), np.array([base + 9])), union(np.array([base + 3]), np.array([base + 4]))
    )
    assert (found.start.tolist(), found.end.tolist()) == ([base + 3], [base + 4])


def test_an_intersection_that_counts_touching_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: of equal edges, starts before ends would make [0, 5) and [5, 9) meet if empty pieces were kept."""
    monkeypatch.setattr(intervals, "union", lambda start, end: Intervals(np.asarray(start), np.asarray(end)))
    with pytest.raises(AssertionError):
        check(intersect(Intervals(*np.array([[5], [9]])), Intervals(*np.array([[0], [5]]))), set())
