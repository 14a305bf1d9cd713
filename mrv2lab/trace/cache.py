"""A columnar copy of a trace beside its file, so that the second load takes a fraction of a second.

``NAME.mrv2trace``: magic, length and CRC of a JSON header, the header, then the arrays one behind the other, each on a
64-byte boundary. No pickle. A copy of another file, another version, or a damaged one counts as none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from mrv2lab.trace.args import ArgStore
from mrv2lab.trace.builder import DTYPES
from mrv2lab.trace.trace import KINDS, Lane, Problem, Trace, TraceError, TraceInfo

Array = np.ndarray[Any, Any]

MAGIC = b"MRV2TRC\0"
VERSION = 1
"""Raise it whenever the reader gives other columns for the same file."""
SUFFIX = ".mrv2trace"
_ENDS_BYTES = 64 << 10
_ALIGN = 64
_FRONT = struct.Struct("<8sQI")  # magic, header bytes, header CRC


def place(path: Path) -> Path:
    """Where a file's copy lies."""
    return path.with_name(path.name + SUFFIX)


def fingerprint(path: Path) -> list[Any]:
    """What a copy must agree with: size, time of change, a hash of the file's first and last 64 KB."""
    found = path.stat()
    with path.open("rb") as file:
        ends = file.read(_ENDS_BYTES)
        file.seek(max(0, found.st_size - _ENDS_BYTES))
        ends += file.read(_ENDS_BYTES)
    return [found.st_size, found.st_mtime_ns, hashlib.blake2b(ends, digest_size=16).hexdigest()]


def read(path: Path, key: list[Any]) -> Trace | None:
    """The trace from the copy; None if there is none that fits."""
    try:
        with place(path).open("rb") as file:
            magic, length, check = _FRONT.unpack(file.read(_FRONT.size))
            if magic != MAGIC or length > os.fstat(file.fileno()).st_size:
                return None
            text = file.read(length)
            if zlib.crc32(text) != check:
                return None
            header = orjson.loads(text)
            if (header["version"], header["key"], header["kinds"]) != (VERSION, key, list(KINDS)):
                return None
            start = file.tell()
            arrays = {name: _array(file, start, **where) for name, where in header["arrays"].items()}
        return _trace(header, arrays, path)
    except (OSError, ValueError, KeyError, TypeError, struct.error, MemoryError):
        return None


def write(path: Path, key: list[Any], trace: Trace, *, must: bool) -> None:
    """Put a copy beside ``path``, whole or not at all. Where that cannot be done, raises TraceError if it ``must``."""
    arrays = {name: getattr(trace, name) for name in DTYPES}
    arrays["offsets"] = trace.store.offsets
    arrays["blob"] = np.frombuffer(trace.store.blob, np.uint8)
    arrays["names"] = np.frombuffer(orjson.dumps(trace.names), np.uint8)
    header: dict[str, Any] = {"version": VERSION, "key": key, "kinds": KINDS, "arrays": {}}
    header["info"] = dataclasses.asdict(trace.info)
    header["lanes"] = [dataclasses.astuple(lane) for lane in trace.lanes]
    header["problems"] = [dataclasses.astuple(problem) for problem in trace.problems]
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        header["arrays"][name] = {
            "dtype": data.dtype.str,
            "length": len(data),
            "offset": offset,
            "check": _check(data),
        }
        offset += -(-data.nbytes // _ALIGN) * _ALIGN
    part = place(path).with_name(f"{place(path).name}.{os.getpid()}.part")
    try:
        text = orjson.dumps(header)
        text += b" " * (-(_FRONT.size + len(text)) % _ALIGN)
        with part.open("wb") as file:
            file.write(_FRONT.pack(MAGIC, len(text), zlib.crc32(text)) + text)
            for array in arrays.values():
                data = np.ascontiguousarray(array)
                file.write(data.data)
                file.write(b"\0" * (-data.nbytes % _ALIGN))
        part.replace(place(path))
    except (OSError, TypeError) as error:
        if must:
            raise TraceError(f"{place(path)}: the columnar copy cannot be written ({error}); use cache=None") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _check(array: Array) -> int:
    return zlib.crc32(array.data)


def _array(file: BinaryIO, start: int, dtype: str, length: int, offset: int, check: int) -> Array:
    found = np.empty(length, np.dtype(dtype))
    file.seek(start + offset)
    if file.readinto(found.data) != found.nbytes or _check(found) != check:  # type: ignore[attr-defined]
        raise ValueError("the copy is damaged")
    return found


def _trace(header: dict[str, Any], arrays: dict[str, Array], path: Path) -> Trace:
    names = tuple(orjson.loads(arrays["names"].data))
    lanes = tuple(Lane(*lane) for lane in header["lanes"])
    store = ArgStore(arrays["blob"].data, arrays["offsets"])
    columns = {name: arrays[name] for name in DTYPES}
    about = {**header["info"], "devices": tuple(header["info"]["devices"]), "path": str(path), "title": path.name}
    info = TraceInfo(**about)
    for name, dtype in DTYPES.items():
        if columns[name].dtype != dtype or len(columns[name]) != len(columns["start"]):
            raise ValueError("the copy's columns do not fit together")
    problems = tuple(Problem(*one) for one in header["problems"])
    return Trace(info, names, lanes, **columns, store=store, problems=problems)
