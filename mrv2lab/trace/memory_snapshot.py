"""Memory snapshots of PyTorch's CUDA allocator (``torch.cuda.memory._dump_snapshot``), read without running them.

A snapshot holds the allocator's segments at its end and, a device, the latest events of a ring. How much was allocated
before the first event is not written down: it follows from the end and the events in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.memory_pickle import load_plain
from mrv2lab.trace.trace import Problem, TraceError

if TYPE_CHECKING:
    import pandas as pd

MAX_BYTES = 1 << 28
"""Read at most; in memory a snapshot takes some twenty times its file."""
FRAMES = 64
"""Of a stack, looked at for a call site."""
LEAST = 8
"""Bytes of the file that an entry takes at least; more entries than that are references to few."""
ALLOCATED: dict[str, int] = {"alloc": 1, "free_completed": -1}
RESERVED: dict[str, int] = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""What an action does to the level, by its size."""
NUMBERS: tuple[str, ...] = ("total_size", "allocated_size", "active_size", "requested_size")


@dataclass(frozen=True, eq=False)
class MemorySnapshot:
    """What a snapshot says."""

    title: str
    segments: pd.DataFrame
    """A row a segment: device, address, stream, type, total_size, allocated_size, active_size, requested_size (bytes;
    -1: not said), active_requested (requested bytes of the blocks in use), blocks, expandable."""
    events: pd.DataFrame
    """A row an event, in the file's order: device, time_ns (since 1970; -1: not said), action, address, size (bytes),
    stream, site (``file:line function`` of the innermost Python frame, or empty)."""
    settings: dict[str, Any]
    """``allocator_settings``."""
    problems: tuple[Problem, ...] = ()
    extra: dict[str, int] = field(default_factory=dict)
    """Other keys of the file, with the length of what they hold."""

    def __repr__(self) -> str:
        return f"MemorySnapshot {self.title!r}: {len(self.segments):,} segments, {len(self.events):,} events"


def load_snapshot(path: str | Path, max_bytes: int = MAX_BYTES) -> MemorySnapshot:
    """The snapshot in a file. Nothing in the file is run: no class is looked up and no function called.

    Raises :class:`TraceError` for what is no snapshot, is damaged, or has over ``max_bytes``.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise TraceError(
                f"{path}: {size:,} bytes are over the cap of {max_bytes:,}; pass max_bytes={size} to read it anyway"
            )
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    value = load_plain(path, data)
    if not isinstance(value, dict) or not isinstance(value.get("device_traces", value.get("segments")), list):
        raise TraceError(
            f"{path}: a pickle, but no memory snapshot: it holds a {_what(value)} instead of a dict with 'segments' "
            "and 'device_traces'"
        )
    return _Reader(path, len(data)).read(value)


def _what(value: Any) -> str:
    keys = [str(key)[:30] for key in list(value)[:5]] if isinstance(value, dict) else []
    return type(value).__name__ + (f" with the keys {', '.join(keys)}" if keys else "")


class _Reader:
    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.room = size // LEAST + 1000
        self.problems: Counter[str] = Counter()

    def read(self, value: dict[Any, Any]) -> MemorySnapshot:
        import pandas as pd

        segments = [self._segment(one) for one in self._dicts(value.get("segments"), "segments")]
        traces = value.get("device_traces")
        events = [
            self._event(device, one)
            for device, trace in enumerate(traces if isinstance(traces, list) else [])
            for one in self._dicts(trace, "device_traces")
        ]
        names = ("device", "time_ns", "action", "address", "size", "stream", "site")
        said = ("device", "address", "stream", "type", *NUMBERS, "active_requested", "blocks", "expandable")
        settings = value.get("allocator_settings")
        known = ("segments", "device_traces", "allocator_settings")
        return MemorySnapshot(
            self.path.name,
            _frame(pd, said, segments, ("type",)),
            _frame(pd, names, events, ("action", "site")),
            _plain(settings) if isinstance(settings, dict) else {},
            tuple(Problem(reason, count) for reason, count in self.problems.items()),
            {str(key): len(item) if hasattr(item, "__len__") else 1 for key, item in value.items() if key not in known},
        )

    def _dicts(self, values: Any, where: str) -> Iterator[dict[Any, Any]]:
        """The entries of a list that are dicts, as far as the file has room for them."""
        if not isinstance(values, list):
            if values is not None:
                self.problems[f"{where} hold something else than a list"] += 1
            return
        for one in values:
            self.room -= 1
            if self.room < 0:
                raise TraceError(f"{self.path}: {where} name the same entries over and over; no snapshot does")
            if isinstance(one, dict):
                yield one
            else:
                self.problems[f"an entry of {where} is no dict"] += 1

    def _segment(self, one: dict[Any, Any]) -> tuple[Any, ...]:
        blocks = list(self._dicts(one.get("blocks"), "blocks"))
        used = [block for block in blocks if _text(block.get("state")).startswith("active")]
        sizes = [max(0, _number(block.get("requested_size", block.get("size")))) for block in used]
        return (
            _number(one.get("device")),
            _number(one.get("address")),
            _number(one.get("stream")),
            _text(one.get("segment_type")),
            *(_number(one.get(name)) for name in NUMBERS),
            sum(sizes) if blocks else max(0, _number(one.get("allocated_size"))),
            len(blocks),
            one.get("is_expandable") is True,
        )

    def _event(self, device: int, one: dict[Any, Any]) -> tuple[Any, ...]:
        micros = _number(one.get("time_us"))
        action = one.get("action")
        if not isinstance(action, str):
            self.problems["an event has no action"] += 1
            action = ""
        return (
            device,
            micros * 1000 if 0 <= micros < 1 << 53 else -1,
            action,
            _number(one.get("addr")),
            _number(one.get("size")),
            _number(one.get("stream")),
            _site(one.get("frames")),
        )


def _number(value: Any) -> int:
    """A whole number; -1 for anything else."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else -1


def _text(value: Any) -> str:
    """A text; empty for anything else, which may be a nest of lists that takes forever to print."""
    return value if type(value) is str else ""


def _site(frames: Any) -> str:
    """The innermost Python frame; C++ frames come before it."""
    for frame in frames[:FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict) and _text(frame.get("filename")).endswith(".py"):
            return f"{frame['filename']}:{_number(frame.get('line'))} {_text(frame.get('name'))}".rstrip()
    return ""


def _plain(settings: dict[Any, Any]) -> dict[str, Any]:
    """Numbers, texts, and dicts of them."""
    plain = (str, int, float, bool, type(None))
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, plain):
            found[str(key)] = value
        elif isinstance(value, dict):
            found[str(key)] = {str(inner): one for inner, one in value.items() if isinstance(one, plain)}
    return found


def _frame(pd: Any, names: tuple[str, ...], rows: list[tuple[Any, ...]], texts: tuple[str, ...]) -> Any:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return pd.DataFrame(
        {
            name: pd.array(column, dtype="str")
            if name in texts
            else np.array(column, bool if name == "expandable" else np.int64)
            for name, column in zip(names, columns, strict=True)
        }
    )


def memory_timeline(snapshot: MemorySnapshot) -> pd.DataFrame:
    """How much was allocated and reserved after each event that changed it.

    A row an event: time_ns, device, action, size, allocated_bytes (requested by the program, freed when the block is
    free for others: ``free_completed``), reserved_bytes (segments), event (row in ``snapshot.events``). Levels are
    anchored at the end, where the segments say what was in use. ``attrs["start"]``: device -> (allocated, reserved)
    before its first event. ``attrs["cannot_say"]``: what the file does not tell.
    """
    import pandas as pd

    events, segments = snapshot.events, snapshot.segments
    change = {name: _change(events, signs) for name, signs in (("allocated", ALLOCATED), ("reserved", RESERVED))}
    changing = np.flatnonzero(events["action"].isin([*ALLOCATED, *RESERVED]))
    level = {name: np.zeros(len(events), np.int64) for name in change}
    starts: dict[int, tuple[int, int]] = {}
    said: list[str] = []
    if not len(changing):
        said.append(
            "no allocation was recorded: call torch.cuda.memory._record_memory_history() before the run to keep events"
        )
    device_of = events["device"].to_numpy()
    for device in np.unique(device_of[changing]).tolist():
        mine = changing[device_of[changing] == device]
        here = segments[segments["device"] == device]
        ends = {"allocated": int(here["active_requested"].sum()), "reserved": int(here["total_size"].sum())}
        start = {}
        for name, end in ends.items():
            running = np.cumsum(change[name][mine])
            start[name] = end - int(running[-1])
            if start[name] + min(0, int(running.min())) < 0:
                said.append(
                    f"device {device}: its segments at the end do not fit the events ({name}: {end:,} bytes at the "
                    f"end, {int(running[-1]):+,} by the events); the level is counted from 0 at the first event"
                )
                start[name] = 0
            level[name][mine] = start[name] + running
        starts[device] = start["allocated"], start["reserved"]
    if (events["time_ns"].to_numpy()[changing] < 0).any():
        said.append(
            "events without a time (torch before 2.1 writes none): time_ns is -1 there, the order is the file's"
        )
    frame = pd.DataFrame(
        {
            "time_ns": events["time_ns"].to_numpy()[changing],
            "device": device_of[changing],
            "action": events["action"].array[changing],
            "size": events["size"].to_numpy()[changing],
            "allocated_bytes": level["allocated"][changing],
            "reserved_bytes": level["reserved"][changing],
            "event": changing,
        }
    )
    frame.attrs["start"] = starts
    frame.attrs["cannot_say"] = said
    return frame


def _change(events: pd.DataFrame, signs: dict[str, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[events] int64: bytes by which each event moves a level."""
    size = np.maximum(events["size"].to_numpy(), 0)
    sign = events["action"].map(signs).fillna(0).to_numpy(np.int64)
    found: np.ndarray[Any, np.dtype[np.int64]] = size * sign
    return found
