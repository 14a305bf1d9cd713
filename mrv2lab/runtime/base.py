"""Runtime: the only object that knows what machine this is. Constructors take it where vLLM's take ``device``.

Everything the device does passes one of its chokepoints (``kernel``, ``run``, ``h2d``, ``d2h``, ``publish``,
``Graph.replay``, ``Event.record``, ``Stream.wait_event``, ``Event.synchronize``), and there an observer learns of it
without a synchronisation.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch

from mrv2lab.observer import NULL_OBSERVER, Mark, Observer
from mrv2lab.protocol import Backend, Launchable
from mrv2lab.runtime.effects import Effects as GraphEffects
from mrv2lab.runtime.effects import Segments
from mrv2lab.runtime.places import Registry
from mrv2lab.runtime.stamps import Stamps

Tensors = tuple[torch.Tensor, ...]
Shape = int | tuple[int, ...]
Names = tuple[str, ...]
Effects = Launchable | tuple[Tensors, Tensors]


class DeviceError(RuntimeError):
    """Queued work raised; its stream is poisoned until ``reset``. The message names the launch and its call site.

    Software streams only. A CUDA error is raised by torch wherever the host waits next, and after a fatal one (an
    illegal address, say) only a new process helps.
    """


class PlaceError(RuntimeError):
    """A tensor is in a place from which this operation cannot be done."""


class Event(ABC):
    """A point in a stream. Waiting for it waits for exactly what the stream held when it was recorded."""

    name: str

    @abstractmethod
    def record(self, stream: Stream | None = None) -> None:
        """Put the event into ``stream`` (the current one by default)."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the work in front of the event is done. Never waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the work in front of the event is done."""


class Stream(ABC):
    """A queue of device work, in order."""

    name: str

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Later work of this stream waits for ``event``; the host does not."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the stream is empty."""


class Graph(ABC):
    """A recorded sequence of launches over fixed buffers, replayed by one launch."""

    name: str
    effects: GraphEffects
    """What a replay does, as noted by the latest capture."""
    held: int
    """Bytes of memory that the latest capture took (none, where an earlier graph of the pool had left enough)."""

    @abstractmethod
    def capture(self) -> AbstractContextManager[None]:
        """Launches inside the ``with`` are recorded, not run. Raises ``GraphMemoryError`` where memory runs out."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the capture and give its memory back."""

    @abstractmethod
    def replay(self) -> None:
        """Launch the whole sequence on the current stream."""


class Runtime(ABC):
    """Device, kernel backend, streams and observer. See the module's docstring."""

    device: torch.device
    backend: Backend
    main: Stream
    copy: Stream
    current: Stream

    def __init__(self, observer: Observer = NULL_OBSERVER) -> None:
        self.observer = observer
        self.registry = Registry()
        self._effects: dict[tuple[Any, ...], tuple[Names, Names]] = {}
        """(launch, addresses of its tensors) -> names of the buffers it reads and writes."""
        self._effects_of = -1
        """The registry's generation that these names are of."""
        self._functions: dict[str, Callable[..., Any]] = {}
        self.capturing: Graph | None = None
        """The graph that launches are laid into; None = they are queued."""
        self.segments: Segments | None = None
        """Who is asked first whether a segment is to be launched at all."""
        self.h2d_copies = self.h2d_bytes = 0
        """Copies to the device since the last :meth:`gauge_copies`, and their bytes, while an observer listened."""

    # -- memory --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: Shape, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        """A registered buffer with unspecified contents."""

    def zeros(self, shape: Shape, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        """A registered buffer of zeros. For constructors: the fill is not queued work."""
        tensor = self.empty(shape, dtype, name=name, place=place)
        self.raw(tensor).zero_()
        return tensor

    @abstractmethod
    def adopt(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Take a host tensor (a weight) to the device. For constructors."""

    @abstractmethod
    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain torch tensor behind ``tensor``, without any check: for constructors and queued work."""

    @abstractmethod
    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy after everything queued so far: an explicit synchronisation, for looking and tests."""

    def trim(self) -> None:
        """Wait for the device and give back what nobody uses, so that captures find as much memory as can be."""
        self.synchronize()

    # -- streams -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A further stream."""

    @abstractmethod
    def event(self, name: str) -> Event:
        """A new event; its ``synchronize`` sleeps rather than spins."""

    def active(self) -> AbstractContextManager[Any]:
        """Around everything a step launches: work goes to ``main``, whatever device or stream the caller has chosen."""
        return nullcontext()

    @abstractmethod
    def now(self) -> int:
        """The host's clock in nanoseconds: ``perf_counter_ns``, on a software stream without the time that stands in
        for the device."""

    @abstractmethod
    def stamps(self) -> Stamps:
        """A new set of timing points; see :mod:`mrv2lab.runtime.stamps`."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Work inside the ``with`` goes to ``stream``."""

    @abstractmethod
    def graph(self, name: str) -> Graph:
        """A new, empty graph."""

    # -- chokepoints ---------------------------------------------------------------------------------------------------

    def register(self, name: str, fn: Callable[..., Any]) -> None:
        """Bind ``name`` to a segment function, once. ``fn`` reads only its arguments and constants."""
        if name in self._functions:
            raise ValueError(f"{name!r} is registered already; a name is bound once")
        self._functions[name] = fn

    def function(self, name: str) -> Callable[..., Any]:
        """The segment function bound to ``name``."""
        if name not in self._functions:
            raise KeyError(f"no segment is registered as {name!r}; bind it once with rt.register({name!r}, fn)")
        return self._functions[name]

    @abstractmethod
    def kernel(self, op: Launchable, *args: Any) -> None:
        """Launch an op on the current stream. Called by ``Op.__call__``."""

    @abstractmethod
    def run(self, name: str, *args: Any, reads: Tensors = (), writes: Tensors = ()) -> None:
        """Launch the segment bound to ``name`` on the current stream."""

    def h2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy of host memory to the device. From pageable memory it synchronises, as on CUDA."""
        if self.observer.enabled:
            self.h2d_copies += 1
            self.h2d_bytes += src.nbytes
        self._copy("h2d", dst, src, device=dst, host=src)

    def gauge_copies(self) -> None:
        """Tell the observer how many copies, of how many bytes, the host queued to the device in this step."""
        if self.observer.enabled:
            self.observer.gauge("h2d_copies", self.h2d_copies)
            self.observer.gauge("h2d_bytes", self.h2d_bytes)
            self.h2d_copies = self.h2d_bytes = 0

    def d2h(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy of device memory to pinned host memory."""
        self._copy("d2h", dst, src, device=src, host=dst)

    @abstractmethod
    def _copy(self, kind: str, dst: torch.Tensor, src: torch.Tensor, device: torch.Tensor, host: torch.Tensor) -> None:
        """Either of the two; ``device`` and ``host`` are ``dst`` and ``src``, or the other way round."""

    def publish(self, slot: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        """The host writes ``values`` into the first elements of a pinned or UVA buffer, now, without any wait."""
        host = slot.numpy()
        host[: len(values)] = values
        if self.observer.enabled:
            name = self.registry.name(slot)
            nbytes = host[: len(values)].nbytes
            self.observer.mark(Mark("publish", name, "", nbytes, (), (name,), 0, self.site()))

    @abstractmethod
    def end_step(self) -> None:
        """A step's last launch is queued: the unit in which a software stream's lag is counted."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every stream is empty."""

    @abstractmethod
    def reset(self) -> None:
        """Drop queued work and poison. Buffers keep whatever the work done so far left in them."""

    def close(self) -> None:
        """Give back what outlives a garbage collection (worker threads)."""

    @abstractmethod
    def watch_syncs(self) -> AbstractContextManager[list[str]]:
        """Inside the ``with``, implicit synchronisations are collected: one line each, naming operation and caller."""

    # -- marks ---------------------------------------------------------------------------------------------------------

    def _names(self, tensors: Any) -> tuple[str, ...]:
        names: list[str] = []
        for tensor in tensors:
            if isinstance(tensor, tuple):
                names.extend(self._names(tensor))
            elif isinstance(tensor, torch.Tensor):
                names.append(self.registry.name(tensor))
        return tuple(names)

    def _mark(self, kind: str, name: str, nbytes: int, reads: Names, writes: Names) -> None:
        self.observer.mark(Mark(kind, name, self.current.name, nbytes, reads, writes, 0, self.site()))

    def _mark_launch(self, kind: str, name: str, args: tuple[Any, ...], effects: Effects) -> None:
        """Mark a launch; ``effects`` are the op, or the tensors that a segment reads and writes."""
        site = call_site() if self.observer.call_sites else None
        self.observer.launch(partial(self._describe, kind, name, self.current.name, args, effects, site))

    def _describe(
        self, kind: str, name: str, stream: str, args: tuple[Any, ...], effects: Effects, site: str | None
    ) -> Mark:
        """The mark of a launch. The names of the same buffers are looked up once."""
        tensors = _tensors(args)
        key = (name, *map(_address, tensors))
        if self._effects_of != self.registry.generation:
            self._effects.clear()
            self._effects_of = self.registry.generation
        found = self._effects.get(key)
        if found is None:
            reads, writes = effects if isinstance(effects, tuple) else _split(effects, args)
            found = self._names(reads), self._names(writes)
            if 0 not in key:  # empty storages share an address
                self._effects[key] = found
        return Mark(kind, name, stream, sum(map(_nbytes, tensors)), *found, 0, site)

    def _note_captured(self, args: tuple[Any, ...], effects: Effects) -> None:
        """A launch went into the graph that is being captured."""
        assert self.capturing is not None
        reads, writes = effects if isinstance(effects, tuple) else _split(effects, args)
        tensors = _tensors(tuple(reads)), _tensors(tuple(writes))
        self.capturing.effects.note(self.registry, tensor_bytes(args), *tensors)

    def _mark_replay(self, graph: Graph) -> None:
        done = graph.effects
        self._mark("replay", graph.name, done.nbytes, tuple(done.reads.values()), tuple(done.writes.values()))

    # -- call sites ----------------------------------------------------------------------------------------------------

    def site(self) -> str | None:
        """``file:line`` of the caller outside runtime/, ops/ and memory/, where the observer asks for call sites."""
        return call_site() if self.observer.call_sites else None


_INSIDE = tuple(
    f"{name}."
    for name in "mrv2lab.runtime mrv2lab.ops mrv2lab.memory mrv2lab.graphs mrv2lab.runner_v1.buffers mrv2lab.observer "
    "contextlib copy torch warnings _py_warnings".split()
)


# By identity, since a code object's hash goes through all of its constants; the object is kept, so that it stays its.
_is_inside: dict[int, tuple[bool, CodeType]] = {}
_sites: dict[tuple[int, int], str] = {}


def call_site() -> str:
    """``file:line`` of the nearest frame outside the runtime's own packages (below 1 us: places are remembered, some
    hundreds of them, and every cell of a notebook adds a few)."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        known = _is_inside.get(id(code))
        if known is None:
            inside = f"{frame.f_globals.get('__name__')}.".startswith(_INSIDE)
            known = _is_inside[id(code)] = (inside, code)
        if not known[0]:
            break
        frame = frame.f_back
    place = id(frame.f_code), frame.f_lasti
    site = _sites.get(place)
    if site is None:
        _is_inside.setdefault(place[0], (False, frame.f_code))
        site = _sites[place] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return site


@contextmanager
def inference(threads: int | None = None) -> Iterator[None]:
    """Autograd off, and ``threads`` OpenMP threads, for queued work. Both are per thread, so workers enter it too."""
    before = torch.get_num_threads()
    if threads is not None and threads != before:
        torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        if threads is not None and threads != before:
            torch.set_num_threads(before)


def check_copy(kind: str, dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raise ``ValueError`` for a copy that would convert, broadcast or be staged."""
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise ValueError(f"{kind} of {src.numel()} {src.dtype} into {dst.numel()} {dst.dtype}, at {call_site()}")
    if not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(f"{kind} needs contiguous tensors, at {call_site()}: CUDA would stage the copy and wait")


def tensor_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of every tensor among ``args``, tuples included."""
    return sum(map(_nbytes, _tensors(args)))


def _split(op: Launchable, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What ``op`` reads and writes among ``args``."""
    return [arg for i, arg in enumerate(args) if i not in op.write_index], [args[i] for i in op.write_index]


_address = torch.Tensor.data_ptr
_nbytes = operator.attrgetter("nbytes")


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Every tensor among ``args``, tuples included."""
    found = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif type(arg) is tuple:
            found += _tensors(arg)
    return found
