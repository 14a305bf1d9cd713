"""Which event encloses which, on one lane. Ranges that cross (record_function under with_stack) have no parent."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]


def parents(trace: Trace, inner: Array, outer: Array | None = None) -> Array:
    """[n] int64: for each event of the mask ``inner``, the innermost event of ``outer`` (``inner`` if None) on its lane
    that encloses it; -1: none, or not in ``inner``. Equal stretches: the later one in the trace is the inner one. A
    moment at which a range ends is within it.

    Linear in the events of both masks, a Python loop: select what is needed first.
    """
    outer = inner if outer is None else outer
    found = np.full(len(trace), -1, np.int64)
    chosen = np.flatnonzero(inner | outer)
    order = chosen[np.argsort(trace.lane[chosen], kind="stable")]
    ends, lanes = trace.end[order].tolist(), trace.lane[order].tolist()
    is_inner, is_outer = inner[order].tolist(), outer[order].tolist()
    starts = trace.start[order].tolist()
    result = np.full(len(order), -1, np.int64)
    stack: list[tuple[int, int]] = []
    lane, crowded = -1, 64
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if lanes[place] != lane:
            lane, stack, crowded = lanes[place], [], 64
        while stack and stack[-1][0] < start:
            stack.pop()
        if len(stack) > crowded:  # ranges that cross leave ended ones below those that still run
            stack = [one for one in stack if one[0] >= start]
            crowded = 2 * len(stack) + 64
        if is_inner[place]:
            # What crosses the event's end stays on the stack, for it may enclose a later one.
            result[place] = next((order[above] for until, above in reversed(stack) if until >= end), -1)
        if is_outer[place]:
            stack.append((end, place))
    found[order] = result
    return found
