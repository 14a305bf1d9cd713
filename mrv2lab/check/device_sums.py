"""Checksums that the device makes right behind a read, and that the host fetches without waiting for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mrv2lab.ops.checksum import checksum
from mrv2lab.runtime.base import Event, Runtime, Stream

SEGMENT = "races.checksum"
PAGE = 256
"""Checksums that travel to the host in one copy."""
_ABSENT = np.int64(-0x5EED_5EED_5EED)
"""In every place of a page that is not filled: a copy that was dropped leaves it there."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Page:
    """Up to ``PAGE`` checksums of one stream on their way to the host, and whose they are."""

    def __init__(self, rt: Runtime, number: int) -> None:
        # [PAGE] int64, device and pinned
        self.device = rt.zeros(PAGE, torch.int64, name=f"races.sums.{number}")
        self.host = rt.empty(PAGE, torch.int64, name=f"races.sums.{number}.host", place="pinned")
        self.np: np.ndarray[Any, np.dtype[np.int64]] = self.host.numpy()
        self.arrived: Event = rt.event(f"races.sums.{number}")
        self.owners: list[Any] = []


class DeviceSums:
    """``add`` queues one checksum behind what the current stream holds; ``send`` queues the copies of a step's.

    All of it is launched under the name ``races.*``. Nothing here waits.
    """

    def __init__(self, rt: Runtime, pages: int = 8) -> None:
        self.rt = rt
        # [1] int32: more than any row has, so that every cell counts
        self._all = rt.adopt(torch.tensor([2**31 - 1], dtype=torch.int32), "races.lengths")
        self._free = [Page(rt, number) for number in range(pages)]
        self._made = pages
        self._open: dict[str, tuple[Stream, Page]] = {}
        self._sent: list[Page] = []
        backend = rt.backend if rt.backend == "triton" else "spec"  # the interpreter takes 1.5 ms for each

        def sum_row(row: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
            checksum.execute(backend, (row, lengths, out))

        try:
            rt.function(SEGMENT)
        except KeyError:
            rt.register(SEGMENT, sum_row)

    def prime(self) -> None:
        """Launch every variant that Triton would compile on first use, when the host would stand still for it."""
        for dtype in (torch.int8, torch.int32, torch.int64):
            for size in (1, 16, 17):
                self.add(self.rt.zeros(size, dtype, name="races.prime"), None)
        self.send()

    def add(self, tensor: torch.Tensor, owner: Any) -> None:
        """Queue the checksum of ``tensor`` (contiguous, at least one element) for ``owner``."""
        rt, stream = self.rt, self.rt.current
        entry = self._open.get(stream.name)
        if entry is not None and len(entry[1].owners) == PAGE:
            self.send()
            entry = None
        if entry is None:
            entry = self._open[stream.name] = stream, self._take()
        page = entry[1]
        place = len(page.owners)
        page.owners.append(owner)
        row, out = words(tensor).view(1, -1), page.device[place : place + 1]
        rt.run(SEGMENT, row, self._all, out, reads=(row,), writes=(out,))

    def _take(self) -> Page:
        if self._free:
            page = self._free.pop()
        else:
            page = Page(self.rt, self._made)
            self._made += 1
        page.np.fill(_ABSENT)
        return page

    def send(self) -> None:
        """Queue the copies of what was added, each on its stream."""
        for stream, page in self._open.values():
            count = len(page.owners)
            with self.rt.use(stream):
                self.rt.d2h(page.host[:count], page.device[:count])
                page.arrived.record(stream)
            self._sent.append(page)
        self._open = {}

    def arrived(self) -> Iterator[tuple[Any, int]]:
        """(owner, checksum) of every page that is here by now."""
        while self._sent and self._sent[0].arrived.query():
            page = self._sent.pop(0)
            for owner, value in zip(page.owners, page.np, strict=False):
                if value != _ABSENT:  # else an error, or a reset, kept it from being made
                    yield owner, int(value)
            self._recycle(page)

    def drop(self) -> None:
        """Forget what is queued: it will not arrive."""
        for page in [*self._sent, *(page for _, page in self._open.values())]:
            self._recycle(page)
        self._sent, self._open = [], {}

    def _recycle(self, page: Page) -> None:
        page.owners = []
        self._free.append(page)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` flat, its bits as integers of the same width."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor.view(-1)
    word = _WORDS[flat.element_size()]
    return flat if flat.dtype == word else flat.view(word)


def host_sum(content: bytes, width: int) -> int:
    """What the device would say of these bytes, taken as integers of ``width`` bytes."""
    row = np.frombuffer(content, f"i{width}").reshape(1, -1)
    out = np.zeros(1, np.int64)
    checksum.spec(row, np.array([row.shape[1]], np.int32), out)
    return int(out[0])
