"""How much memory the device has and how much of it is taken: measured on a GPU, modelled on a CPU.

A CPU stands in for a device whose memory holds the buffers that are registered as the device's and nothing else: its
size is the machine's physical memory, or what the caller says, so that a lesson can run out of it on any laptop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.places import Place

CUDA_ROUNDING = 2 << 20
"""PyTorch's caching allocator gives a large tensor whole pages of 2 MiB."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes of the device at one moment."""

    total: int
    allocated: int
    """In tensors of this process."""
    other: int
    """Taken otherwise: the CUDA context, compiled kernels, libraries, other processes."""

    @property
    def used(self) -> int:
        """Everything that a new tensor cannot have."""
        return self.allocated + self.other


def read_memory(rt: Runtime, total: int | None = None) -> MemoryReading:
    """The reading now. ``total`` replaces the size of a CPU's modelled device memory (None = :func:`default_memory`).

    Gives cached, unused pages back to the driver first, so that nothing is counted that a tensor could have.
    """
    if rt.device.type != "cuda":
        return MemoryReading(default_memory() if total is None else total, rt.registry.nbytes(Place.DEVICE), 0)
    torch.cuda.empty_cache()
    free, size = torch.cuda.mem_get_info(rt.device)
    allocated = torch.cuda.memory_allocated(rt.device)
    return MemoryReading(size, allocated, max(0, size - free - allocated))


def physical_memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_memory() -> int:
    """What a CPU's modelled device has if nobody says: half of the machine's memory, since the host's programs and what
    the model leaves out (temporaries, pinned buffers) live there too."""
    return physical_memory() // 2


@dataclass(slots=True)
class Peak:
    """``nbytes``: the most that was allocated at once inside the ``with``, above what was allocated before."""

    nbytes: int = 0


@contextmanager
def peak_memory(rt: Runtime) -> Iterator[Peak]:
    """Measures what the host allocates inside the ``with`` for the work it queues. On a CPU temporaries are not the
    device's, and the peak is what stays."""
    peak = Peak()
    if rt.device.type != "cuda":
        before = rt.registry.nbytes(Place.DEVICE)
        yield peak
        peak.nbytes = max(0, rt.registry.nbytes(Place.DEVICE) - before)
        return
    before = torch.cuda.memory_allocated(rt.device)
    torch.cuda.reset_peak_memory_stats(rt.device)
    yield peak
    peak.nbytes = max(0, torch.cuda.max_memory_allocated(rt.device) - before)


def page_bytes(rt: Runtime) -> int:
    """What a large tensor's share of the device is a multiple of."""
    return CUDA_ROUNDING if rt.device.type == "cuda" else 1
