"""Where the host stood still, by cause."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from mrv2lab.observer import WAITS, Mark

CAUSES = ("barrier", "output", "implicit", "queue_full", "explicit")
"""For the copies of the step before (V1's barrier); for tokens; a read of device memory or a pageable copy; a software
stream that holds 4,096 launches; and whoever called ``synchronize`` for another reason."""


def cause(mark: Mark) -> str | None:
    """The cause of a wait; None for a mark that is none. Events are told apart by their names."""
    if mark.kind not in WAITS:
        return None
    if mark.kind == "implicit_sync":
        return "implicit"
    if mark.kind == "queue_full":
        return "queue_full"
    if mark.name.startswith("prepare_inputs"):
        return "barrier"
    return "output" if mark.name.endswith("copied") else "explicit"


def waits_by_cause(marks: Iterable[Mark]) -> pd.DataFrame:
    """How often the host could have stood still and for how long: columns ``waits`` and ``wait_ns``, a row a cause.

    A wait that found the work done counts too, with next to no time. CUDA does not say how long an implicit wait took;
    it counts with 0 ns. On a software stream the times are modelled (deferred) or the worker's own (threaded).
    """
    waits, times = dict.fromkeys(CAUSES, 0), dict.fromkeys(CAUSES, 0)
    for mark in marks:
        found = cause(mark)
        if found is not None:
            waits[found] += 1
            times[found] += mark.wait_ns
    return pd.DataFrame({"waits": waits, "wait_ns": times}).rename_axis("cause")
