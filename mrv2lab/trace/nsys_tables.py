"""The tables of an ``nsys export --type sqlite`` file, read-only, as arrays of integers.

The file is opened ``immutable``: SQLite then takes no lock, plays back no journal and creates nothing beside it.
Every table and column may be missing, since nsys creates tables for what it saw and columns differ by version.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np
from tqdm.auto import tqdm

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import TraceCancelled, TraceError

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]

MAGIC = b"SQLite format 3\0"
NULL = -(1 << 63)
"""Stands for NULL, and for the values of a column that a table lacks."""
ORDER = "ORDER BY rowid"
"""Columns are fetched apart, and an index that somebody added would give them in an order of its own."""
ROWS = 65536
"""Fetched at a time; between two fetches the reader may cancel."""
SHOWN = 20 << 20
"""From this size on a progress bar is shown."""


class NsysFile(AbstractContextManager["NsysFile"]):
    """An open file. Raises :class:`TraceError` for what is no SQLite file, is damaged, or has over ``max_bytes``."""

    def __init__(self, path: str | Path, max_bytes: int, progress: bool, cancel: Callable[[], bool] | None) -> None:
        self.path = Path(path)
        self._cancel = cancel
        size = self._check(max_bytes)
        address = f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"
        self._db = sqlite3.connect(address, uri=True)
        self._db.text_factory = lambda text: text.decode("utf-8", "replace")  # names may be cut within a character
        self._bar = tqdm(desc=self.path.name, unit="rows", disable=not progress or size < SHOWN)
        try:
            names = [name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
            self.tables: dict[str, tuple[str, ...]] = {
                str(name): tuple(str(row[1]) for row in self.rows(f"PRAGMA table_info({quoted(str(name))})"))
                for name in names
            }
            """Columns of each table, by its name."""
            self._strings: dict[int, str] | None = None
        except BaseException:
            self._db.close()
            raise

    def _check(self, max_bytes: int) -> int:
        try:
            with self.path.open("rb") as file:
                head = file.read(len(MAGIC))
            size = self.path.stat().st_size
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if head != MAGIC:
            raw = self.path.suffix in (".nsys-rep", ".qdrep")
            what = (
                "an Nsight Systems report, not its export" if raw else f"no SQLite file (it begins with {head[:8]!r})"
            )
            raise TraceError(f"{self.path}: {what}; make one with `nsys export --type sqlite {self.path.name}`")
        if size > max_bytes:
            raise TraceError(
                f"{self.path}: {size:,} bytes are over the cap of {max_bytes:,}; pass max_bytes={size} to read it"
            )
        return size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._db.close()

    # -- rows

    def rows(self, sql: str) -> Iterable[tuple[Any, ...]]:
        """The rows of a query, fetched piece by piece."""
        for piece in self._pieces(sql):
            yield from piece

    def _pieces(self, sql: str) -> Iterable[list[tuple[Any, ...]]]:
        try:
            cursor = self._db.execute(sql)
            while True:
                if self._cancel is not None and self._cancel():
                    raise TraceCancelled(f"{self.path}: reading was cancelled")
                piece = cursor.fetchmany(ROWS)
                if not piece:
                    return
                self._bar.update(len(piece))
                yield piece
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where an error's own text is damaged
            raise TraceError(
                f"{self.path}: SQLite cannot read it ({error}); export it again with `nsys export --type sqlite`"
            ) from error

    def count(self, table: str) -> int:
        """Rows of a table; 0 where it is missing."""
        if table not in self.tables:
            return 0
        return int(next(iter(self.rows(f"SELECT COUNT(*) FROM {quoted(table)}")))[0])

    def integers(self, table: str, names: Sequence[str]) -> Columns:
        """[rows] int64 for each name, ``NULL`` for missing values and columns; all empty where the table is missing."""
        if table not in self.tables:
            return {name: np.empty(0, np.int64) for name in names}
        has = self.tables[table]
        wanted = [f"COALESCE({quoted(name)}, {NULL})" if name in has else str(NULL) for name in names]
        pieces = [np.empty((0, len(names)), np.int64)]
        try:
            for rows in self._pieces(f"SELECT {', '.join(wanted)} FROM {quoted(table)} {ORDER}"):
                pieces.append(np.array(rows, np.int64))
        except (ValueError, TypeError, OverflowError) as error:
            raise TraceError(f"{self.path}: table {table} holds something else than integers ({error})") from error
        found = np.concatenate(pieces)
        return {name: found[:, i] for i, name in enumerate(names)}

    def texts(self, table: str, name: str) -> list[str | None]:
        """One column as text, in the rows' order; None for NULL and where there is no such column."""
        if table not in self.tables:
            return []
        value = quoted(name) if name in self.tables[table] else "NULL"
        return [
            None if text is None else str(text) for (text,) in self.rows(f"SELECT {value} FROM {quoted(table)} {ORDER}")
        ]

    # -- names

    @property
    def strings(self) -> dict[int, str]:
        """``StringIds``."""
        if self._strings is None:
            keys = self.integers("StringIds", ["id"])["id"].tolist()
            self._strings = {
                key: text for key, text in zip(keys, self.texts("StringIds", "value"), strict=True) if text
            }
        return self._strings

    def string(self, key: int) -> str:
        """Text of a string id; says the id where the file has none."""
        return self.strings.get(key, f"string {key}" if key != NULL else "unnamed")

    def lookup(self, table: str) -> dict[str, str]:
        """A table of names and values, such as ``META_DATA_EXPORT``; empty where it is missing."""
        if not {"name", "value"} <= set(self.tables.get(table, ())):
            return {}
        return {str(name): str(value) for name, value in self.rows(f"SELECT name, value FROM {quoted(table)}")}


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def spread(keys: Array, make: Callable[[int], int]) -> Array:
    """[n] int64: ``make(key)`` for every key, called once for each different one."""
    different, back = np.unique(keys, return_inverse=True)
    return np.fromiter((make(int(key)) for key in different), np.int64, len(different))[back]


def shared_args(builder: TraceBuilder, columns: Columns, make: Callable[[dict[str, int]], bytes | None]) -> Array:
    """[n] int64: position of each row's arguments, -1 where ``make`` gives None.

    ``make`` is called once for each different combination of ``columns``: a million launches of one kernel share one
    text.
    """
    names = list(columns)
    table = np.stack([columns[name] for name in names], axis=1) if names else np.empty((0, 0), np.int64)
    if not len(table):
        return np.empty(0, np.int64)
    # One opaque value a row: a sort by bytes, many times faster than np.unique(axis=0).
    opaque = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1] * table.itemsize))).ravel()
    _, first, back = np.unique(opaque, return_index=True, return_inverse=True)
    position = np.full(len(first), -1, np.int64)
    for place, row in enumerate(table[first].tolist()):
        text = make(dict(zip(names, row, strict=True)))
        if text is not None:
            position[place] = builder.arg(text)
    return position[back]
