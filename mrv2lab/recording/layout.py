"""What a header fixes for the whole file: its tables, the range of a row, and what they may cost to rebuild.

The writer checks its columns as the reader does and with the same words, so that a recorder's mistake shows while it
records and not when somebody opens the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mrv2lab.recording.conform import ANY, Int, Map, conform
from mrv2lab.recording.schema import FORMAT, VERSION, Array, Header, RecordingError

MAX_BYTES = 512 << 20
"""Default limit of what a file may unpack to, and of the tables that its header asks for."""
MAX_ROWS = 1 << 16
MAX_BLOCKS = 1 << 22
MAX_TABLES = 256
DTYPES = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())

_COUNT = Int(0, 2**31 - 1)
_SHAPES = {
    "mode": str,
    "runner": str,
    "device": str,
    "modelled": bool,
    "config": Map(ANY),
    "backend": str,
    "tables": Map(([_COUNT], str)),
    "epoch_host_ns": Int(),
    "epoch_unix_ns": Int(),
    "versions": Map(str),
    "machine": Map(ANY),
    "call_sites": bool,
    "top_k": _COUNT,
    "check_every": _COUNT,
}


class Budget:
    """What reading a file may still cost. Counts the bytes unpacked and the Python objects that they turn into."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.left = max_bytes

    def take(self, nbytes: int, what: str) -> None:
        """Pay ``nbytes`` for ``what``, or raise ``RecordingError``."""
        self.left -= nbytes
        if self.left < 0:
            raise RecordingError(
                f"{what} would take this recording over {self.max_bytes:,} bytes of memory; "
                "pass a greater max_bytes if you trust the file"
            )


@dataclass(frozen=True)
class Table:
    """One table of the state; ``row_len`` is 1 for a one-dimensional one."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    @property
    def row_len(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape[1:])

    def to_bits(self, values: Array) -> Array:
        """``values`` [k] of this table's dtype as int64 that :meth:`from_bits` turns back, floats bit for bit."""
        if values.dtype != self.dtype:
            raise RecordingError(f"table {self.name!r} holds {self.dtype}, but was given values of {values.dtype}")
        return values.view(f"i{values.itemsize}").astype(np.int64)

    def from_bits(self, bits: Array) -> Array:
        """The values [k] of int64 ``bits``; a new array."""
        signed = bits.astype(f"i{self.dtype.itemsize}")
        if (signed != bits).any() or (self.dtype == bool and (signed & 1 != signed).any()):
            raise RecordingError(f"a value of table {self.name!r} does not fit into {self.dtype}")
        return signed.view(self.dtype)


class Layout:
    """The checked header. Raises ``RecordingError`` for one that cannot be right."""

    def __init__(self, header: Header, max_bytes: int = MAX_BYTES) -> None:
        # The step explorer sizes its panels by these.
        self.num_rows = _setting(header, "scheduler", "max_num_reqs", MAX_ROWS)
        _setting(header, "cache", "num_blocks", MAX_BLOCKS)
        _setting(header, "cache", "block_size", 1 << 16)
        if len(header.tables) > MAX_TABLES:
            raise RecordingError(f"the header names {len(header.tables)} tables, {MAX_TABLES} are allowed")
        self.tables: list[Table] = []
        for name, (shape, dtype) in header.tables.items():
            if dtype not in DTYPES:
                raise RecordingError(f"table {name!r} has the unknown dtype {dtype!r}")
            if not 1 <= len(shape) <= 3:
                raise RecordingError(f"table {name!r} has {len(shape)} dimensions, expected 1 to 3")
            self.tables.append(Table(name, tuple(shape), np.dtype(dtype)))
        total = sum(table.size * table.dtype.itemsize for table in self.tables)
        if total > max_bytes:
            raise RecordingError(
                f"the header's tables take {total:,} bytes, the limit is {max_bytes:,}; "
                "pass a greater max_bytes if you trust the file"
            )
        self.ids = {table.name: index for index, table in enumerate(self.tables)}
        self._rows = np.array([table.rows for table in self.tables], np.int64)
        self._row_lens = np.array([table.row_len for table in self.tables], np.int64)
        self._sizes = np.array([table.size for table in self.tables], np.int64)

    def table_id(self, name: str) -> int:
        """Position of the table called ``name`` in the header."""
        if name not in self.ids:
            raise RecordingError(f"table {name!r} is not among the header's tables: {', '.join(self.ids)}")
        return self.ids[name]

    def check_batch(self, rows: Array, num_scheduled: Array) -> None:
        """Both [r]: rows within R, counts that are counts."""
        bad = rows[(rows < 0) | (rows >= self.num_rows)]
        if bad.size:
            raise RecordingError(f"the batch names row {bad[0]}, but the header has R = {self.num_rows}")
        if (num_scheduled < 0).any():
            raise RecordingError("the batch has a negative number of scheduled tokens")

    def check_diffs(self, table: Array, row: Array, start: Array, length: Array) -> None:
        """All [d]: staged writes that stay inside their tables."""
        if (row >= self._rows[table]).any() or (row < 0).any():
            raise RecordingError("a diff writes to a row outside its table")
        # Not start + length: the sum of two hostile int64 may wrap.
        if (start < 0).any() or (length < 0).any() or (length > self._row_lens[table] - start).any():
            raise RecordingError("a diff writes past the end of its row")

    def check_flat(self, table: Array, length: Array, index: Array) -> None:
        """``table``, ``length`` [p] and their flat indices ``index`` [sum of lengths]."""
        if (index < 0).any() or (index >= np.repeat(self._sizes[table], length)).any():
            raise RecordingError("a published index lies outside its table")


def header_to_json(header: Header) -> dict[str, Any]:
    """The content of ``header.json``."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "header": {field.name: getattr(header, field.name) for field in fields(Header)},
    }


def header_from_json(value: Any) -> Header:
    """The header in ``header.json``. Raises ``RecordingError`` for another format or a newer version."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise RecordingError(f"header.json does not say that this is a {FORMAT}")
    version = conform(value.get("version"), Int(1), "version")
    if version > VERSION:
        raise RecordingError(
            f"was written by a newer mrv2lab (schema {version}, this one reads up to {VERSION}): upgrade mrv2lab"
        )
    found = conform(value.get("header"), _SHAPES, "header")
    found["tables"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in found["tables"].items()}
    return Header(**found)


def _setting(header: Header, section: str, name: str, limit: int) -> int:
    """``header.config[section][name]``, which must be there."""
    values = header.config.get(section)
    value = values.get(name) if isinstance(values, dict) else None
    return int(conform(value, Int(1, limit), f"header.config.{section}.{name}"))
