"""A real GPU: CUDA streams, events and graphs, page-locked memory, compiled Triton kernels."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from mrv2lab.runtime.effects import Effects, GraphMemoryError
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


class _Using:
    """A context of one stream: every step enters one, and a generator's costs three times as much."""

    __slots__ = ("before", "rt", "stream")

    def __init__(self, rt: CudaRuntime, stream: CudaStream) -> None:
        self.rt = rt
        self.stream = stream

    def __enter__(self) -> None:
        self.before = self.rt.current
        self.rt.current = self.stream
        torch.cuda.set_stream(self.stream.cuda)

    def __exit__(self, *error: object) -> None:
        self.rt.current = self.before
        torch.cuda.set_stream(self.before.cuda)


CAPTURE = "capture of graph "


class CudaGraph(Graph):
    """``torch.cuda.CUDAGraph``. Kernels must have been compiled by a run before the capture."""

    def __init__(self, rt: CudaRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.effects = Effects()
        self.held = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        rt.graphs.add(self)

    @property
    def is_captured(self) -> bool:
        """Whether there is anything to replay."""
        return self._graph is not None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`. Unlike ``torch.cuda.graph`` it neither waits nor empties the allocator's caches:
        a piecewise capture is some thousand captures, and both are the manager's to do once."""
        rt, before = self.rt, self.rt.current
        if rt.capturing is not None:
            raise RuntimeError(f"{CAPTURE}{rt.capturing.name!r} is going on already")
        self.reset()
        if not any(one.is_captured for one in rt.graphs):
            # The allocator refuses a pool that all its graphs have left but cuBLAS's workspace has not.
            rt.graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()  # an instance holds one capture
        free = torch.cuda.mem_get_info(rt.device)[0]
        try:
            with torch.cuda.stream(rt.graph_stream):
                # A thread that only waits for an event (an output's, say) must not break the capture.
                graph.capture_begin(pool=rt.graph_pool, capture_error_mode="thread_local")
                rt.capturing, rt.current = self, CudaStream(rt, f"{CAPTURE}{self.name!r}", rt.graph_stream)
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):  # the capture may be invalid, which its end says again
                        graph.capture_end()
                    raise
                finally:
                    rt.capturing, rt.current = None, before
                graph.capture_end()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                raise GraphMemoryError(f"graph {self.name!r}: {str(error).splitlines()[0]}") from error
            raise
        self._graph = graph
        self.held = max(0, free - torch.cuda.mem_get_info(rt.device)[0])

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        if self._graph is None:
            raise RuntimeError(f"graph {self.name!r} is empty: capture it before the first replay")
        self._graph.replay()
        if self.rt.observer.enabled:
            self.rt._mark_replay(self)

    def reset(self) -> None:
        """See :meth:`Graph.reset`. The pool keeps what its other graphs use."""
        self._graph = None
        self.effects = Effects()
        self.held = 0


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
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self.graph_stream = torch.cuda.Stream(device=self.device)
        """Every capture's: the allocator's pool and cuBLAS's workspace go by stream."""
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

    def trim(self) -> None:
        """See :meth:`Runtime.trim`."""
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()

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
        """See :meth:`Runtime.active`. Entering a stream that is the thread's already would cost each step 40 us."""
        here = torch.cuda.current_device() == self.device.index
        if here and torch.cuda.current_stream(self.device) == self.main.cuda:
            return nullcontext()
        return torch.cuda.stream(self.main.cuda)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """See :meth:`Runtime.use`."""
        assert isinstance(stream, CudaStream)
        return _Using(self, stream)

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
        op.start(args)
        if self.capturing is not None:
            self._note_captured(args, op)
        if self.observer.enabled:
            self._mark_launch("kernel", op.name, args, op)

    def run(self, name: str, *args: Any, reads: Tensors = (), writes: Tensors = ()) -> None:
        """See :meth:`Runtime.run`."""
        if self.segments is not None and self.segments.plays(name):
            return
        self.function(name)(*args)
        if self.capturing is not None:
            self._note_captured(args, (reads, writes))
        if self.observer.enabled:
            self._mark_launch("run", name, args, (reads, writes))

    def _copy(self, kind: str, dst: torch.Tensor, src: torch.Tensor, device: torch.Tensor, host: torch.Tensor) -> None:
        if not device.is_cuda or host.is_cuda:
            raise PlaceError(f"{kind} needs one device and one host tensor, at {call_site()}")
        check_copy(kind, dst, src)
        if dst.shape == src.shape:
            dst.copy_(src, non_blocking=True)
        else:
            dst.view(-1).copy_(src.view(-1), non_blocking=True)
        if self.capturing is not None:
            self._note_captured((dst, src), ((src,), (dst,)))
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
        self.segments = None
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
