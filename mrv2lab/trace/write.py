"""A trace as Chrome JSON for Perfetto (ui.perfetto.dev) and every tool that reads torch profiler traces.

The same trace gives the same bytes. Times are exact: microseconds with three decimals from ``baseTimeNanoseconds``,
the wall clock's time 0, or absolute ones where the trace knows no wall clock. Categories are those of torch's profiler.
An arrow goes from a launch to the first piece of device work that it owns; a graph launch has that one arrow, though
hundreds of kernels may follow. ``<`` is written as an escape, so that a file pasted into a page stays text.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from mrv2lab.trace.links import links
from mrv2lab.trace.trace import KIND, KINDS, Lane, Trace, TraceError
from mrv2lab.trace.write_ids import Renumbered
from mrv2lab.trace.write_rows import Rows, identifier, json_text, overflow

Array = np.ndarray[Any, Any]

PIECE = 16384
"""Events written at a time."""
CATEGORIES: dict[str, str] = {
    "python": "python_function",
    "op": "cpu_op",
    "annotation": "user_annotation",
    "phase": "phase",
    "runtime": "cuda_runtime",
    "sync": "cuda_sync",
    "overhead": "overhead",
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "graph": "cuda_graph",
    "gpu_annotation": "gpu_user_annotation",
    "collective": "collective_comm",
    "event": "cuda_event",
    "instant": "cpu_instant_event",
    "counter": "hardware_counters",
    "other": "other",
}
"""Kind -> category of torch's profiler."""
_DRIVER = re.compile(r"(cu|hip)[A-Z]\w*")
_COPIES = (KIND["memcpy"], KIND["memset"])
_OWN = "mrv2lab"
"""Top-level key of what Chrome's format has no place for."""
_NOT_OURS = frozenset({_OWN, "traceEvents", "baseTimeNanoseconds", "deviceProperties", "flow_arrows"})


def write_perfetto(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` to ``path``, compressed where the name ends in ``.gz``.

    Slices that overlap on a stream without nesting go to rows beside it (``write_rows``). A file that is there already
    is replaced once the new one is whole. Raises :class:`TraceError` where the path cannot be written.
    """
    path = Path(path)
    try:
        with _replacing(path) as file:
            for text in _texts(trace):
                file.write(text.replace(b"<", b"\\u003c"))  # within a string: JSON has no < of its own
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
                    yield cast("IO[bytes]", packed)
            else:
                yield raw
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _texts(trace: Trace) -> Iterator[bytes]:
    """The file, piece by piece."""
    writer = _Events(trace)
    yield _head(trace)
    lines = list(writer.metadata())
    yield b",\n".join(lines)
    first = not lines
    for pieces in (writer.events(), writer.arrows()):
        for piece in pieces:
            if piece:
                yield (b"" if first else b",\n") + b",\n".join(piece)
                first = False
    yield b"\n]}\n"


def _head(trace: Trace) -> bytes:
    """Everything around the events, before them, so that a reader knows the clock when they come."""
    info = trace.info
    foreign = info.producer in ("kineto", "chrome")
    keys: dict[str, Any] = {"displayTimeUnit": "ms"}
    # A trace that came as such a file keeps the keys that it had.
    keys |= (
        {key: value for key, value in info.extra.items() if key not in _NOT_OURS} if foreign else {"schemaVersion": 1}
    )
    if info.devices:
        keys["deviceProperties"] = list(info.devices)
    if _based(trace):
        keys["baseTimeNanoseconds"] = info.origin_ns
    own: dict[str, Any] = {
        "producer": info.producer,
        "title": info.title,
        "clock": info.clock,
        "modelled": info.modelled,
        "versions": info.versions,
        "problems": [str(problem) for problem in trace.problems],
        "arrows": "one a launch, to the first piece of its device work",
    }
    theirs = info.extra.get(_OWN)
    keys[_OWN] = (theirs if isinstance(theirs, dict) else {}) | own if foreign else own | {"extra": info.extra}
    return json_text(keys)[:-1] + b',"traceEvents":[\n'


def _based(trace: Trace) -> bool:
    return trace.info.clock == "unix" and trace.info.origin_ns > 0


def _us(time_ns: int) -> bytes:
    """Exact decimal microseconds."""
    sign = "-" if time_ns < 0 else ""
    return b"%s%d.%03d" % (sign.encode(), abs(time_ns) // 1000, abs(time_ns) % 1000)


class _Events:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.shift = 0 if _based(trace) else trace.info.origin_ns
        self.level = overflow(trace)
        self.renumbered = Renumbered(trace) if trace.info.producer == "merged" else None
        self.rows = Rows(trace)
        # Copied, since orjson leaves a hole of kilobytes behind each of its small texts as long as they live.
        self.names = [bytes(memoryview(json_text(name))) for name in trace.names]
        self.driver = [_DRIVER.fullmatch(name) is not None for name in trace.names]
        self._heads: dict[tuple[int, int, int, bool], bytes] = {}
        self._places: dict[tuple[int, int], bytes] = {}

    def metadata(self) -> Iterator[bytes]:
        levels = int(self.level.max(initial=0)) + 1
        used = np.unique(self.trace.lane.astype(np.int64) * levels + self.level)
        yield from self.rows.metadata(divmod(row, levels) for row in used.tolist())

    # -- events

    def events(self) -> Iterator[list[bytes]]:
        trace, columns = self.trace, self.trace
        for begin in range(0, len(trace), PIECE):
            part = slice(begin, begin + PIECE)
            yield [
                self._event(*values)
                for values in zip(
                    *(
                        column[part].tolist()
                        for column in (
                            columns.start,
                            columns.duration,
                            columns.name,
                            columns.kind,
                            columns.lane,
                            self.level,
                            columns.correlation,
                            columns.nbytes,
                            columns.arg,
                        )
                    ),
                    strict=True,
                )
            ]

    def _event(
        self,
        start: int,
        duration: int,
        name: int,
        kind: int,
        lane: int,
        level: int,
        correlation: int,
        nbytes: int,
        arg: int,
    ) -> bytes:
        where = self.trace.lanes[lane]
        time = _us(start + self.shift)
        if where.role == "counter":
            return self._counter(where, name, time, self._args(where, kind, -1, -1, arg))
        args = self._args(where, kind, correlation, nbytes, arg)
        head = self._head(kind, lane, level, self.driver[name])
        if KINDS[kind] == "instant" and not duration and correlation < 0:
            return b'{"ph":"i","s":"t",%s,"name":%s,"ts":%s%s}' % (head, self.names[name], time, args)
        return b'{"ph":"X",%s,"name":%s,"ts":%s,"dur":%s%s}' % (head, self.names[name], time, _us(duration), args)

    def _counter(self, lane: Lane, name: int, time: bytes, args: bytes) -> bytes:
        text = self.trace.names[name]
        pid = json_text(identifier(lane.process))
        # A counter's row is its name, and its id if it has one.
        own = lane.thread.removeprefix(f"{text} ") if lane.thread.startswith(f"{text} ") else ""
        mark = b',"id":%s' % json_text(own) if own else b""
        return b'{"ph":"C","cat":"counter","pid":%s,"name":%s%s,"ts":%s%s}' % (pid, self.names[name], mark, time, args)

    def _head(self, kind: int, lane: int, level: int, driver: bool) -> bytes:
        """Category, pid and tid."""
        key = (kind, lane, level, driver)
        if key not in self._heads:
            category = CATEGORIES[KINDS[kind]]
            if KINDS[kind] == "runtime" and driver:
                category = "cuda_driver"
            elif KINDS[kind] == "other" and self.trace.lanes[lane].role == "other":
                category = "Trace"  # torch's own span, drawn beside the threads
            self._heads[key] = b'"cat":"%s",%s' % (category.encode(), self._place(lane, level))
        return self._heads[key]

    def _place(self, lane: int, level: int) -> bytes:
        if (lane, level) not in self._places:
            where = self.trace.lanes[lane]
            pid, tid = identifier(where.process), identifier(self.rows.tid(where, level))
            self._places[lane, level] = b'"pid":%s,"tid":%s' % (json_text(pid), json_text(tid))
        return self._places[lane, level]

    def _args(self, lane: Lane, kind: int, correlation: int, nbytes: int, arg: int) -> bytes:
        """The event's arguments as they came, with what columns and lanes know and they do not say."""
        store = self.trace.store
        raw = bytes(store.blob[store.offsets[arg] : store.offsets[arg + 1]]) if arg >= 0 else b"{}"
        if self.renumbered is not None and b"corr" in raw:
            raw = self.renumbered(raw, lane, correlation)
        added = []
        if correlation >= 0 and not _has(raw, b"correlation"):
            added.append(b'"correlation":%d' % correlation)
        if nbytes >= 0 and kind in _COPIES and not any(_has(raw, key) for key in (b"bytes", b"Bytes", b"nbytes")):
            added.append(b'"bytes":%d' % nbytes)
        if lane.device >= 0 and lane.process != str(lane.device) and not _has(raw, b"device"):
            added.append(b'"device":%d' % lane.device)
        if lane.stream >= 0 and lane.thread != str(lane.stream) and not _has(raw, b"stream"):
            added.append(b'"stream":%d' % lane.stream)
        if raw != b"{}":
            added.append(raw[1:-1])
        return b',"args":{%s}' % b",".join(added) if added else b""

    # -- arrows

    def arrows(self) -> Iterator[list[bytes]]:
        """From each launch to the first piece of its device work."""
        trace = self.trace
        launch = links(trace).launch
        work = np.flatnonzero(launch >= 0)
        calls, first = np.unique(launch[work], return_index=True)
        work = work[first]
        for begin in range(0, len(calls), PIECE):
            piece = []
            pairs = zip(calls[begin : begin + PIECE].tolist(), work[begin : begin + PIECE].tolist(), strict=True)
            for number, (call, target) in enumerate(pairs, begin):
                piece.append(self._arrow(b'"s"', number, call))
                piece.append(self._arrow(b'"f","bp":"e"', number, target))
            yield piece

    def _arrow(self, what: bytes, number: int, event: int) -> bytes:
        place = self._place(int(self.trace.lane[event]), int(self.level[event]))
        time = _us(int(self.trace.start[event]) + self.shift)
        return b'{"ph":%s,"id":%d,%s,"cat":"ac2g","name":"ac2g","ts":%s}' % (what, number, place, time)


def _has(raw: bytes, key: bytes) -> bool:
    """Whether a JSON object has a key at its top."""
    if b'"%s":' % key not in raw:
        return False
    if raw.count(b"{") == 1 and b"\\" not in raw:
        return True  # then it can be nothing else
    import orjson

    return key.decode() in orjson.loads(raw)
