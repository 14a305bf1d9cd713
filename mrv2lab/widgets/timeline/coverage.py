"""How much of each column of a picture a lane's slices cover: level of detail that does not grow with the trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.trace.trace import KINDS
from mrv2lab.widgets.timeline.slices import Slices

Array = np.ndarray[Any, Any]


def coverage(slices: Slices, start: float, end: float, columns: int) -> Array:
    """[lanes, kinds, columns] float64: the durations in each column over the column's width; overlapping slices count
    twice, so it may pass 1. A slice without length, or too short to see, counts as a tiny bit more than nothing."""
    lanes, kinds = len(slices.lanes), len(KINDS)
    size = lanes * kinds * (columns + 1)
    lane = np.repeat(np.arange(lanes), np.diff(slices.offsets))
    base = (lane * kinds + slices.kind) * (columns + 1)
    scale = columns / max(end - start, 1.0)
    first = np.clip((slices.start - start) * scale, 0, columns)
    last = np.clip((slices.start + slices.duration - start) * scale, 0, columns)
    at = np.minimum(first.astype(np.int64), columns - 1)
    until = np.minimum(last.astype(np.int64), columns - 1)
    wide = until > at
    sums = np.bincount(base + at, np.where(wide, at + 1 - first, np.maximum(last - first, 1e-9)), size)
    if wide.any():
        base, at, until, last = base[wide], at[wide], until[wide], last[wide]
        sums += np.bincount(base + until, last - until, size)
        # Whole columns between the two ends, as a running sum of comings and goings.
        edges = np.bincount(base + at + 1, minlength=size) - np.bincount(base + until, minlength=size)
        sums += np.cumsum(edges.reshape(-1, columns + 1), axis=1).ravel()
    result: Array = sums.reshape(lanes, kinds, columns + 1)[:, :, :columns]
    return result
