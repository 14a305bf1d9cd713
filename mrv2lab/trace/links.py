"""Which host call launched which device work. By correlation id alone: arrows in a file come and go with its version,
and time windows are wrong as soon as the host runs ahead. One graph launch may own hundreds of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mrv2lab.trace.trace import DEVICE_KINDS, LAUNCH_KINDS, Trace

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Links:
    """Launches and device work of one trace; n = events, positions are the trace's."""

    # [n] int64: for device work, the event that launched it; -1: its launch is not in the file, or no device work
    launch: Array
    # [n] int64: for a host call, how many pieces of device work it owns
    work: Array

    def work_of(self, event: int) -> Array:
        """[k] int64: the device work that one host call launched, in order of start."""
        return np.flatnonzero(self.launch == event)


_KNOWN: WeakKeyDictionary[Trace, Links] = WeakKeyDictionary()


def links(trace: Trace) -> Links:
    """The links of a trace, found once.

    Where several host calls share a correlation id (a runtime call around a driver call), the innermost owns the work:
    the one that started last.
    """
    if trace not in _KNOWN:
        _KNOWN[trace] = _find(trace)
    return _KNOWN[trace]


def orphans(trace: Trace) -> Array:
    """[n] bool: device work whose launch is not in the file."""
    return trace.mask(*DEVICE_KINDS) & (links(trace).launch < 0)


def callers(trace: Trace, events: Array) -> Array:
    """[k] int64: for each of k events, the innermost host call with its correlation id; -1: none in the file."""
    found = np.full(len(events), -1, np.int64)
    calls = np.flatnonzero(trace.mask(*LAUNCH_KINDS) & (trace.correlation >= 0))
    if len(calls) and len(events):
        calls = calls[np.argsort(trace.correlation[calls], kind="stable")]  # equal ids stay in order of start
        ids, wanted = trace.correlation[calls], trace.correlation[events]
        place = np.searchsorted(ids, wanted, side="right") - 1
        known = (wanted >= 0) & (place >= 0) & (ids[place] == wanted)
        found[known] = calls[place[known]]
    return found


def _find(trace: Trace) -> Links:
    launch = np.full(len(trace), -1, np.int64)
    work = np.flatnonzero(trace.mask(*DEVICE_KINDS))
    launch[work] = callers(trace, work)
    return Links(launch, np.bincount(launch[launch >= 0], minlength=len(trace)).astype(np.int64))
