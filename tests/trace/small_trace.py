"""A few events by hand, in ns, for tests with literal expectations."""

from __future__ import annotations

from typing import Any

import orjson

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import Lane, Trace, TraceInfo


class SmallTrace:
    """``small.launch(...)`` and the like add events; ``small.build()`` makes the Trace. The first event should start at
    0, for a Trace counts from there."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self._correlation = 0

    def host(
        self, start: int, end: int, name: str, kind: str = "python", thread: str = "1", process: str = "p", **args: Any
    ) -> None:
        arg = self.builder.arg(orjson.dumps(args)) if args else -1
        self.builder.add(start, end - start, name, kind, Lane(process, thread), arg=arg)

    def step(self, start: int, end: int, name: str = "ProfilerStep#1", thread: str = "1", process: str = "p") -> None:
        self.host(start, end, name, "annotation", thread, process)

    def call(
        self,
        start: int,
        end: int,
        api: str = "cudaLaunchKernel",
        thread: str = "1",
        process: str = "p",
        correlation: int = -1,
    ) -> int:
        """A call of the runtime; returns its correlation id, a fresh one unless given."""
        if correlation < 0:
            self._correlation += 1
            correlation = self._correlation
        self.builder.add(start, end - start, api, "runtime", Lane(process, thread), correlation=correlation)
        return correlation

    def work(
        self,
        start: int,
        end: int,
        name: str = "kernel",
        kind: str = "kernel",
        *,
        correlation: int = -1,
        stream: int = 7,
        device: int = 0,
        nbytes: int = -1,
        **args: Any,
    ) -> None:
        lane = Lane(f"GPU {device}", f"stream {stream}", "stream", device, stream)
        arg = self.builder.arg(orjson.dumps(args)) if args else -1
        self.builder.add(start, end - start, name, kind, lane, correlation=correlation, nbytes=nbytes, arg=arg)

    def launch(self, call: tuple[int, int], work: tuple[int, int], name: str = "kernel", **options: Any) -> int:
        """A call and the work that it launched: (start, end) each. ``api``, ``thread``, ``process`` go to the call."""
        of_call = {key: options.pop(key) for key in ("api", "thread", "process") if key in options}
        correlation = self.call(*call, **of_call)
        self.work(*work, name, correlation=correlation, **options)
        return correlation

    def build(self, **info: Any) -> Trace:
        return self.builder.build(TraceInfo(**({"producer": "kineto", "title": "small"} | info)))
