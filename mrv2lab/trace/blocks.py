"""A file's bytes, block by block and uncompressed, with a cap, a progress bar and a way out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from mrv2lab.trace.trace import TraceCancelled, TraceError

BLOCK_BYTES = 256 << 10
"""Larger ones are slower: their parsed events leave the processor's caches."""
LARGE_BYTES = 20 << 20
"""From this size on a file is worth a progress bar and a columnar copy."""
GZIP_MAGIC = b"\x1f\x8b"
GZIP_RATIO = 12
"""About how much traces shrink: what a compressed file's size says about its text."""


class Blocks:
    """Iterate once. Afterwards ``total`` is the number of uncompressed bytes and ``damage`` says why they end early."""

    def __init__(
        self,
        path: Path,
        *,
        progress: bool = False,
        max_bytes: int = 2 << 30,
        cancel: Callable[[], bool] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.path = path
        self.total = 0
        self.damage = ""
        self._progress = progress
        self._max_bytes = max_bytes
        self._cancel = cancel
        self._block_bytes = block_bytes

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            size = self.path.stat().st_size
            if not packed and size > self._max_bytes:
                raise self._too_large(size)
            shown = self._progress and (size * GZIP_RATIO if packed else size) > LARGE_BYTES
            with self._bar(size) if shown else nullcontext() as bar:
                for block in self._unpacked(file) if packed else iter(lambda: file.read(self._block_bytes), b""):
                    self._check_cancel()
                    self.total += len(block)
                    if self.total > self._max_bytes:
                        raise self._too_large(self.total)
                    yield block
                    if bar is not None:
                        bar.update(file.tell() - bar.n)
        self._check_cancel()

    def _check_cancel(self) -> None:
        if self._cancel is not None and self._cancel():
            raise TraceCancelled(f"{self.path}: reading was cancelled after {self.total:,} bytes; nothing was kept")

    def _too_large(self, size: int) -> TraceError:
        return TraceError(
            f"{self.path}: {size:,} bytes or more uncompressed, over the cap of {self._max_bytes:,}: "
            f"load(..., max_bytes={1 << (2 * size).bit_length():_}) raises it, a shorter profile is better"
        )

    def _bar(self, size: int) -> Any:
        from tqdm.auto import tqdm  # here, since it loads half of Jupyter

        return tqdm(total=size, unit="B", unit_scale=True, desc=self.path.name, leave=False)

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        """One gzip member after another; what follows a whole member and is none itself is left alone, as gzip does."""
        unpack, data = zlib.decompressobj(wbits=31), b""
        while True:
            data = data or file.read(128 << 10)
            try:
                block = unpack.decompress(data, self._block_bytes) if data else unpack.flush()
            except zlib.error as error:
                self.damage = f"the compressed data are damaged ({error})"
                return
            if block:
                yield block
            if unpack.eof:
                data = unpack.unused_data.lstrip(b"\0") or file.read(128 << 10)
                if not data.startswith(GZIP_MAGIC):
                    return
                unpack = zlib.decompressobj(wbits=31)
            elif not data:
                self.damage = "the compressed data end early"
                return
            else:
                data = unpack.unconsumed_tail
