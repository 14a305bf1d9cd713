"""How each kind of event looks: an Okabe-Ito hue, a letter, and a hatch where two kinds share a hue."""

from __future__ import annotations

from typing import NamedTuple

from mrv2lab.trace.trace import KINDS


class Look(NamedTuple):
    """A kind's colour, and its second cues."""

    letter: str
    hue: str
    hatch: str = ""
    """``""``, ``diagonal``, ``upright`` or ``level``."""
    title: str = ""
    """The plural, for filters and legends."""


LOOKS: dict[str, Look] = {
    "python": Look("P", "#999999", "", "Python frames"),
    "op": Look("O", "#56b4e9", "", "operators"),
    "annotation": Look("A", "#f0e442", "", "annotations"),
    "phase": Look("F", "#e69f00", "", "phases"),
    "runtime": Look("R", "#0072b2", "", "runtime calls"),
    "sync": Look("S", "#d55e00", "diagonal", "synchronisations"),
    "overhead": Look("V", "#999999", "diagonal", "profiler overhead"),
    "kernel": Look("K", "#009e73", "", "kernels"),
    "memcpy": Look("C", "#cc79a7", "", "copies"),
    "memset": Look("M", "#cc79a7", "upright", "memsets"),
    "graph": Look("G", "#009e73", "diagonal", "graphs"),
    "gpu_annotation": Look("D", "#f0e442", "level", "device ranges"),
    "collective": Look("L", "#e69f00", "diagonal", "collectives"),
    "event": Look("E", "#0072b2", "upright", "stream events"),
    "instant": Look("I", "#d55e00", "", "moments"),
    "counter": Look("N", "#56b4e9", "level", "counters"),
    "other": Look("X", "#999999", "level", "other"),
}
assert tuple(LOOKS) == KINDS, "a kind without a look would not be drawn"
