"""Waits in the order in which one reads them, and summed up by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

_LENGTHS = ["api_ns", "frame_ns", "caller_ns"]


def longest_first(waits: pd.DataFrame) -> pd.DataFrame:
    """Rows of :func:`~mrv2lab.trace.syncs.syncs` by length: waits of the host first, each as long as whoever saw most
    of it (call, frame or caller). Of equals the earlier one; those of unknown length last."""
    length = waits[_LENGTHS].max(axis=1)
    keyed = waits.assign(_host=~waits["host_waits"].astype(bool), _length=-length)
    order = keyed.sort_values(["_host", "_length"], kind="stable").index
    found = waits.loc[order].reset_index(drop=True)
    found.attrs["cannot_say"] = list(waits.attrs.get("cannot_say", []))
    return found


def wait_totals(trace: Trace) -> pd.DataFrame:
    """One row a kind of synchronisation, those that held up the host first, the longest of them first.

    ``kind``, ``host_waits``, ``count``, and sums ``api_ns`` (the runtime's calls) and ``caller_ns`` (what the callers
    saw) over the rows that know it: NA where none does. ``api_known``, ``caller_known``: how many rows that are.
    """
    import pandas as pd

    waits = syncs(trace)
    rows = []
    for (kind, host), mine in waits.groupby(["kind", "host_waits"], sort=True):
        row = {"kind": kind, "host_waits": bool(host), "count": len(mine)}
        for column in ("api", "caller"):
            known = mine[f"{column}_ns"][mine[f"{column}_ns"] >= 0]
            row |= {f"{column}_ns": int(known.sum()) if len(known) else None, f"{column}_known": len(known)}
        rows.append(row)
    columns = ["kind", "host_waits", "count", "api_ns", "caller_ns", "api_known", "caller_known"]
    table = pd.DataFrame(rows, columns=columns).astype({"kind": "str", "api_ns": "Int64", "caller_ns": "Int64"})
    table["_length"] = -table[["api_ns", "caller_ns"]].max(axis=1).fillna(0)
    table["_host"] = ~table["host_waits"].astype(bool)
    table = table.sort_values(["_host", "_length", "kind"], ignore_index=True)[columns]
    table.attrs["cannot_say"] = list(waits.attrs["cannot_say"])
    return table
