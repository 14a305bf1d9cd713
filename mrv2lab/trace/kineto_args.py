"""The arguments of a file's events, packed piece by piece into one block."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import orjson

from mrv2lab.trace.args import ArgStore

Array = np.ndarray[Any, Any]


class Arguments:
    """``add`` an event's arguments, ``pack`` behind each piece, ``store`` once."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        """Those of the piece at hand."""
        self._packed = 0
        self._blobs: list[bytes] = []
        self._lengths: list[Array] = []

    @property
    def next(self) -> int:
        """Position of the arguments that are added next."""
        return self._packed + len(self.waiting)

    def add(self, args: dict[str, Any]) -> int:
        """Position of an event's arguments."""
        self.waiting.append(args)
        return self.next - 1

    def add_texts(self, blob: bytes, lengths: Array) -> None:
        """Those of a whole piece, one JSON text behind the other: n of them, lengths int64[n]."""
        self._blobs.append(blob)
        self._lengths.append(lengths)
        self._packed += len(lengths)

    def pack(self) -> None:
        """Turn those of the piece into text."""
        # One block for all: orjson leaves a hole of kilobytes behind each of its small texts as long as they live.
        try:
            texts = list(map(orjson.dumps, self.waiting))
        except TypeError:  # one nests deeper than orjson writes, though not than it reads
            texts = list(map(_text, self.waiting))
        self.add_texts(b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts)))
        self.waiting.clear()

    def store(self) -> ArgStore:
        """All of them."""
        offsets = np.zeros(self._packed + 1, np.int64)
        np.cumsum(np.concatenate([*self._lengths, np.empty(0, np.int64)]), out=offsets[1:])
        blob = b"".join(self._blobs)
        self._blobs.clear()
        return ArgStore(blob, offsets)


def _text(args: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(args)
    except RecursionError:
        return b'{"args":"nested too deeply to be kept"}'
