"""What a graph touches, noted while it is captured, and the hook by which a graph stands in for segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mrv2lab.runtime.places import Registry

UNKNOWN = "?"
"""The name of a storage that nobody registered."""


class GraphMemoryError(RuntimeError):
    """A capture ran out of memory. The graph is empty; the runtime goes on."""


class Segments(Protocol):
    """Stands between a decoder and ``rt.run`` while segments are captured or replayed in pieces (``rt.segments``)."""

    def plays(self, name: str) -> bool:
        """Whether segment ``name`` is dealt with; else the runtime launches it."""


@dataclass
class Effects:
    """Sums and buffers of the launches in one capture."""

    launches: int = 0
    nbytes: int = 0
    """Bytes that they touch: every tensor argument once a launch."""
    reads: dict[int, str] = field(default_factory=dict)
    """Address of a storage -> its buffer's name at capture, in the order of first use."""
    writes: dict[int, str] = field(default_factory=dict)

    def note(
        self, registry: Registry, nbytes: int, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """One launch was captured."""
        self.launches += 1
        self.nbytes += nbytes
        for tensors, seen in ((reads, self.reads), (writes, self.writes)):
            for tensor in tensors:
                seen.setdefault(registry.address(tensor), registry.name(tensor))

    def moved(self, registry: Registry) -> list[str]:
        """The buffers that are no longer where the graph was captured to look for them: one line each."""
        lines = []
        for address, name in (self.reads | self.writes).items():
            if name == UNKNOWN:
                continue
            now = registry.at(address)
            if now is None or now.name != name:
                there = "nothing that is registered" if now is None else repr(now.name)
                lines.append(f"{name!r} was at {address:#x}, where now {there} is")
                continue
            newest = registry.newest(name)
            if newest is not None and newest != address:
                lines.append(f"{name!r} was at {address:#x}, and a newer one is at {newest:#x}")
        return lines
