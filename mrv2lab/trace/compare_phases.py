"""What a step consists of, as one value a step: host time by phase, and counts. The samples of ``compare``."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mrv2lab.trace.annotations import names_step
from mrv2lab.trace.call_site import frame as python_frame
from mrv2lab.trace.copy_kinds import DIRECTIONS, copy_kinds
from mrv2lab.trace.nesting import parents
from mrv2lab.trace.steps import step_of
from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

PHASE_PREFIX = "mrv2lab.phase."
LAUNCHES: frozenset[str] = frozenset({"kernel", "run", "h2d", "d2h", "replay"})
"""Marks of ours that put work into a stream."""
RUNNER_FILE = "model_runner"
"""In the path of the file whose functions are vLLM's phases: ``v1/worker/gpu_model_runner.py`` (V1),
``v1/worker/gpu/model_runner.py`` (MRV2)."""


class Phases(NamedTuple):
    """Host time by phase; k steps."""

    source: str
    """What the names are: ``phases`` (ours), ``frames`` (functions of vLLM's model runner and annotations),
    ``annotations``, or ``none``."""
    # each [k] int64: ns in the step, 0 where the phase was not in it
    times: dict[str, Array]
    # each [k] bool: whether the phase was in the step
    seen: dict[str, Array]

    def where_seen(self, name: str) -> Array:
        """[m] int64: ns in the steps that have the phase; empty for a phase that none has."""
        return self.times[name][self.seen[name]] if name in self.times else np.empty(0, np.int64)


def phases(trace: Trace, steps: pd.DataFrame) -> Phases:
    """Host time of every phase in every row of ``steps`` (some rows of :func:`~mrv2lab.trace.steps.steps`).

    Ours where the trace has them. Else annotations that are no steps, and Python frames of vLLM's model runner: those
    that no other frame of it encloses, and what they call in it directly, by function name. Two stretches of one name,
    one within the other, count once.
    """
    owner, _ = _owners(trace, steps)
    ours = trace.mask("phase") & (owner >= 0)
    if ours.any():
        return Phases("phases", *_times(trace, np.flatnonzero(ours), owner, len(steps)))
    ranges = trace.mask("annotation") & trace.named(lambda name: not names_step(name)) & (owner >= 0)
    frames = np.flatnonzero(_runner_frames(trace, owner >= 0))
    of_ranges, of_frames = (_times(trace, events, owner, len(steps)) for events in (np.flatnonzero(ranges), frames))
    source = "frames" if len(frames) else "annotations" if of_ranges[0] else "none"
    return Phases(source, of_ranges[0] | of_frames[0], of_ranges[1] | of_frames[1])


def _runner_frames(trace: Trace, within: Array) -> Array:
    """[n] bool: the two upper levels of the model runner's frames."""
    frames = trace.mask("python") & within & trace.named(_of_runner)
    parent = parents(trace, frames)
    above = np.where(parent >= 0, parent[parent], -1)
    return frames & (above < 0)


def _of_runner(name: str) -> bool:
    found = python_frame(name)
    return found is not None and RUNNER_FILE in found.file and not found.function.startswith("<")


def phase_name(name: str) -> str:
    """What an event's phase is called: without our prefix; of a Python frame the function."""
    found = python_frame(name)
    return found.function if found is not None else name.removeprefix(PHASE_PREFIX)


def _times(trace: Trace, events: Array, owner: Array, count: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Name -> [count] ns, and name -> [count] bool: in which steps it was."""
    phase_names = [phase_name(name) for name in trace.names]
    ids = {name: index for index, name in enumerate(dict.fromkeys(phase_names))}
    of_name = np.array([ids[name] for name in phase_names] or [0], np.int64)[trace.name[events]]
    # By name and lane, in order of start: what ends before an earlier one has ended lies within it.
    order = np.lexsort((trace.start[events], trace.lane[events], of_name))
    events, of_name = events[order], of_name[order]
    group = of_name * len(trace.lanes) + trace.lane[events]
    ends, outermost = trace.start[events] + trace.duration[events], np.ones(len(events), bool)
    for one in _runs(group):
        outermost[one][1:] = ends[one][1:] > np.maximum.accumulate(ends[one])[:-1]
    events, of_name = events[outermost], of_name[outermost]
    names = list(ids)
    times, seen = {}, {}
    for one in _runs(of_name):
        mine, name = events[one], names[of_name[one.start]]
        times[name] = np.zeros(count, np.int64)
        np.add.at(times[name], owner[mine], trace.duration[mine])
        seen[name] = np.bincount(owner[mine], minlength=count) > 0
    first = {names[one]: int(trace.start[events[of_name == one]].min()) for one in np.unique(of_name)}
    return {name: times[name] for name in sorted(times, key=first.__getitem__)}, seen


def counts(trace: Trace, steps: pd.DataFrame) -> dict[str, Array]:
    """What can be counted in every row of ``steps``, each [k] int64: ``launches``, ``device work``, ``copies HtoD``,
    ``copies DtoH``, ``bytes HtoD``, ``bytes DtoH``, ``host waits``, ``barrier waits``, and in recordings
    ``publishes`` and ``bytes published``. In recordings the calls are counted, the recorder's own left out, whether
    or not anybody stamped their device times; elsewhere the device work."""
    owner, marks = _owners(trace, steps)
    found = _by_marks(trace, owner, marks, len(steps)) if marks else _by_work(trace, owner, steps)
    waits = syncs(trace)
    for name, chosen in (
        ("host waits", waits["host_waits"]),
        ("barrier waits", waits["host_waits"] & waits["barrier"]),
    ):
        found[name] = _counted(owner[waits["event"].to_numpy(np.int64)[chosen.to_numpy(bool)]], len(steps))
    return found


def _by_marks(trace: Trace, owner: Array, marks: dict[int, str], count: int) -> dict[str, Array]:
    events = np.array([event for event in marks if owner[event] >= 0], np.int64)
    kinds = np.array([marks[event] for event in events.tolist()], object)
    moved = np.array([_bytes(trace.args(event)) for event in events.tolist()], np.int64)
    found = {"launches": _counted(owner[events[np.isin(kinds, list(LAUNCHES))]], count)}
    found["device work"] = _counted(owner[np.flatnonzero(trace.mask(*DEVICE_KINDS))], count)
    for kind, what, nbytes in (
        ("h2d", "copies HtoD", "bytes HtoD"),
        ("d2h", "copies DtoH", "bytes DtoH"),
        ("publish", "publishes", "bytes published"),
    ):
        chosen = kinds == kind
        found[what] = _counted(owner[events[chosen]], count)
        found[nbytes] = np.zeros(count, np.int64)
        np.add.at(found[nbytes], owner[events[chosen]], moved[chosen])
    return found


def _by_work(trace: Trace, owner: Array, steps: pd.DataFrame) -> dict[str, Array]:
    copies = copy_kinds(trace)
    found = {
        "launches": steps["launches"].to_numpy(np.int64),
        "device work": steps["gpu_events"].to_numpy(np.int64),
    }
    for direction, nbytes in (("HtoD", "bytes_h2d"), ("DtoH", "bytes_d2h")):
        events = copies.events[copies.direction == DIRECTIONS.index(direction)]
        found[f"copies {direction}"] = _counted(owner[events], len(steps))
        found[f"bytes {direction}"] = steps[nbytes].to_numpy(np.int64)
    return found


def _counted(rows: Array, count: int) -> Array:
    return np.bincount(rows[rows >= 0], minlength=count).astype(np.int64)


def _owners(trace: Trace, steps: pd.DataFrame) -> tuple[Array, dict[int, str]]:
    """[n] int64: row of every event's step in ``steps``, -1: none; and of a recording's calls the kind of their mark.
    What the recorder itself did belongs to no step."""
    owner = step_of(trace, steps)
    marks: dict[int, str] = {}
    if trace.info.producer != "recording":
        return owner, marks
    calls = trace.mask("runtime")
    for event in np.flatnonzero((trace.arg >= 0) & trace.mask("runtime", "phase", *DEVICE_KINDS)).tolist():
        args = trace.args(event)
        if args.get("added"):
            owner[event] = -1
        elif calls[event]:
            marks[event] = str(args.get("mark", ""))
    return owner, marks


def _runs(values: Array) -> list[slice]:
    """The stretches of equal values, where equal ones lie together."""
    edges = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [len(values)]]).tolist()
    return [slice(low, high) for low, high in pairwise(edges) if high > low]


def _bytes(args: dict[str, Any]) -> int:
    found = args.get("nbytes")
    return found if isinstance(found, int) else 0
