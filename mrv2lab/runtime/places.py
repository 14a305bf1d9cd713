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
    """Buffers by storage. An entry goes when its storage goes; unknown host memory is pageable."""

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}
        self.generation = 0
        """Grows whenever an address may have got another name; pinned memory, which comes and goes, apart."""

    def add(self, tensor: torch.Tensor, name: str, place: Place) -> None:
        """Name the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        key = _key(storage)
        self._buffers.pop(key, None)  # the newest stands last
        buffer = self._buffers[key] = Buffer(name, place, storage.nbytes())
        if place is not Place.PINNED:
            self.generation += 1
        weakref.finalize(storage, self._forget, key, buffer).atexit = False

    def _forget(self, key: int, buffer: Buffer) -> None:
        if self._buffers.get(key) is buffer:  # else the address has a new owner already
            del self._buffers[key]
            if buffer.place is not Place.PINNED:
                self.generation += 1

    def find(self, tensor: torch.Tensor) -> Buffer | None:
        """The buffer that ``tensor`` is a view of, or None for memory nobody registered."""
        return self._buffers.get(_key(tensor.untyped_storage()))

    @staticmethod
    def address(tensor: torch.Tensor) -> int:
        """Where the storage of ``tensor`` begins."""
        return _key(tensor.untyped_storage())

    def at(self, address: int) -> Buffer | None:
        """The live buffer that begins at ``address``."""
        return self._buffers.get(address)

    def newest(self, name: str) -> int | None:
        """The address of the live buffer that was given ``name`` last."""
        return next((key for key, buffer in reversed(self._buffers.items()) if buffer.name == name), None)

    def name(self, tensor: torch.Tensor) -> str:
        """Name for reports; ``?`` where nobody registered the storage."""
        buffer = self.find(tensor)
        return buffer.name if buffer is not None else "?"

    def buffers(self) -> list[Buffer]:
        """Every live buffer."""
        return list(self._buffers.values())

    def nbytes(self, place: Place) -> int:
        """Bytes of the live buffers in ``place``."""
        return sum(buffer.nbytes for buffer in self.buffers() if buffer.place is place)

    def __len__(self) -> int:
        return len(self._buffers)


def _key(storage: torch.UntypedStorage) -> int:
    """The storage's address; empty storages share address 0, so theirs is the object's."""
    return storage.data_ptr() or int(storage._cdata)
