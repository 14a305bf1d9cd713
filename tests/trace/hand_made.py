"""Small traces by hand, in whole microseconds: what each engineer of analyses needs to write a literal expectation."""

from __future__ import annotations

import json
from typing import Any

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import Lane, Trace, TraceInfo

US = 1000
MAIN = Lane("10", "10")
OTHER = Lane("10", "11")


def stream(number: int, device: int = 0) -> Lane:
    """The lane of a stream."""
    return Lane(f"GPU {device}", f"stream {number}", "stream", device, number)


class HandMade:
    """Each call adds one event that starts at ``at`` and takes ``us`` microseconds, on ``lane``."""

    def __init__(self, producer: str = "kineto", **info: Any) -> None:
        self.builder = TraceBuilder()
        self.info = TraceInfo(producer, "hand-made", **info)
        self.add(0, 0, "origin", "instant", MAIN)  # so that time 0 is 0

    def add(self, at: float, us: float, name: str, kind: str, lane: Lane, link: int = -1, **args: Any) -> HandMade:
        """Any event."""
        arg = self.builder.arg(json.dumps(args).encode()) if args else -1
        self.builder.add(round(at * US), round(us * US), name, kind, lane, correlation=link, arg=arg)
        return self

    def frame(self, at: float, us: float, name: str, lane: Lane = MAIN) -> HandMade:
        """A Python frame."""
        return self.add(at, us, name, "python", lane)

    def op(self, at: float, us: float, name: str, lane: Lane = MAIN) -> HandMade:
        """An operator."""
        return self.add(at, us, name, "op", lane)

    def call(self, at: float, us: float, name: str, link: int = -1, lane: Lane = MAIN) -> HandMade:
        """A call of the runtime."""
        return self.add(at, us, name, "runtime", lane, link)

    def kernel(self, at: float, us: float, name: str = "k", link: int = -1, on: int = 7, device: int = 0) -> HandMade:
        """A kernel on a stream."""
        return self.add(at, us, name, "kernel", stream(on, device), link)

    def copy(self, at: float, us: float, ends: str, link: int = -1, on: int = 7) -> HandMade:
        """A copy; ``ends`` as in ``HtoD (Pageable -> Device)``."""
        return self.add(at, us, f"Memcpy {ends}", "memcpy", stream(on), link)

    def record(self, at: float, us: float, name: str, link: int, on: int = -1, **args: Any) -> HandMade:
        """A synchronisation record of the profiler."""
        return self.add(at, us, name, "sync", Lane("GPU 0", "waits", "other", 0, on), link, stream=on, **args)

    def overhead(self, at: float, us: float, name: str = "Activity Buffer Request") -> HandMade:
        """The profiler's own time."""
        return self.add(at, us, name, "overhead", Lane("-1", "0"))

    def step(self, at: float, us: float, number: int) -> HandMade:
        """A step's range."""
        return self.add(at, us, f"mrv2lab.step#{number}", "annotation", MAIN)

    def build(self) -> Trace:
        """The trace."""
        return self.builder.build(self.info)


class Marks(HandMade):
    """Marks of ours, as ``from_recording`` spells them, one at a time in whole microseconds."""

    def __init__(self, **info: Any) -> None:
        super().__init__("recording", **info)
        self.link = 0

    def mark(
        self, at: float, mark: str, name: str, on: str = "main", waited: float = 0, device: Any = None, **args: Any
    ) -> Marks:
        """A mark made at ``at``; ``waited`` before it; ``device``: start and end of its work."""
        kind = {"synchronize": "sync", "implicit_sync": "sync", "queue_full": "sync", "wait_event": "sync"}
        link, said = -1, {"mark": mark, "stream": on, **args}
        if device:
            self.link = link = self.link + 1
            work = {"h2d": "memcpy", "d2h": "memcpy"}.get(mark, "kernel")
            lane = Lane("mrv2", on, "stream", 0, ["main", "copy"].index(on))
            self.add(device[0], device[1] - device[0], name, work, lane, link, **said)
        of_host = kind.get(mark, "event" if mark == "record" else "runtime")
        self.add(at - waited, waited, name, of_host, Lane("mrv2", "host calls"), link, **said)
        return self
