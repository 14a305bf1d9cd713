"""What is in one trace and not in the other: kernels and operators by name, synchronisations by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.annotations import names_step
from mrv2lab.trace.compare_noise import FEWEST, apart, different, holm, rank_test
from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import DEVICE_KINDS, KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

COMPARED: tuple[str, ...] = (*DEVICE_KINDS, "collective", "op", "annotation")
"""Kinds that :func:`kernels` compares; ranges that name a step are left out."""


def kernels(a: Trace, b: Trace) -> pd.DataFrame:
    """One row a (kind, name) of :data:`COMPARED`, what changed first, the largest difference in time first.

    ``kind``, ``name``, ``change``, ``count_a``, ``count_b``, ``total_a_ns``, ``total_b_ns``, ``difference_ns`` (b - a).
    ``change``: ``added`` (only in b), ``removed`` (only in a), ``count``, ``time`` (as often, and the lengths of the
    single events are different by the rule of :mod:`~mrv2lab.trace.compare_noise`, corrected for all names), or
    ``none`` (as often, and no such difference, or fewer than 8 events to tell it from).
    """
    import pandas as pd

    lengths = _lengths(a), _lengths(b)
    nothing = np.empty(0, np.int64)
    rows: list[dict[str, Any]] = []
    samples: dict[int, tuple[Array, Array]] = {}
    for kind, name in dict.fromkeys([*lengths[0], *lengths[1]]):
        of_a, of_b = (side.get((kind, name), nothing) for side in lengths)
        if not len(of_a) or not len(of_b):
            change = "removed" if len(of_a) else "added"
        else:
            change = "none" if len(of_a) == len(of_b) else "count"
        if change == "none" and len(of_a) >= FEWEST and apart(of_a, of_b):
            samples[len(rows)] = of_a, of_b
        rows.append(
            {
                "kind": kind,
                "name": name,
                "change": change,
                "count_a": len(of_a),
                "count_b": len(of_b),
                "total_a_ns": int(of_a.sum()),
                "total_b_ns": int(of_b.sum()),
                "difference_ns": int(of_b.sum()) - int(of_a.sum()),
            }
        )
    # Whatever is not apart has p = 1 at best, and counts among the names all the same.
    ps = holm([rank_test(*samples[row]) if row in samples else 1.0 for row in range(len(rows))])
    for row, (of_a, of_b) in samples.items():
        if different(of_a, of_b, ps[row]):
            rows[row]["change"] = "time"
    columns = "kind name change count_a count_b total_a_ns total_b_ns difference_ns".split()
    frame = pd.DataFrame(rows, columns=columns)
    order = sorted(
        range(len(rows)),
        key=lambda row: (_CHANGES.index(rows[row]["change"]), -abs(rows[row]["difference_ns"]), rows[row]["name"]),
    )
    frame = frame.iloc[order].reset_index(drop=True)
    frame.attrs["cannot_say"] = [
        f"no GPU activity recorded in {trace.info.title}"
        for trace in (a, b)
        if len(trace) and not trace.mask(*DEVICE_KINDS).any()
    ]
    return frame


_CHANGES = ("removed", "added", "count", "time", "none")


def same_events(a: Trace, b: Trace) -> bool:
    """Whether two traces hold the same events, names and lanes: one file under two names, or given twice."""
    if a is b:
        return True
    if len(a) != len(b) or a.names != b.names or a.lanes != b.lanes:
        return False
    return all(np.array_equal(getattr(a, column), getattr(b, column)) for column in _TOLD)


_TOLD = ("start", "duration", "name", "kind", "lane", "nbytes")


def _lengths(trace: Trace) -> dict[tuple[str, str], Array]:
    """(kind, name) -> [k] ns, in order of start."""
    chosen = trace.mask(*COMPARED) & trace.named(lambda name: not names_step(name))
    events = np.flatnonzero(chosen)
    key = trace.kind[events].astype(np.int64) * len(trace.names) + trace.name[events]
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    pieces = np.split(trace.duration[events][order], first[1:]) if len(keys) else []
    return {
        (KINDS[one // len(trace.names)], trace.names[one % len(trace.names)]): piece
        for one, piece in zip(keys.tolist(), pieces, strict=True)
    }


def waits(a: Trace, b: Trace) -> pd.DataFrame:
    """One row a kind of synchronisation, barriers apart.

    ``kind``, ``barrier``, ``host_waits``, ``count_a``, ``count_b``, and of each trace ``api_*_ns`` (the runtime's
    calls), ``caller_*_ns`` (what the caller saw) and ``gpu_*_ns`` (the device was still busy with what was waited for):
    sums over the rows that know it, missing (NA) where none does.
    """
    import pandas as pd

    tables = syncs(a), syncs(b)
    keys = ["kind", "barrier", "host_waits"]
    columns: dict[str, Any] = {}
    groups = [dict(list(table.groupby(keys, sort=True))) for table in tables]
    every = sorted({*groups[0], *groups[1]})
    frame = pd.DataFrame(every, columns=keys)
    for side, found in zip("ab", groups, strict=True):
        columns[f"count_{side}"] = np.array([len(found.get(key, ())) for key in every], np.int64)
    for short, column in ("api", "api_ns"), ("caller", "caller_ns"), ("gpu", "gpu_wait_ns"):
        for side, found in zip("ab", groups, strict=True):
            sums = [_sum(found[key][column]) if key in found else 0 for key in every]
            columns[f"{short}_{side}_ns"] = pd.array(sums, "Int64")
    for column, values in columns.items():
        frame[column] = values
    frame["kind"] = frame["kind"].astype("str")
    frame.attrs["cannot_say"] = [
        f"{trace.info.title}: {sentence}"
        for trace, table in zip((a, b), tables, strict=True)
        for sentence in table.attrs["cannot_say"]
    ]
    return frame


def _sum(values: pd.Series[Any]) -> int | None:
    known = values[values >= 0]
    return int(known.sum()) if len(known) else None
