"""The members of a recording's zip, read from front to back without its directory.

The directory stands at the end of a zip, where a file that was cut off, or is still being written, has none. Every
local header of a recording carries its member's sizes and CRC, so walking from one to the next needs no directory, and
a directory that disagrees with the members deceives nobody. Nothing is ever extracted to disk.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import IO

from mrv2lab.recording.layout import Budget
from mrv2lab.recording.schema import RecordingError

HEADER, END = "header.json", "end.json"
CHUNK = "chunks/{:05d}/"
"""Folder of a chunk; its ``steps.json`` is written last, so that a chunk which has one is whole."""
STEPS = "steps.json"
COLUMN_SUFFIX = ".npy"
DEVICE = "device/"

_NAME = re.compile(
    r"header\.json|end\.json|chunks/[0-9]{5,9}/(steps\.json|[a-z_]+\.[a-z_]+\.npy)|device/[a-z_]+\.[a-z_]+\.npy"
)
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_DIRECTORY_MAGICS = (b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06")
_ENCRYPTED, _STREAMED = 0x1, 0x8
_STORED, _DEFLATED = 0, 8


@dataclass
class Members:
    """What :func:`read_members` found: contents by name, and why it stopped if that was before the directory."""

    contents: dict[str, bytes] = field(default_factory=dict)
    damage: str | None = None


def read_members(file: IO[bytes], budget: Budget) -> Members:
    """Every whole member at the front of ``file``. Raises ``RecordingError`` for what no recording contains."""
    found = Members()
    while True:
        at = file.tell()
        fixed = file.read(_LOCAL.size)
        if not fixed and not found.contents:
            raise RecordingError("is empty")
        if fixed[:4] in _DIRECTORY_MAGICS:
            return found
        if not fixed.startswith(_LOCAL_MAGIC[: len(fixed)]):
            if not found.contents:
                raise RecordingError("is no zip file, and so no recording")
            found.damage = f"what follows byte {at:,} is damaged"
            return found
        if len(fixed) < _LOCAL.size:
            found.damage = f"the file ends at byte {at + len(fixed):,} without an end"
            return found
        found.damage = _read_member(file, fixed, found.contents, budget)
        if found.damage is not None:
            return found


def _read_member(file: IO[bytes], fixed: bytes, contents: dict[str, bytes], budget: Budget) -> str | None:
    """Read one member behind its fixed header into ``contents``; or say how it is cut off or damaged."""
    _, _, flags, method, _, _, crc, packed, size, name_len, extra_len = _LOCAL.unpack(fixed)
    raw_name = file.read(name_len)
    if len(raw_name) < name_len:
        return "the file ends within a member's name"
    name = raw_name.decode("utf-8", "backslashreplace")
    shown = repr(name if len(name) <= 60 else name[:57] + "...")
    if not _NAME.fullmatch(name):
        raise RecordingError(f"holds {shown}, which is no part of a recording")
    if name in contents:
        raise RecordingError(f"holds {shown} twice")
    if flags & _ENCRYPTED:
        raise RecordingError(f"holds {shown} encrypted; recordings are not")
    if flags & _STREAMED or method not in (_STORED, _DEFLATED):
        raise RecordingError(f"holds {shown} packed as no recording is; pack it anew with plain deflate")
    # A member is refused by the size that it declares, and unpacked to no more than that.
    budget.take(size, name)
    if packed > size + 1024:
        return f"{shown} is damaged"
    file.seek(extra_len, 1)
    data = file.read(packed)
    if len(data) < packed:
        return f"the file ends within {shown}"
    content = data if method == _STORED else _inflate(data, size)
    if content is None or len(content) != size or zlib.crc32(content) != crc:
        return f"{shown} is damaged"
    contents[name] = content
    return None


def _inflate(data: bytes, size: int) -> bytes | None:
    """``data`` unpacked, if it is one whole deflate stream of ``size`` bytes; never makes more than that and one."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(data, size + 1)
    except zlib.error:
        return None
    return content if unpacker.eof and not unpacker.unused_data else None
