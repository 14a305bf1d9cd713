"""Where a tensor lives: host, pinned, uva or device, kept by storage so that views inherit it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum

import torch


class Place(Enum):
    """A place of memory. The host reads and writes host, pinned and uva; kernels take pinned, uva and device."""

    HOST = "host"
    """Pageable: the host's own. A copy from it synchronises."""
    PINNED = "pinned"
    """Page-locked: the source or target of asynchronous copies."""
    UVA = "uva"
    """Page-locked and read (or written) by kernels in place, over the bus."""
    DEVICE = "device"
    """The device's own."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """What the registry knows of one storage."""

    name: str
    place: Place
    nbytes: int


class Registry:
    """Buffers by storage address. An entry goes when its storage goes; unknown host memory is pageable."""

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}

    def add(self, tensor: torch.Tensor, name: str, place: Place) -> None:
        """Name the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._buffers[address] = Buffer(name, place, storage.nbytes())
        weakref.finalize(storage, self._buffers.pop, address, None)

    def find(self, tensor: torch.Tensor) -> Buffer | None:
        """The buffer that ``tensor`` is a view of, or None for memory nobody registered."""
        return self._buffers.get(tensor.untyped_storage().data_ptr())

    def name(self, tensor: torch.Tensor) -> str:
        """Name for reports; ``?`` where nobody registered the storage."""
        buffer = self.find(tensor)
        return buffer.name if buffer is not None else "?"

    def buffers(self) -> list[Buffer]:
        """Every live buffer."""
        return list(self._buffers.values())

    def nbytes(self, place: Place) -> int:
        """Bytes of the live buffers in ``place``."""
        return sum(buffer.nbytes for buffer in self._buffers.values() if buffer.place is place)

    def __len__(self) -> int:
        return len(self._buffers)
