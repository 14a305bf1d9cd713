"""The arguments of a file's events, packed piece by piece into one block."""

from __future__ import annotations

from typing import Any

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

    def pack(self) -> None:
        """Turn those of the piece into text."""
        # One block for all: orjson leaves a hole of kilobytes behind each of its small texts as long as they live.
        try:
            texts = list(map(orjson.dumps, self.waiting))
        except TypeError:  # one nests deeper than can be written
            texts = list(map(_text, self.waiting))
        self._blobs.append(b"".join(texts))
        self._lengths.append(np.fromiter(map(len, texts), np.int64, len(texts)))
        self._packed += len(texts)
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
        return orjson.dumps(args)
    except TypeError:
        return b'{"args":"nested too deeply to be kept"}'
