"""The host's waits as a timeline takes its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


def wait_marks(trace: Trace) -> pd.DataFrame:
    """One row a wait of the host: ``start_ns``, ``end_ns``, ``kind`` (``sync``), ``label``, ``lane`` (position in
    ``trace.lanes``): ``Timeline(trace, marks=wait_marks(trace))``.

    A wait is as long as its caller saw it, where the file says that. The label names what waited, and where: the call
    site, else the functions or the phase around it.

    Raises ``TypeError`` for anything but a Trace.
    """
    import pandas as pd

    if not isinstance(trace, Trace):
        raise TypeError(f"wait_marks() takes a Trace, got {type(trace).__name__}; Trace.load(path) reads a file")
    found = syncs(trace)
    found = found[found["host_waits"].astype(bool)]
    seen = found[["api_ns", "frame_ns", "caller_ns"]].max(axis=1).clip(lower=0)
    labels = [
        f"{'barrier: ' if row.barrier else ''}{row.call}"
        f"{f' at {row.site}' if row.site else f' ({row.caller})' if row.caller else ''}"
        for row in found.itertuples()
    ]
    table = pd.DataFrame(
        {
            "start_ns": found["start_ns"],
            "end_ns": found["start_ns"] + seen,
            "kind": "sync",
            "label": labels,
            "lane": trace.lane[found["event"].to_numpy(np.int64)],
        }
    )
    table.attrs["cannot_say"] = list(found.attrs["cannot_say"])
    return table
