"""When the host and the device did what in a few steps of a deferred software stream: rows for a picture.

Device times are modelled; host times are the host's own, on the stream's virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pandas as pd

from mrv2lab.observer import EventLog, Mark
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.software import DeferredStream, Record, SoftwareStream

HOST: dict[str, str] = {
    "barrier_wait": "wait at the barrier",
    "update_states": "prepare",
    "apply_writes": "prepare",
    "prepare_inputs": "prepare",
    "gather": "prepare",
    "prepare_attn": "prepare",
    "forward": "launch",
    "logits": "launch",
    "sample": "launch",
    "postprocess": "launch",
    "copy_output": "launch",
    "wait_output": "wait for the output",
    "update_from_output": "schedule",
    "schedule": "schedule",
}
"""What the host does in a phase."""
COPIES = "copies and preparation"
FORWARD = "forward and sampling"
OUTPUT = "output copy"
WORK: tuple[str, ...] = (*dict.fromkeys(HOST.values()), COPIES, FORWARD, OUTPUT)


def typical_steps(frame: pd.DataFrame, count: int = 3) -> range:
    """``count`` neighbours of a :meth:`StreamTimes.frame` whose lengths, C to C, lie nearest to the median of all.

    One hiccup of the host is thus not in the picture. Raises ``ValueError`` where too few steps have E and C.
    """
    events = frame[frame["lane"] == "event"]
    at = {letter: rows.set_index("step")["start_us"] for letter, rows in events.groupby("work")}
    ends = at.get("C", pd.Series(dtype=float)).sort_index()
    lengths = ends.diff().dropna()
    off = (lengths - lengths.median()).abs()
    far: dict[range, float] = {}
    for first in off.index:
        steps = range(int(first), int(first) + count)
        if first in at.get("E", ends).index and set(steps) <= set(off.index):
            far[steps] = float(off.loc[list(steps)].max())
    if not far:
        raise ValueError(f"no {count} neighbours with events E and C; the frame has steps {sorted(set(frame['step']))}")
    return min(far, key=lambda steps: far[steps])


class StreamTimes(EventLog):
    """An observer of either runner's engine on a deferred stream; ``frame()`` once the steps are over.

    Raises ``TypeError`` for any other runtime: only a deferred stream knows when each launch ran.
    """

    def __init__(self, rt: CpuRuntime) -> None:
        super().__init__()
        if not isinstance(rt, CpuRuntime) or not isinstance(rt.main, DeferredStream):
            raise TypeError(f"stream times need a deferred software stream, got {type(rt).__name__}")
        self._rt = rt
        self._step = -1
        self._phase = ""
        self._host: list[tuple[int, str, int, int]] = []
        self._launches: list[tuple[int, str, Record]] = []
        self._events: list[tuple[int, str, Record]] = []

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return self._open(name)

    @contextmanager
    def _open(self, name: str) -> Iterator[None]:
        if name not in HOST:  # a sub-span, inside its phase
            yield
            return
        self._step += name == "schedule"
        # What is waited for and settled in a turn is the step before.
        step = self._step - (name in ("wait_output", "update_from_output"))
        self._phase, start = name, self._rt.clock.now()
        try:
            yield
        finally:
            self._host.append((step, HOST[name], start, self._rt.clock.now()))

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        super().mark(mark)
        if mark.kind in ("kernel", "run", "h2d", "d2h"):
            assert isinstance(self._rt.current, SoftwareStream) and self._rt.current.last is not None
            on_copy = self._rt.current is self._rt.copy
            work = OUTPUT if on_copy else COPIES if HOST.get(self._phase) == "prepare" else FORWARD
            self._launches.append((self._step, work, self._rt.current.last))
        elif mark.kind == "record":
            stream = self._rt.copy if mark.stream == self._rt.copy.name else self._rt.main
            letter = "E" if mark.name == "prepare_inputs" else "C" if mark.name.endswith("copied") else ""
            if letter and stream.last is not None:
                self._events.append((self._step, letter, stream.last))

    def frame(self) -> pd.DataFrame:
        """One row a stretch: ``step``, ``lane`` (host, main stream, copy stream, event), ``work`` (one of :data:`WORK`;
        of an event ``E``, recorded behind the copies, or ``C``, behind the output), ``start_us``, ``end_us``.

        A lane's neighbours of the same step and work are one row. Work that has not run is left out.
        """
        rows = [(step, "host", work, start, end) for step, work, start, end in self._host]
        for step, work, record in self._launches:
            lane = "copy stream" if work == OUTPUT else "main stream"
            if record.end_ns:
                rows.append((step, lane, work, record.start_ns, record.end_ns))
        made: list[tuple[int, str, str, int, int]] = []
        for step, lane, work, start, end in sorted(rows, key=lambda row: (row[1], row[3])):
            last = made[-1] if made else None
            if last is not None and last[:3] == (step, lane, work):
                made[-1] = (step, lane, work, last[3], end)
            else:
                made.append((step, lane, work, start, end))
        made += [(step, "event", name, rec.end_ns, rec.end_ns) for step, name, rec in self._events if rec.end_ns]
        frame = pd.DataFrame(made, columns=["step", "lane", "work", "start_us", "end_us"])
        origin = frame["start_us"].min() if len(frame) else 0
        frame[["start_us", "end_us"]] = (frame[["start_us", "end_us"]] - origin) / 1000
        return frame
