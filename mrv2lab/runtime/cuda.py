"""A real GPU: CUDA streams, events and graphs, page-locked memory, compiled Triton kernels."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mrv2lab.observer import NULL_OBSERVER, Mark, Observer
from mrv2lab.protocol import Launchable
from mrv2lab.runtime.base import (
    Event,
    Graph,
    PlaceError,
    Runtime,
    Shape,
    Stream,
    Tensors,
    call_site,
    check_copy,
)
from mrv2lab.runtime.places import Place
from mrv2lab.runtime.stamps import CudaStamps


class CudaStream(Stream):
    """A ``torch.cuda.Stream`` with a name."""

    def __init__(self, rt: CudaRuntime, name: str, stream: torch.cuda.Stream) -> None:
        self.rt = rt
        self.name = name
        self.cuda = stream

    def wait_event(self, event: Event) -> None:
        """See :meth:`Stream.wait_event`."""
        assert isinstance(event, CudaEvent)
        self.cuda.wait_event(event.cuda)
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("wait_event", event.name, self.name, site=self.rt.site()))

    def synchronize(self) -> None:
        """See :meth:`Stream.synchronize`."""
        with self.rt.waiting(self.name, self.name):
            self.cuda.synchronize()


class CudaEvent(Event):
    """A ``torch.cuda.Event`` whose wait sleeps."""

    def __init__(self, rt: CudaRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.cuda = torch.cuda.Event(blocking=True)
        self._stream: str | None = None

    def record(self, stream: Stream | None = None) -> None:
        """See :meth:`Event.record`."""
        target = stream if stream is not None else self.rt.current
        assert isinstance(target, CudaStream)
        self.cuda.record(target.cuda)
        self._stream = target.name
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("record", self.name, target.name, site=self.rt.site()))

    def query(self) -> bool:
        """See :meth:`Event.query`."""
        return bool(self.cuda.query())

    def synchronize(self) -> None:
        """See :meth:`Event.synchronize`."""
        if self._stream is not None:
            with self.rt.waiting(self.name, self._stream):
                self.cuda.synchronize()


CAPTURE = "capture of graph "


class CudaGraph(Graph):
    """``torch.cuda.CUDAGraph``. Kernels must have been compiled by a run before the capture."""

    def __init__(self, rt: CudaRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.cuda = torch.cuda.CUDAGraph()
        self._captured = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`."""
        before = self.rt.current
        if before.name.startswith(CAPTURE):
            raise RuntimeError(f"{before.name} is going on already")
        self.cuda = torch.cuda.CUDAGraph()  # an instance holds one capture
        self._captured = False
        with torch.cuda.graph(self.cuda, pool=self.rt.graph_pool):
            self.rt.current = CudaStream(self.rt, f"{CAPTURE}{self.name!r}", torch.cuda.current_stream())
            try:
                yield
            finally:
                self.rt.current = before
        self._captured = True

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        if not self._captured:
            raise RuntimeError(f"graph {self.name!r} is empty: capture it before the first replay")
        self.cuda.replay()
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("replay", self.name, self.rt.current.name, site=self.rt.site()))


class CudaRuntime(Runtime):
    """See the module's docstring. Work goes to torch's current stream at construction (``main``) unless ``use`` says
    otherwise."""

    def __init__(self, *, index: int = 0, observer: Observer = NULL_OBSERVER) -> None:
        super().__init__(observer)
        self.device = torch.device("cuda", index)
        self.backend = "triton"
        torch.cuda.set_device(self.device)
        self.main: CudaStream = CudaStream(self, "main", torch.cuda.current_stream())
        self.copy: CudaStream = self.stream("copy")
        self.current: CudaStream = self.main
        self.graph_pool = torch.cuda.graph_pool_handle()
        self._syncs: list[str] | None = None

    # -- memory --------------------------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        """See :meth:`Runtime.empty`. Pinned memory comes from PyTorch's caching host allocator."""
        if place == "device":
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            tensor = torch.empty(shape, dtype=dtype, pin_memory=place != "host")
        # Unobserved, a temporary's name would cost more than the temporary.
        if self.observer.enabled or not name.endswith(".tmp"):
            self.registry.add(tensor, name, Place(place))
        return tensor

    def adopt(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """See :meth:`Runtime.adopt`."""
        made = tensor.detach().to(self.device)
        self.registry.add(made, name, Place.DEVICE)
        return made

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Runtime.raw`."""
        return tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Runtime.read`."""
        self.synchronize()
        return tensor.cpu() if tensor.is_cuda else tensor.clone()

    # -- streams -------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> CudaStream:
        """See :meth:`Runtime.stream`."""
        return CudaStream(self, name, torch.cuda.Stream(device=self.device))

    def event(self, name: str) -> CudaEvent:
        """See :meth:`Runtime.event`."""
        return CudaEvent(self, name)

    now = staticmethod(time.perf_counter_ns)

    def stamps(self) -> CudaStamps:
        """See :meth:`Runtime.stamps`."""
        return CudaStamps(self)

    def active(self) -> AbstractContextManager[Any]:
        """See :meth:`Runtime.active`."""
        return torch.cuda.stream(self.main.cuda)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """See :meth:`Runtime.use`."""
        assert isinstance(stream, CudaStream)
        before, self.current = self.current, stream
        torch.cuda.set_stream(stream.cuda)
        try:
            yield
        finally:
            self.current = before
            torch.cuda.set_stream(before.cuda)

    def graph(self, name: str) -> CudaGraph:
        """See :meth:`Runtime.graph`."""
        return CudaGraph(self, name)

    @contextmanager
    def waiting(self, name: str, stream: str) -> Iterator[None]:
        """Around a host wait: marks it with its time."""
        if not self.observer.enabled:
            yield
            return
        start = time.perf_counter_ns()
        yield
        self.observer.mark(Mark("synchronize", name, stream, wait_ns=time.perf_counter_ns() - start, site=self.site()))

    # -- chokepoints ---------------------------------------------------------------------------------------------------

    def kernel(self, op: Launchable, *args: Any) -> None:
        """See :meth:`Runtime.kernel`."""
        op.launch(op.kernel.load(), *args)
        if self.observer.enabled:
            self._mark_launch("kernel", op.name, args, op)

    def run(self, name: str, *args: Any, reads: Tensors = (), writes: Tensors = ()) -> None:
        """See :meth:`Runtime.run`."""
        self.function(name)(*args)
        if self.observer.enabled:
            self._mark_launch("run", name, args, (reads, writes))

    def _copy(self, kind: str, dst: torch.Tensor, src: torch.Tensor, device: torch.Tensor, host: torch.Tensor) -> None:
        if not device.is_cuda or host.is_cuda:
            raise PlaceError(f"{kind} needs one device and one host tensor, at {call_site()}")
        check_copy(kind, dst, src)
        to, source = (dst, src) if dst.shape == src.shape else (dst.view(-1), src.view(-1))
        to.copy_(source, non_blocking=True)
        if self.observer.enabled:
            nbytes = src.numel() * src.element_size()
            self._mark(kind, self.registry.name(host), nbytes, self._names((src,)), self._names((dst,)))
        if (self.observer.enabled or self._syncs is not None) and host.numel() and not host.is_pinned():
            self._note_sync(f"pageable {kind}", self.registry.name(device))

    def _note_sync(self, what: str, buffer: str = "") -> None:
        site = call_site()
        if self._syncs is not None:
            self._syncs.append(f"{what} on {buffer!r} at {site}" if buffer else f"{what} at {site}")
        if self.observer.enabled:
            reads = (buffer,) if buffer else ()
            self.observer.mark(Mark("implicit_sync", what, self.current.name, 0, reads, site=site))

    # -- steps and ends ------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """See :meth:`Runtime.end_step`. A real device needs no telling."""

    def synchronize(self) -> None:
        """See :meth:`Runtime.synchronize`."""
        with self.waiting("device", ""):
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """See :meth:`Runtime.reset`: CUDA cannot drop queued work, so it is waited for."""
        self.current = self.main
        torch.cuda.set_stream(self.main.cuda)
        torch.cuda.synchronize(self.device)

    @contextmanager
    def watch_syncs(self) -> Iterator[list[str]]:
        """See :meth:`Runtime.watch_syncs`: torch's sync debug mode, whose warnings become lines (and marks)."""
        seen: list[str] = []
        outer, self._syncs = self._syncs, seen
        before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

        def note(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._note_sync(str(message))
            elif "debug mode is a prototype" not in str(message):
                show(message, *args, **kwargs)

        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield seen
            finally:
                torch.cuda.set_sync_debug_mode(before)
                self._syncs = outer
