"""What the collectives of one run say about the clocks of its ranks.

A collective in which every rank needs something from every other cannot end anywhere before it has started everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mrv2lab.trace.trace import DEVICE_KINDS, Trace

Array = np.ndarray[Any, Any]

# Broadcast, Reduce, Send and Recv are absent: their root, or sender, may be done before the others have begun.
_NEEDS_ALL = re.compile(r"(nccl|rccl).*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)", re.IGNORECASE)


class Bound(NamedTuple):
    """Between which offsets of ``b`` against ``a`` no collective ends before its last start, in ns."""

    low_ns: int
    high_ns: int
    best_ns: int
    """The median distance of their ends, within the bounds."""
    collectives: int
    """How many were used."""


def different_ranks(traces: Sequence[Trace]) -> bool:
    """Whether these are different ranks of one world, as far as the files say."""
    ranks = [trace.info.rank for trace in traces]
    worlds = {trace.info.world_size for trace in traces}
    return len(ranks) > 1 and len(set(ranks)) == len(ranks) and min(ranks) >= 0 and len(worlds) == 1


def collective_bound(a: Trace, b: Trace) -> Bound | None:
    """What to add to ``b``'s times so that every common collective is possible.

    The k-th collective of a name in ``a`` is the k-th of that name in ``b``, for names that both have equally often.
    None: not two ranks of one world, nothing in common, or no offset at all makes the collectives possible.
    """
    if not different_ranks((a, b)):
        return None
    theirs = _by_name(b)
    pairs = [(mine, theirs[name]) for name, mine in _by_name(a).items() if len(mine) == len(theirs.get(name, ()))]
    if not pairs:
        return None
    of_a, of_b = (np.concatenate(side) for side in zip(*pairs, strict=True))
    low, high = int((a.start[of_a] - b.end[of_b]).max()), int((a.end[of_a] - b.start[of_b]).min())
    if low > high:
        return None
    best = round(float(np.median(a.end[of_a] - b.end[of_b])))
    return Bound(low, high, min(max(best, low), high), len(of_a))


def _by_name(trace: Trace) -> dict[str, Array]:
    """Name -> its collectives on the device, in order of start."""
    chosen = np.flatnonzero(trace.mask(*DEVICE_KINDS) & trace.named(lambda name: bool(_NEEDS_ALL.search(name))))
    return {trace.names[name]: chosen[trace.name[chosen] == name] for name in np.unique(trace.name[chosen]).tolist()}
