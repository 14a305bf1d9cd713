"""The arguments of a trace's events: JSON texts in one block of bytes, decoded one by one when somebody asks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

Array = np.ndarray[Any, Any]


class ArgStore:
    """``store[row]`` is the dictionary of a row, empty for row -1."""

    def __init__(self, blob: bytes | bytearray | memoryview, offsets: Array) -> None:
        self.blob = memoryview(blob)
        # [rows + 1] int64: where each row's JSON object begins
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row < 0:
            return {}
        text = self.blob[self.offsets[row] : self.offsets[row + 1]]
        try:
            found: dict[str, Any] = orjson.loads(text)
        except orjson.JSONDecodeError:  # a number beyond all doubles: inf
            found = json.loads(bytes(text))
        return found


NO_ARGS = ArgStore(b"", np.zeros(1, np.int64))
