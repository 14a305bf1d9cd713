"""Which calls, records, frames and operators are synchronisations, and of which kind: told by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mrv2lab.trace.call_site import Frame, frame

KINDS_OF_WAIT: tuple[str, ...] = (
    "device",  # until a device has nothing left to do
    "stream",  # until one stream has nothing left to do
    "event",  # until a stream has passed an event
    "event query",  # asks whether it has; nobody waits
    "implicit copy",  # a copy from or to pageable memory, or one that returns when it is done
    "item",  # an operator that reads a value of the device
    "device-side wait",  # a stream waits for an event; the host goes on
    "allocator",  # memory that could be given back only after the device was done
    "queue full",  # the stream took no more launches
    "python frame only",  # a frame that synchronises, without the call of the runtime that it ended in
)
"""What ``syncs`` calls them."""
NOT_OF_HOST = frozenset({"device-side wait", "event query"})
"""Kinds in which the host does not wait."""

_APIS: dict[str, str] = {
    "DeviceSynchronize": "device",
    "CtxSynchronize": "device",
    "ThreadSynchronize": "device",
    "StreamSynchronize": "stream",
    "EventSynchronize": "event",
    "EventQuery": "event query",
    "StreamWaitEvent": "device-side wait",
    "Free": "allocator",
    "FreeHost": "allocator",
    "HostFree": "allocator",
    "Malloc": "allocator",
    "MemFree": "allocator",
    "MemAlloc": "allocator",
}
_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds)+$")
_API = re.compile(r"(?:cuda|hip|cu|musa)([A-Z]\w*)")

READING_OPS = frozenset(
    {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::nonzero_static"}
)
"""Operators whose result the host needs: of a tensor of the device they cannot return before the device is done."""
COPYING_OPS = frozenset({"aten::copy_", "aten::_to_copy", "aten::to", "aten::cpu", "aten::_copy_from"})
"""Operators that may copy between host and device, and wait for it."""
BARRIER = "synchronize_input_prep"
"""vLLM's context manager around the preparation of inputs: waits for an event at its beginning, records it at its end
(``v1/worker/gpu_model_runner.py``)."""
BARRIER_PHASE = "barrier_wait"
"""Our phase for the same."""

_METHODS = frozenset(
    "synchronize _cuda_synchronize wait wait_event wait_stream item tolist cpu to numpy nonzero copy_ is_nonzero "
    "__bool__ __int__ __float__ __index__".split()
)
"""Functions of PyTorch that do nothing but wait, or copy and wait."""
_OWNERS = ("Tensor", "Parameter", "Event", "Stream", "type", "module")


def operator(name: str) -> str:
    """An operator's name without what ``emit_nvtx`` writes behind it: ``aten::item, op_id = 7``."""
    return name.partition(", ")[0]


def plain(name: str) -> str:
    """An API's name without the version that nsys writes behind it: ``cudaMemcpyAsync_v3020``."""
    return _SUFFIX.sub("", name)


@lru_cache(maxsize=65536)
def api_kind(name: str) -> str | None:
    """Kind of a call of the runtime or driver; None: no synchronisation. Copies: ``copy`` (returns when it is done, as
    its name says) or ``async copy`` (may wait all the same, if memory is pageable)."""
    found = _API.fullmatch(plain(name))
    if not found:
        return None
    call = found[1]
    if call.startswith("Memcpy") and "Peer" not in call:
        return "async copy" if "Async" in call else "copy"
    return _APIS.get(call)


def record_kind(name: str, args: Mapping[str, Any]) -> str | None:
    """Kind of a synchronisation record (``cuda_sync`` of Kineto, nsys's table); None: unknown."""
    for text in (str(args.get("cuda_sync_kind", "")), str(args.get("sync_type", "")), name):
        words = text.lower()
        if "wait" in words and "stream" in words:
            return "device-side wait"
        for word, kind in (("event", "event"), ("stream", "stream"), ("context", "device"), ("device", "device")):
            if word in words:
                return kind
    return None


def is_barrier(kind: str, name: str) -> bool:
    """Whether a range is vLLM's input barrier, at either end, or our phase for it."""
    if kind == "phase":
        return name.rpartition(".")[2] == BARRIER_PHASE
    one = frame(name) if kind == "python" else None
    return one is not None and one.function == BARRIER


@lru_cache(maxsize=65536)
def synchronises(name: str) -> bool:
    """Whether a Python frame is one of PyTorch's that only synchronises."""
    one = frame(name) if "synchronize" in name else None  # few frames are worth taking apart
    return one is not None and one.in_torch and one.function in ("synchronize", "_cuda_synchronize") and _known(one)


def _known(one: Frame) -> bool:
    return bool(one.file) or not one.owner or one.owner.split(".")[-1].endswith(_OWNERS)


@lru_cache(maxsize=65536)
def part_of_wait(kind: str, name: str) -> bool:
    """Whether a range does nothing but wait (or copy and wait) for the one who calls it."""
    if kind in ("op", "annotation"):
        return operator(name) in READING_OPS or operator(name) in COPYING_OPS
    one = frame(name) if kind == "python" else None
    return one is not None and (one.function == BARRIER or (one.in_torch and one.function in _METHODS and _known(one)))


@lru_cache(maxsize=65536)
def between(kind: str, name: str) -> bool:
    """Whether a range is machinery that may lie between two parts of a wait: neither ends it nor belongs to it."""
    one = frame(name) if kind == "python" else None
    return one is not None and not one.of_user
