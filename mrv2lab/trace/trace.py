"""A Trace: what a profiler wrote down, as columns. Readers make it, analyses and views take it.

Times are int64 nanoseconds counted from ``TraceInfo.origin_ns``, the earliest event of the file; n = events, in order
of start, longer ones first. A selection is a Trace too and shares names, lanes and arguments with the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.args import NO_ARGS, ArgStore

if TYPE_CHECKING:
    import pandas as pd

    from mrv2lab.recording.recording import Recording

Array = np.ndarray[Any, Any]

KINDS: tuple[str, ...] = (
    "python",  # a Python frame
    "op",  # a framework's operator
    "annotation",  # a named range of the host: record_function, NVTX, a vLLM step
    "phase",  # a range named after PHASES, ours
    "runtime",  # a call of the CUDA or HIP runtime or driver, or a chokepoint of ours that launches
    "sync",  # what the profiler says about a synchronisation: cuda_sync records, waits of ours
    "overhead",  # the profiler's own time
    "kernel",
    "memcpy",
    "memset",
    "graph",  # a whole graph as one piece of device work, its nodes unknown
    "gpu_annotation",  # a host range projected onto the device
    "collective",
    "event",  # an event recorded on a stream
    "instant",  # a moment: memory reports, markers
    "counter",
    "other",
)
"""What an event can be; the column ``kind`` holds positions in here."""
KIND: dict[str, int] = {name: index for index, name in enumerate(KINDS)}
DEVICE_KINDS: tuple[str, ...] = ("kernel", "memcpy", "memset", "graph")
"""Work that occupies a device."""
LAUNCH_KINDS: tuple[str, ...] = ("runtime",)
"""Host calls that may own device work through ``correlation``."""


class TraceError(ValueError):
    """A file that is no trace, or one that cannot be read; the message names file, offset and reason."""


class TraceCancelled(TraceError):
    """Reading was stopped by the reader."""


@dataclass(frozen=True)
class Lane:
    """One horizontal row of events: a host thread, a device stream, or something drawn beside them."""

    process: str
    """As the file names it; may be empty."""
    thread: str
    role: str = "thread"
    """``thread``, ``stream``, ``annotation`` (ranges projected onto a device), ``counter`` or ``other``."""
    device: int = -1
    """Device of a stream; -1: none or unknown."""
    stream: int = -1
    """Stream id on its device, 0 included; -1: none."""
    rank: int = -1
    label: str = ""
    """For people; empty: ``process thread``."""

    def __str__(self) -> str:
        return self.label or f"{self.process} {self.thread}".strip() or "unnamed"


@dataclass(frozen=True)
class Problem:
    """What of a file was left out or mended, with how often and where first."""

    reason: str
    count: int = 1
    offset: int = -1
    """Byte (of the uncompressed text) of the first one; -1: not a place."""
    example: str = ""

    def __str__(self) -> str:
        where = f", first at byte {self.offset:,}" if self.offset >= 0 else ""
        example = f": {self.example}" if self.example else ""
        return f"{self.reason} ({self.count:,}x{where}){example}"


@dataclass(frozen=True)
class TraceInfo:
    """What is true for the whole file."""

    producer: str
    """``kineto``, ``chrome``, ``nsys``, ``recording``, ``merged``."""
    title: str
    """File name, or what the trace is called in pictures."""
    path: str = ""
    clock: str = "unknown"
    """``unix`` (comparable between files), ``host`` (one machine's monotonic clock), ``session`` or ``unknown``."""
    origin_ns: int = 0
    """Time 0 of the columns on that clock."""
    rank: int = -1
    world_size: int = -1
    devices: tuple[dict[str, Any], ...] = ()
    """What the file says about each device: ``id``, ``name``, ...; any key may be missing."""
    modelled: bool = False
    """Device times come from a cost model."""
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Everything else at the file's top level that is not an event."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Events in columns. Build one with :class:`mrv2lab.trace.builder.TraceBuilder` or :meth:`load`."""

    info: TraceInfo
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    # [n] int64: ns from info.origin_ns
    start: Array
    # [n] int64: ns, >= 0
    duration: Array
    # [n] int32: position in names
    name: Array
    # [n] uint8: position in KINDS
    kind: Array
    # [n] int32: position in lanes
    lane: Array
    # [n] int64: joins a host call with the device work it launched, unique in the trace (process included); -1: none
    correlation: Array
    # [n] int64: bytes moved by a copy or set; -1: not known
    nbytes: Array
    # [n] int32: position in store; -1: no arguments
    arg: Array
    store: ArgStore = NO_ARGS
    problems: tuple[Problem, ...] = ()

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Trace:
        """Read a file of any known kind; see :func:`mrv2lab.trace.read.load` for options and errors."""
        from mrv2lab.trace.read import load

        return load(path, **options)

    @classmethod
    def of(cls, recording: Recording, **options: Any) -> Trace:
        """A recording's spans, marks and device times; see :func:`mrv2lab.trace.from_recording.from_recording`."""
        from mrv2lab.trace.from_recording import from_recording

        return from_recording(recording, **options)

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        device = int(self.mask(*DEVICE_KINDS).sum())
        modelled = ", device times modelled" if self.info.modelled else ""
        skipped = f", {len(self.problems)} problem(s)" if self.problems else ""
        return (
            f"Trace {self.info.title!r} ({self.info.producer}): {len(self):,} events, {device:,} on a device, "
            f"{len(self.lanes)} lanes, {self.span_ns / 1e6:,.3f} ms{modelled}{skipped}"
        )

    # -- columns

    @cached_property
    def end(self) -> Array:
        """[n] int64: ns."""
        return self.start + self.duration

    @property
    def span_ns(self) -> int:
        """From the first event's start to the last one's end; 0 without events."""
        return int(self.end.max() - self.start.min()) if len(self) else 0

    def mask(self, *kinds: str) -> Array:
        """[n] bool: events of these kinds."""
        wanted = np.zeros(len(KINDS), bool)
        wanted[[KIND[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def named(self, test: Callable[[str], bool]) -> Array:
        """[n] bool: events whose name passes; the test runs once a name."""
        return np.fromiter((test(name) for name in self.names), bool, len(self.names))[self.name]

    def names_in(self, events: Array) -> list[int]:
        """Positions in ``names`` of those that these events have (a mask [n], or positions), ascending: what is worth a
        look where most names are of other events."""
        found: list[int] = np.flatnonzero(np.bincount(self.name[events], minlength=len(self.names))).tolist()
        return found

    def by_lane(self, test: Callable[[Lane], bool]) -> Array:
        """[n] bool: events whose lane passes."""
        return np.fromiter((test(lane) for lane in self.lanes), bool, len(self.lanes))[self.lane]

    def name_of(self, event: int) -> str:
        """Name of one event."""
        return self.names[int(self.name[event])]

    def kind_of(self, event: int) -> str:
        """Kind of one event."""
        return KINDS[int(self.kind[event])]

    def lane_of(self, event: int) -> Lane:
        """Lane of one event."""
        return self.lanes[int(self.lane[event])]

    def args(self, event: int) -> dict[str, Any]:
        """The arguments that the file gave one event; empty if none."""
        return self.store[int(self.arg[event])]

    # -- selections

    def select(self, events: Array) -> Trace:
        """Those events, by mask [n] or by positions; names, lanes and arguments are shared."""
        picked = {name: getattr(self, name)[events] for name in COLUMNS}
        return dataclasses.replace(self, **picked)

    def between(self, start_ns: int, end_ns: int) -> Trace:
        """Events that touch the stretch ``[start_ns, end_ns)``; a moment counts where it starts in it."""
        touches = (self.start < end_ns) & ((self.end > start_ns) | (self.start >= start_ns))
        return self.select(touches)

    def where(self, *kinds: str, name: str | None = None, lane: str | None = None, stream: int | None = None) -> Trace:
        """Events of these kinds (all without any) whose name and lane contain the text, in any case."""
        chosen = self.mask(*kinds) if kinds else np.ones(len(self), bool)
        if name is not None:
            chosen &= self.named(lambda text: name.lower() in text.lower())
        if lane is not None:
            chosen &= self.by_lane(lambda one: lane.lower() in str(one).lower())
        if stream is not None:
            chosen &= self.by_lane(lambda one: one.stream == stream)
        return self.select(chosen)

    def to_frame(self, args: Sequence[str] = ()) -> pd.DataFrame:
        """One row an event: name, kind, start_ns, duration_ns, end_ns, lane, device, stream, correlation, nbytes, and a
        column for each of ``args``."""
        import pandas as pd

        lanes = self.lanes
        columns: dict[str, Any] = {
            "name": np.array(self.names, object)[self.name] if len(self) else [],
            "kind": np.array(KINDS, object)[self.kind],
            "start_ns": self.start,
            "duration_ns": self.duration,
            "end_ns": self.end,
            "lane": np.array([str(lane) for lane in lanes], object)[self.lane] if len(self) else [],
            "device": np.array([lane.device for lane in lanes] or [0], np.int64)[self.lane],
            "stream": np.array([lane.stream for lane in lanes] or [0], np.int64)[self.lane],
            "correlation": self.correlation,
            "nbytes": self.nbytes,
        }
        for key in args:
            columns[key] = [self.store[int(row)].get(key) for row in self.arg]
        frame = pd.DataFrame(columns)
        return frame if len(self) else frame.astype({"name": "str", "kind": "str", "lane": "str"})


COLUMNS: tuple[str, ...] = ("start", "duration", "name", "kind", "lane", "correlation", "nbytes", "arg")
"""The arrays of a Trace, by name."""


def problems_of(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The same, one for each reason: counts added, the first place and example kept."""
    merged: dict[str, Problem] = {}
    for one in problems:
        known = merged.get(one.reason)
        merged[one.reason] = one if known is None else dataclasses.replace(known, count=known.count + one.count)
    return tuple(merged.values())
