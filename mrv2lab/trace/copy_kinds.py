"""Direction of each copy, and what memory its host side lies in, as far as the file says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]

DIRECTIONS: tuple[str, ...] = ("unknown", "HtoD", "DtoH", "DtoD", "HtoH", "PtoP", "AtoH", "HtoA", "AtoD", "DtoA")
"""Host, device, peer device, array."""
MEMORIES: tuple[str, ...] = ("unknown", "pageable", "pinned", "device", "managed", "array")
"""Where an end of a copy may lie. ``Host`` alone (ROCm) does not say whether it is pinned: unknown."""

# Kineto: Memcpy HtoD (Pinned -> Device); old ROCm: CopyHostToDevice; nsys: [CUDA memcpy Host-to-Device]
_SHORT = re.compile(r"\b([HDPA])to([HDPA])\b")
_LONG = re.compile(r"(Host|Device|Peer|Array)-?[Tt]o-?(Host|Device|Peer|Array)")
_ENDS = re.compile(r"\((\w+) -> (\w+)\)")


@dataclass(frozen=True, eq=False)
class CopyKinds:
    """Of m copies."""

    # [m] int64: positions in the trace
    events: Array
    # [m] int64: position in DIRECTIONS
    direction: Array
    # [m] int64: position in MEMORIES, where it reads and where it writes
    source: Array
    target: Array


def copy_kinds(trace: Trace) -> CopyKinds:
    """Of every ``memcpy`` of the trace, by its name, else by the arguments ``copy_kind``, ``src`` and ``dst``."""
    events = np.flatnonzero(trace.mask("memcpy"))
    table = np.zeros((len(trace.names), 3), np.int64)
    for place in trace.names_in(events):
        table[place] = _by_name(trace.names[place])
    found = table[trace.name[events]]
    for row in np.flatnonzero((found == 0).any(axis=1) & (trace.arg[events] >= 0)):
        found[row] = np.where(found[row] > 0, found[row], _by_args(trace.args(int(events[row]))))
    return CopyKinds(events, found[:, 0], found[:, 1], found[:, 2])


@lru_cache(maxsize=4096)
def _by_name(name: str) -> tuple[int, int, int]:
    match = _SHORT.search(name) or _LONG.search(name)
    direction = f"{match[1][0]}to{match[2][0]}" if match else ""
    ends = _ENDS.search(name)
    return _positions(direction, ends[1] if ends else "", ends[2] if ends else "")


def _by_args(args: dict[str, Any]) -> tuple[int, int, int]:
    direction = args.get("copy_kind") or args.get("kind") or ""
    return _positions(str(direction), str(args.get("src", "")), str(args.get("dst", "")))


def _positions(direction: str, source: str, target: str) -> tuple[int, int, int]:
    return (_position(direction, DIRECTIONS), _position(source.lower(), MEMORIES), _position(target.lower(), MEMORIES))


def _position(word: str, words: tuple[str, ...]) -> int:
    return words.index(word) if word in words else 0
