"""The CPU-only machine as a first-class device: software streams, distinct places of memory, seen syncs."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mrv2lab.observer import NULL_OBSERVER, Mark, Observer
from mrv2lab.protocol import Backend, Launchable
from mrv2lab.runtime.base import PlaceError, Runtime, Shape, Stream, Tensors, call_site, check_copy, tensor_bytes
from mrv2lab.runtime.clock import CostModel, VirtualClock
from mrv2lab.runtime.device_tensor import DeviceTensor, own, plain
from mrv2lab.runtime.places import Place
from mrv2lab.runtime.software import DeferredStream, Record, SoftwareEvent, SoftwareStream, ThreadedStream
from mrv2lab.runtime.stamps import SoftwareStamps
from mrv2lab.runtime.tape import Tape

_POISON_FLOAT = float("nan")
_POISON_INT = -0x5EED
"""What untouched device storage holds."""

LAZY_BYTES = 1 << 20
ALIGNMENT = 64
"""Of tensors that torch allocates, in bytes."""

STREAMS: dict[str, type[DeferredStream] | type[ThreadedStream]] = {
    "deferred": DeferredStream,
    "threaded": ThreadedStream,
}


class CpuRuntime(Runtime):
    """See the module's docstring.

    ``stream`` is ``"deferred"`` or ``"threaded"``. ``lag`` counts steps by which a deferred device trails the host:
    None until a wait needs the work, 0 at once. ``backend`` is ``"spec"``, or ``"interpret"`` for Triton's interpreter.
    """

    def __init__(
        self,
        *,
        stream: str = "deferred",
        lag: int | None = None,
        backend: Backend = "spec",
        threads: int | None = None,
        observer: Observer = NULL_OBSERVER,
        costs: CostModel | None = None,
    ) -> None:
        super().__init__(observer)
        if backend == "triton":
            raise ValueError("compiled Triton kernels need a GPU; on a CPU use 'spec' or 'interpret'")
        if stream not in STREAMS:
            raise ValueError(f"stream must be one of {tuple(STREAMS)}, got {stream!r}")
        self.device = torch.device("cpu")
        self.backend = backend
        self.threads = threads
        """OpenMP threads of queued work, None = as torch is set. Set it before the first launch."""
        self.lag = lag if stream == "deferred" else None
        self.clock = VirtualClock()
        self.costs = costs or CostModel()
        self._kind = STREAMS[stream]
        self._owner = weakref.ref(self)
        self._streams: list[SoftwareStream] = []
        self.capturing: Tape | None = None
        self.graph_limit: int | None = None
        """Bytes that all tapes together may hold; None = any. A capture beyond it runs out of memory, for lessons."""
        self.tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self._steps: deque[tuple[int, ...]] = deque()
        self._syncs: list[str] | None = None
        self.main: SoftwareStream = self.stream("main")
        self.copy: SoftwareStream = self.stream("copy")
        self.current: SoftwareStream = self.main

    # -- memory --------------------------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        """See :meth:`Runtime.empty`. Device storage is poisoned, so that a read before the first write shows."""
        tensor = torch.empty(shape, dtype=dtype)
        if place == "device":
            tensor.fill_(_POISON_FLOAT if dtype.is_floating_point else _POISON_INT if dtype.itemsize > 1 else 1)
        self.registry.add(tensor, name, Place(place))
        return own(tensor, self._owner) if place == "device" else tensor

    def zeros(self, shape: Shape, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        """See :meth:`Runtime.zeros`. A large one takes memory only where it is written: a KV cache of gigabytes costs
        what its used blocks hold."""
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes < LAZY_BYTES:
            return super().zeros(shape, dtype, name=name, place=place)
        # From NumPy, which asks the operating system for zeroed pages; torch.zeros writes them.
        room = np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        tensor = torch.from_numpy(room[start : start + nbytes]).view(dtype).view(size)
        self.registry.add(tensor, name, Place(place))
        return own(tensor, self._owner) if place == "device" else tensor

    def adopt(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """See :meth:`Runtime.adopt`. The bytes are shared with the caller, not copied."""
        tensor = self.raw(tensor).detach()
        self.registry.add(tensor, name, Place.DEVICE)
        return own(tensor, self._owner)

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Runtime.raw`."""
        made: torch.Tensor = plain(tensor)
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Runtime.read`."""
        self.synchronize()
        return self.raw(tensor).clone()

    def implicit_sync(self, what: str, tensor: torch.Tensor) -> None:
        """The host is about to read device storage: drain the current stream as CUDA would, and say so."""
        before, site, name = self.clock.now(), call_site(), self.registry.name(tensor)
        self._refuse_capture(f"{what} on {name!r}", site)
        self.current.wait(self.current.queued)
        self._note_sync(what, name, before, site)

    def _refuse_capture(self, what: str, site: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(
                f"{what} at {site} would wait for work of graph {self.capturing.name!r}, which is being captured, "
                "not run"
            )

    def _note_sync(self, what: str, buffer: str, since_ns: int, site: str) -> None:
        if self._syncs is not None:
            self._syncs.append(f"{what} on {buffer!r} at {site}")
        if self.observer.enabled:
            waited = self.clock.now() - since_ns
            self.observer.mark(Mark("implicit_sync", what, self.current.name, 0, (buffer,), (), max(0, waited), site))

    # -- streams -------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> SoftwareStream:
        """See :meth:`Runtime.stream`."""
        made = self._kind(self, name)
        self._streams.append(made)
        return made

    def event(self, name: str) -> SoftwareEvent:
        """See :meth:`Runtime.event`."""
        return SoftwareEvent(self, name)

    def now(self) -> int:
        """See :meth:`Runtime.now`."""
        return self.clock.now()

    def stamps(self) -> SoftwareStamps:
        """See :meth:`Runtime.stamps`."""
        return SoftwareStamps(self)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """See :meth:`Runtime.use`."""
        assert isinstance(stream, SoftwareStream)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph(self, name: str) -> Tape:
        """See :meth:`Runtime.graph`."""
        return Tape(self, name)

    def launch(self, record: Record) -> None:
        """Queue a record, or lay it on the tape that is being captured."""
        if self.capturing is not None:
            self.capturing.lay(record)
        else:
            self.current.enqueue(record)
            self.current.last = record

    @contextmanager
    def taping(self, tape: Tape) -> Iterator[None]:
        """Launches inside the ``with`` go to ``tape``."""
        if self.capturing is not None:
            raise RuntimeError(f"graph {self.capturing.name!r} is being captured already")
        self.capturing = tape
        try:
            yield
        finally:
            self.capturing = None

    # -- chokepoints ---------------------------------------------------------------------------------------------------

    def kernel(self, op: Launchable, *args: Any) -> None:
        """See :meth:`Runtime.kernel`."""
        captured = tuple(self._capture(op.name, arg) for arg in args)
        nbytes = tensor_bytes(captured)
        self.launch(Record("kernel", op.name, op.execute, (self.backend, captured), nbytes, call_site()))
        if self.capturing is not None:
            self._note_captured(captured, op)
        if self.observer.enabled:
            self._mark_launch("kernel", op.name, captured, op)

    def run(self, name: str, *args: Any, reads: Tensors = (), writes: Tensors = ()) -> None:
        """See :meth:`Runtime.run`."""
        if self.segments is not None and self.segments.plays(name):
            return
        captured = tuple(self._capture(name, arg) for arg in args)
        nbytes = tensor_bytes(captured)
        self.launch(Record("run", name, self.function(name), captured, nbytes, call_site()))
        if self.capturing is not None:
            self._note_captured(captured, (reads, writes))
        if self.observer.enabled:
            self._mark_launch("run", name, captured, (reads, writes))

    def publish(self, slot: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        """See :meth:`Runtime.publish`."""
        if type(slot) is DeviceTensor:
            raise PlaceError(f"publish into device buffer {self.registry.name(slot)!r} at {call_site()}; use rt.h2d")
        super().publish(slot, values)

    def _copy(self, kind: str, dst: torch.Tensor, src: torch.Tensor, device: torch.Tensor, host: torch.Tensor) -> None:
        if type(device) is not DeviceTensor or type(host) is DeviceTensor:
            raise PlaceError(f"{kind} needs one device and one host tensor, at {call_site()}")
        check_copy(kind, dst, src)
        to, source = plain(dst), plain(src)
        buffer = self.registry.find(host)
        pageable = buffer is None or buffer.place is Place.HOST
        if pageable:
            self._refuse_capture(f"pageable {kind}", call_site())
        before = self.clock.now()
        nbytes = source.numel() * source.element_size()
        reads = (host.untyped_storage().data_ptr(),) if kind == "h2d" else ()
        self.launch(Record(kind, self.registry.name(host), _copy_now, (to, source), nbytes, call_site(), reads))
        if self.capturing is not None:
            self._note_captured((dst, src), ((src,), (dst,)))
        if self.observer.enabled:
            self._mark(kind, self.registry.name(host), nbytes, self._names((src,)), self._names((dst,)))
        if pageable:  # the driver must be done with pageable memory before it returns
            self.current.wait(self.current.queued)
            self._note_sync(f"pageable {kind}", self.registry.name(device), before, call_site())

    def _capture(self, what: str, arg: Any) -> Any:
        """An argument as the queue keeps it: scalars by value, device, pinned and uva tensors by reference."""
        kind = type(arg)
        if kind is DeviceTensor:
            return arg.plain
        if kind is tuple:
            return tuple(self._capture(what, one) for one in arg)
        if isinstance(arg, torch.Tensor):
            buffer = self.registry.find(arg)
            if buffer is None or buffer.place is Place.HOST:
                raise PlaceError(
                    f"{what}: a pageable host tensor reaches the device at {call_site()}; copy it with rt.h2d from a "
                    "pinned buffer, or allocate it with place='uva'"
                )
        elif not isinstance(arg, (int, float, bool, str, torch.dtype, type(None))):
            raise PlaceError(f"{what}: {kind.__name__} cannot be queued, only tensors and scalars, at {call_site()}")
        return arg

    # -- steps and ends ------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """See :meth:`Runtime.end_step`."""
        if self.lag is None:
            return
        self._steps.append(tuple(stream.queued for stream in self._streams))
        if len(self._steps) > self.lag:
            for stream, position in zip(self._streams, self._steps.popleft(), strict=False):
                assert isinstance(stream, DeferredStream)
                stream.advance(position)

    def synchronize(self) -> None:
        """See :meth:`Runtime.synchronize`."""
        for stream in self._streams:
            stream.synchronize()

    def reset(self) -> None:
        """See :meth:`Runtime.reset`."""
        for stream in self._streams:
            stream.drop()
        self._steps.clear()
        self.capturing = self.segments = None
        self.current = self.main

    def close(self) -> None:
        """See :meth:`Runtime.close`."""
        for stream in self._streams:
            if isinstance(stream, ThreadedStream):
                stream.stop()

    @contextmanager
    def watch_syncs(self) -> Iterator[list[str]]:
        """See :meth:`Runtime.watch_syncs`."""
        before, self._syncs = self._syncs, []
        seen = self._syncs
        try:
            yield seen
        finally:
            self._syncs = before


def _copy_now(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.view(-1).copy_(src.view(-1))
