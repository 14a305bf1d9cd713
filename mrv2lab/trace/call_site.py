"""Where in the program something happened: the Python frames and operators around an event, read from their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]

RANGES: tuple[str, ...] = ("python", "op", "annotation", "phase")
"""Kinds that can enclose a call of the runtime."""

_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d{1,9})\): (?P<function>.+)")
_BUILTIN = re.compile(r"<built-in (?:method|function) (?P<function>\S+?)(?: of (?:(?P<owner>\S+) .*)?)?>")
_MACHINERY = ("torch/", "contextlib.py", "functools.py", "threading.py", "<frozen ", "<string>")
"""Files between a user's code and what it calls. A path may begin anywhere before them (site-packages)."""


class Frame(NamedTuple):
    """A Python frame, as a profiler spells it: ``file(line): function`` or ``<built-in method f of Type object ...>``.

    ``line`` is where the frame was entered: the profilers record no line of the call inside it.
    """

    file: str
    """Empty for built-in functions."""
    line: int
    function: str
    owner: str = ""
    """Type of a built-in method's object."""

    @property
    def site(self) -> str:
        """``file:line``; empty for built-in functions."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def label(self) -> str:
        """``Type.function`` or ``function``."""
        return f"{self.owner}.{self.function}" if self.owner else self.function

    @property
    def in_torch(self) -> bool:
        """Whether the frame is PyTorch's own code, built-in functions included."""
        return not self.file or self.file.startswith("torch/") or "/torch/" in self.file

    @property
    def of_user(self) -> bool:
        """Whether a reader would look for the cause of a wait here: no built-in, no PyTorch, no ``contextlib``."""
        return bool(self.file) and not any(self.file.startswith(part) or f"/{part}" in self.file for part in _MACHINERY)


@lru_cache(maxsize=65536)
def frame(name: str) -> Frame | None:
    """The frame that a name spells; None: it spells none."""
    found = _FRAME.fullmatch(name)
    if found:
        return Frame(found["file"], int(found["line"]), found["function"])
    found = _BUILTIN.fullmatch(name)
    if found:
        return Frame("", -1, found["function"], found["owner"] or "")
    return None


def enclosing(trace: Trace, events: Sequence[int] | Array) -> list[list[int]]:
    """For each of ``events`` (positions), the events of :data:`RANGES` on its lane that enclose it, innermost first.

    Of equal stretches a range encloses a call, and the later of two ranges is the inner one. A range that crosses an
    event's end does not enclose it.
    """
    wanted = np.unique(np.asarray(events, np.int64))
    chains: dict[int, list[int]] = {int(event): [] for event in wanted}
    ranges = np.flatnonzero(trace.mask(*RANGES))
    range_lanes = trace.lane[ranges]
    for lane in np.unique(trace.lane[wanted]):
        targets = wanted[trace.lane[wanted] == lane]  # positions are in order of start
        around = ranges[range_lanes == lane]
        moments = trace.start[targets]
        first = np.searchsorted(moments, trace.start[around], side="left")
        around = around[first < np.searchsorted(moments, trace.start[around] + trace.duration[around], side="right")]
        _walk(trace, targets, around, chains)
    return [chains[int(event)] for event in events]


def _walk(trace: Trace, targets: Array, around: Array, chains: dict[int, list[int]]) -> None:
    """Fill the chains of one lane, by one pass over its ranges and targets in order of start."""
    both = np.union1d(targets, around)
    is_range = np.isin(both, around)
    order = np.lexsort((both, ~is_range, -trace.duration[both], trace.start[both]))
    both, is_range = both[order], is_range[order]
    is_target = np.isin(both, targets).tolist()
    starts, ends = trace.start[both].tolist(), (trace.start[both] + trace.duration[both]).tolist()
    open_: list[tuple[int, int]] = []
    crowded = 64
    for event, start, end, target, a_range in zip(
        both.tolist(), starts, ends, is_target, is_range.tolist(), strict=True
    ):
        while open_ and open_[-1][0] <= start and open_[-1][0] < end:
            open_.pop()
        if len(open_) > crowded:  # ranges that cross leave ended ones below those that still run
            open_ = [one for one in open_ if one[0] > start or one[0] == end]
            crowded = 2 * len(open_) + 64
        if target:
            # What crosses the event's end stays open, for it may enclose a later one.
            chains[event] = [one for until, one in reversed(open_) if until >= end]
        if a_range:
            open_.append((end, event))


def user_frames(trace: Trace, chain: Sequence[int]) -> list[Frame]:
    """The user's frames of a chain of :func:`enclosing`, innermost first."""
    found = (frame(trace.name_of(event)) for event in chain if trace.kind_of(event) == "python")
    return [one for one in found if one is not None and one.of_user]


def site_and_caller(trace: Trace, chain: Sequence[int], depth: int = 3) -> tuple[str, str]:
    """``file:line`` of the innermost frame of the user, and the functions that lead there: ``outer > inner``.

    Both empty where the file holds no such frame; then named ranges and operators serve as the caller.
    """
    frames = user_frames(trace, chain)
    if frames:
        return frames[0].site, " > ".join(one.function for one in reversed(frames[:depth]))
    names = [trace.name_of(event) for event in chain if trace.kind_of(event) != "python"]
    return "", " > ".join(reversed(names[:depth]))
