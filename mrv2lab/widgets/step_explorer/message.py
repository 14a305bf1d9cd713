"""A step's view as the explorer's module reads it: a small JSON header and two buffers a source.

``{"type": "views", "index", "count", "status", "views": [{"title", "live", "index", "count", "columns"} or "error"]}``;
buffers: for each view without an error its ``meta`` as UTF-8 JSON and its columns in one blob. ``columns`` holds
``[name, dtype, byte offset, length]``; offsets are multiples of 8, so that typed arrays can lie on the blob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from mrv2lab.recording.view import StepView

ALIGNMENT = 8
JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
NARROWED = {"bool": np.uint8, "uint64": np.float64, "uint16": np.uint32, "float16": np.float32}
"""Types that have no plain typed array, or none that is worth one."""


@dataclass(frozen=True)
class Shown:
    """What one source shows at an index: its view, or a sentence why there is none."""

    title: str
    live: bool
    count: int
    view: StepView | None
    error: str = ""


def encode(index: int, shown: Sequence[Shown], status: str = "") -> tuple[dict[str, Any], list[bytes]]:
    """The message and its buffers that show every source at ``index``."""
    views: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for one in shown:
        header: dict[str, Any] = {"title": one.title, "live": one.live, "count": one.count, "index": index}
        if one.view is None:
            header["error"] = one.error or "There is no step to show."
        else:
            # NaN and infinities become null, which the module shows as a dash.
            buffers.append(orjson.dumps(one.view.meta, option=JSON_OPTIONS))
            columns, blob = pack_columns(one.view.columns)
            header["columns"] = columns
            buffers.append(blob)
        views.append(header)
    count = max((one.count for one in shown), default=0)
    return {"type": "views", "index": index, "count": count, "status": status, "views": views}, buffers


def pack_columns(columns: dict[str, np.ndarray[Any, Any]]) -> tuple[list[list[Any]], bytes]:
    """``[name, dtype, offset, length]`` of each column, and all of them in one blob, little-endian."""
    table: list[list[Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, column in columns.items():
        dtype = np.dtype(NARROWED.get(column.dtype.name, column.dtype))
        data = np.ascontiguousarray(column, dtype=dtype.newbyteorder("<")).tobytes()
        table.append([name, dtype.name, offset, int(column.size)])
        parts += [data, b"\0" * (-len(data) % ALIGNMENT)]
        offset += len(data) + (-len(data) % ALIGNMENT)
    return table, b"".join(parts)
