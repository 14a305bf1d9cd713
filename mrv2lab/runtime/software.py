"""Software streams: a device for machines without one, and an asynchronous one.

*Deferred* (the default): a queued record runs only when a wait needs it, and a wait runs exactly the prefix of each
stream that its event depends on. So the host is always as far ahead as it can be, and a race that a fast host would
hit now and then is hit always. *Threaded*: one worker a stream; real concurrency, real races, no meaningful times.
"""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mrv2lab.observer import Mark
from mrv2lab.runtime.base import DeviceError, Event, Stream, inference

if TYPE_CHECKING:
    from mrv2lab.runtime.cpu import CpuRuntime

MAX_QUEUED = 4096
"""Launches a stream holds before the host blocks."""


@dataclass(slots=True)
class Record:
    """One queued launch: a name, a function and captured arguments; no closure, so a tape can hold it as well."""

    kind: str
    name: str
    fn: Callable[..., None]
    args: tuple[Any, ...]
    nbytes: int
    site: str
    reads: tuple[int, ...] = ()
    """Host storages (addresses) that the record reads when it runs; for hazard detection."""
    start_ns: int = 0
    end_ns: int = 0
    """Modelled device time, set when the record has run."""


@dataclass(slots=True)
class _Wait:
    """In a stream's queue: later work waits for this point of another stream."""

    stream: SoftwareStream
    position: int


class SoftwareEvent(Event):
    """A (stream, position) pair; ``synchronize`` needs that stream's prefix up to it and nothing else."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.stream: SoftwareStream | None = None
        self.position = 0

    def record(self, stream: Stream | None = None) -> None:
        """See :meth:`Event.record`."""
        target = stream if stream is not None else self.rt.current
        assert isinstance(target, SoftwareStream)
        self.stream = target
        self.position = target.queued
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("record", self.name, target.name, site=self.rt.site()))

    def query(self) -> bool:
        """See :meth:`Event.query`."""
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        """See :meth:`Event.synchronize`."""
        if self.stream is not None:
            waited = self.stream.wait(self.position)
            if self.rt.observer.enabled:
                self.rt.observer.mark(
                    Mark("synchronize", self.name, self.stream.name, wait_ns=waited, site=self.rt.site())
                )


class SoftwareStream(Stream):
    """The part that deferred and threaded streams share: counting, marks, poison and modelled time."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.queued = 0
        self.done = 0
        self.free_at_ns = 0
        self.ends_ns: deque[int] = deque(maxlen=2 * MAX_QUEUED)
        """Modelled ends of the latest items, in order."""
        self.poison: DeviceError | None = None
        self.last: Record | None = None
        """The latest record that was queued."""

    @abstractmethod
    def enqueue(self, item: Record | _Wait) -> None:
        """Take one record, at the end."""

    @abstractmethod
    def wait(self, position: int) -> int:
        """Block until ``position`` items are done; returns the waited (modelled or real) nanoseconds."""

    @abstractmethod
    def drop(self) -> None:
        """Forget what is queued, and the poison."""

    def wait_event(self, event: Event) -> None:
        """See :meth:`Stream.wait_event`."""
        assert isinstance(event, SoftwareEvent)
        if event.stream is not None:
            self.enqueue(_Wait(event.stream, event.position))
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("wait_event", event.name, self.name, site=self.rt.site()))

    def synchronize(self) -> None:
        """See :meth:`Stream.synchronize`."""
        waited = self.wait(self.queued)
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("synchronize", self.name, self.name, wait_ns=waited, site=self.rt.site()))

    def check(self) -> None:
        """Raise the poison, if any."""
        if self.poison is not None:
            raise self.poison.with_traceback(None)

    def execute(self, record: Record, after_ns: int) -> None:
        """Run a record and give it modelled times; work that raises poisons the stream."""
        try:
            record.fn(*record.args)
        except BaseException as error:  # also when a notebook's stop button hits the work
            notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
            self.poison = DeviceError(
                f"{record.kind} {record.name!r}, launched at {record.site}, raised "
                f"{type(error).__name__}{f': {error}' if str(error) else ''}{notes}. The stream is poisoned; "
                "engine.reset() (or rt.reset()) clears it"
            )
            self.poison.__cause__ = error
            if isinstance(error, KeyboardInterrupt):
                raise
        record.args = ()  # whoever keeps the record for its times must not keep the buffers
        record.start_ns = max(self.free_at_ns, after_ns)
        is_copy = record.kind in ("h2d", "d2h")
        cost = self.rt.costs.copy_ns(record.nbytes) if is_copy else self.rt.costs.kernel_ns(record.nbytes)
        record.end_ns = self.free_at_ns = record.start_ns + cost


class DeferredStream(SoftwareStream):
    """Runs nothing until a wait, the lag or a full queue needs it."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        super().__init__(rt, name)
        self._queue: deque[tuple[Record | _Wait, int]] = deque()

    def enqueue(self, item: Record | _Wait) -> None:
        """See :meth:`SoftwareStream.enqueue`."""
        if len(self._queue) >= MAX_QUEUED:
            waited = self.wait(self.done + 1)
            if self.rt.observer.enabled:
                self.rt.observer.mark(Mark("queue_full", self.name, self.name, wait_ns=waited, site=self.rt.site()))
        self._queue.append((item, self.rt.clock.now()))
        self.queued += 1
        if self.rt.lag == 0:
            self.advance(self.queued)

    def wait(self, position: int) -> int:
        """See :meth:`SoftwareStream.wait`."""
        self.advance(position)
        self.check()
        return self.rt.clock.wait_until(self.end_of(position))

    def advance(self, position: int) -> None:
        """Run the queue up to ``position``, and first what its waits depend on."""
        if self.done >= position:
            return
        frozen = self.rt.clock.freeze()
        try:
            with inference(self.rt.threads):
                self._advance(position)
        finally:
            if frozen:
                self.rt.clock.thaw()

    def _advance(self, position: int) -> None:
        while self.done < position and self._queue:
            item, enqueued_ns = self._queue.popleft()
            self.done += 1
            if isinstance(item, _Wait):
                other = item.stream
                assert isinstance(other, DeferredStream)
                other._advance(item.position)
                self.free_at_ns = max(self.free_at_ns, enqueued_ns, other.end_of(item.position))
                self.poison = self.poison or other.poison
            elif self.poison is None:
                self.execute(item, enqueued_ns)
            self.ends_ns.append(self.free_at_ns)

    def end_of(self, position: int) -> int:
        """Modelled end of the first ``position`` items; 0 for an empty prefix or one that is long past."""
        behind = self.done - position
        return self.ends_ns[-1 - behind] if 0 <= behind < len(self.ends_ns) else 0

    def drop(self) -> None:
        """See :meth:`SoftwareStream.drop`."""
        self._queue.clear()
        self.done = self.queued
        self.ends_ns.clear()
        self.poison = None


class ThreadedStream(SoftwareStream):
    """A worker thread that runs records in order, as soon as it can."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        super().__init__(rt, name)
        self._queue: queue.SimpleQueue[tuple[Record | _Wait, int] | None] = queue.SimpleQueue()
        self._moved = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=f"mrv2lab-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, item: Record | _Wait) -> None:
        """See :meth:`SoftwareStream.enqueue`. Raises ``RuntimeError`` after :meth:`stop`."""
        if self._stopped:
            raise RuntimeError(f"stream {self.name!r} is closed, and its worker gone; make a new runtime")
        if self.queued - self.done >= MAX_QUEUED:
            waited = self.wait(self.done + 1)
            if self.rt.observer.enabled:
                self.rt.observer.mark(Mark("queue_full", self.name, self.name, wait_ns=waited, site=self.rt.site()))
        self.queued += 1
        self._queue.put((item, self.rt.clock.now()))

    def _work(self) -> None:
        entry = self._queue.get()  # by then rt.threads is settled
        with inference(self.rt.threads):
            while entry is not None:
                item, enqueued_ns = entry
                if isinstance(item, _Wait):
                    assert isinstance(item.stream, ThreadedStream)
                    item.stream._await(item.position)
                    self.poison = self.poison or item.stream.poison
                elif self.poison is None:
                    self.execute(item, enqueued_ns)
                with self._moved:
                    self.done += 1
                    self._moved.notify_all()
                entry = self._queue.get()

    def _await(self, position: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self.done >= position)

    def wait(self, position: int) -> int:
        """See :meth:`SoftwareStream.wait`."""
        start = self.rt.clock.now()
        self._await(position)
        self.check()
        return self.rt.clock.now() - start

    def drop(self) -> None:
        """See :meth:`SoftwareStream.drop`. What the worker has begun is finished first."""
        self.poison = self.poison or DeviceError("reset")
        self._await(self.queued)
        self.poison = None

    def stop(self) -> None:
        """End the worker after what is queued."""
        self._stopped = True
        self._queue.put(None)
        self._thread.join(timeout=10)
