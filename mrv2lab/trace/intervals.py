"""Sets of time as sorted, disjoint, half-open intervals: two int64 arrays, starts and ends, in nanoseconds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Intervals(NamedTuple):
    """``[start[i], end[i])``, ascending, disjoint, not touching, none empty."""

    # [k] int64
    start: Array
    # [k] int64
    end: Array

    @property
    def total_ns(self) -> int:
        """Their length together."""
        return int((self.end - self.start).sum())

    def length_within(self, start: Array, end: Array) -> Array:
        """[m] int64: how much of each stretch ``[start, end)`` is covered; the stretches may overlap each other."""
        return self._before(end) - self._before(start)

    def _before(self, moment: Array) -> Array:
        """Covered time before each moment."""
        moment = np.asarray(moment, np.int64)
        if not len(self.start):
            return np.zeros(moment.shape, np.int64)
        lengths = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, moment, side="right")
        last = np.maximum(index - 1, 0)
        return np.where(index > 0, lengths[last] + np.minimum(moment, self.end[last]) - self.start[last], 0)


def union(start: Array, end: Array) -> Intervals:
    """The time that any of ``[start[i], end[i])`` covers, in whatever order they come; empty ones add nothing."""
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    filled = end > start
    start, end = start[filled], end[filled]
    if not len(start):
        return Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    fresh = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(start) - 1]])
    return Intervals(start[fresh], reach[last])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The time in both."""
    edges = np.concatenate([a.start, a.end, b.start, b.end])
    steps = np.concatenate([np.ones(len(a.start)), -np.ones(len(a.end)), np.ones(len(b.start)), -np.ones(len(b.end))])
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(steps[order])
    both = depth[:-1] == 2
    return union(edges[:-1][both], edges[1:][both])


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The time in ``a`` but not in ``b``."""
    return intersect(a, complement(b, int(a.start[0]), int(a.end[-1]))) if len(a.start) else a


def complement(a: Intervals, start: int, end: int) -> Intervals:
    """The time of ``[start, end)`` that is not in ``a``."""
    starts = np.clip(np.concatenate([[start], a.end]), start, end)
    ends = np.clip(np.concatenate([a.start, [end]]), start, end)
    return union(starts, ends)


def leaders(end: Array) -> Array:
    """[n] int64: for events in order of start, the position of the one of 0..i that ends last; of equals the first."""
    if not len(end):
        return np.empty(0, np.int64)
    reach = np.maximum.accumulate(end)
    grew = np.concatenate([[True], end[1:] > reach[:-1]])
    return np.maximum.accumulate(np.where(grew, np.arange(len(end)), 0))
