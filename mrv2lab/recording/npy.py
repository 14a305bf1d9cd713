"""A column of a recording as bytes: one-dimensional ``.npy``, integers in the narrowest type that holds them.

``np.load`` reads every column. This reader takes only what :func:`to_npy` makes, by a fixed pattern: no pickles, no
Python literals to evaluate, no shapes that promise more than the bytes that are there.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mrv2lab.recording.schema import Array, RecordingError

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGN = 64
_HEADER = re.compile(
    rb"\{'descr': '(\|[iu]1|<[iu][24]|<i8|<f4)', 'fortran_order': False, 'shape': \((0|[1-9][0-9]{0,11}),\), \} *\n"
)
_NARROW = [np.dtype(code) for code in ("u1", "i1", "<u2", "<i2", "<u4", "<i4")]
_FITS = [(dtype, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in _NARROW]


def narrow(values: np.ndarray[Any, np.dtype[np.int64]]) -> Array:
    """``values`` [n] in the smallest integer type that holds all of them."""
    if not values.size:
        return values.astype("u1")
    low, high = int(values.min()), int(values.max())
    for dtype, least, greatest in _FITS:
        if least <= low and high <= greatest:
            return values.astype(dtype)
    return values


def to_npy(values: Array) -> bytes:
    """``values`` [n] as a version 1.0 ``.npy``."""
    text = f"{{'descr': '{values.dtype.str}', 'fortran_order': False, 'shape': ({len(values)},), }}".encode()
    used = len(_MAGIC) + 2 + len(text) + 1
    text += b" " * (-used % _ALIGN) + b"\n"
    return b"".join((_MAGIC, len(text).to_bytes(2, "little"), text, values.tobytes()))


def from_npy(data: bytes, name: str) -> Array:
    """The column in ``data``, read-only. Raises ``RecordingError``, naming ``name``, for anything unusual."""
    start = len(_MAGIC) + 2
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    match = _HEADER.fullmatch(data[start:end]) if data.startswith(_MAGIC) else None
    if match is None:
        raise RecordingError(f"{name} is no column of integers or float32 numbers, or not in .npy format 1.0")
    dtype, count = np.dtype(match[1].decode()), int(match[2])
    if len(data) - end != count * dtype.itemsize:
        raise RecordingError(f"{name} says it has {count} values of {dtype}, but holds {len(data) - end} bytes")
    return np.frombuffer(data, dtype, count, end)
