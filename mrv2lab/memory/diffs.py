"""Staged diffs on the host, and the uploads that carry them to the device.

A diff is staged by appending to two flat arrays, so that it costs a few hundred nanoseconds and the apply has nothing
to collect: it sends the arrays. Those of a step go in one transfer, since each costs the host ten times a diff.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.runtime.uva import NUMPY_DTYPES, next_power_of_2

Values = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]
Int32 = np.ndarray[Any, np.dtype[np.int32]]

_TYPECODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f"}


@dataclass(frozen=True, slots=True, eq=False)
class StagedDiff:
    """One staged write: ``table[row, start : start + len(values)] = values``, with the values of that moment."""

    row: int
    start: int
    values: np.ndarray[Any, Any]


class DiffList:
    """The staged diffs of one table, in the order in which they were staged."""

    __slots__ = ("_dtype", "_typecode", "contents", "distinct_rows", "heads", "longest")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = NUMPY_DTYPES[dtype]
        self._typecode = _TYPECODES[dtype]
        self.clear()

    def clear(self) -> None:
        """Forget every diff. The arrays are made anew: somebody may still look at the old ones."""
        # row, start and where the values end in contents, diff by diff
        self.heads: array[int] = array("i")
        self.contents: array[Any] = array(self._typecode)
        self.distinct_rows: set[int] = set()
        self.longest = 0
        """Values of the longest diff."""

    def __len__(self) -> int:
        return len(self.heads) // 3

    def append(self, row: int, start: int, values: Values) -> None:
        """Stage one diff. Raises, with nothing staged, for values that the dtype does not hold."""
        length = len(values)
        head = array("i", (row, start, len(self.contents) + length))
        self._extend_contents(values)
        self.heads.extend(head)
        self.distinct_rows.add(row)
        self.longest = max(self.longest, length)

    def extend(self, rows: Int32, starts: Int32, lengths: Int32 | None, contents: Values) -> None:
        """Stage ``w`` diffs, whose values lie end to end in ``contents``; ``lengths`` None: one value each. Empty ones
        are left out. Raises, with nothing staged, as :meth:`append`."""
        if lengths is not None and not lengths.all():
            some = lengths > 0
            rows, starts, lengths = rows[some], starts[some], lengths[some]
        begin, count = len(self.contents), len(rows)
        self._extend_contents(contents)
        heads = np.empty((count, 3), np.int32)
        heads[:, 0] = rows
        heads[:, 1] = starts
        if lengths is None:
            heads[:, 2] = np.arange(begin + 1, begin + count + 1)
            self.longest = self.longest or 1
        elif count:
            heads[:, 2] = begin + np.cumsum(lengths)
            self.longest = max(self.longest, int(lengths.max()))
        self.distinct_rows.update(rows.tolist())
        self.heads.frombytes(heads.tobytes())

    def _extend_contents(self, values: Values) -> None:
        contents = self.contents
        if isinstance(values, np.ndarray):
            held = values.astype(self._dtype, copy=False)
            # As a list is refused: NumPy would wrap a number and cut a fraction off.
            if held is not values and held.dtype.kind == "i" and not np.array_equal(held, values):
                raise OverflowError(f"{values[held != values][0]} is no {held.dtype}")
            contents.frombytes(held.tobytes())
            return
        try:
            contents.extend(values)
        except BaseException:
            del contents[self.heads[-1] if self.heads else 0 :]
            raise

    def matrix(self) -> Int32:
        """[w, 3]: row, start and end of each diff, as a view that keeps :attr:`heads` from growing."""
        return np.frombuffer(self.heads, np.int32).reshape(-1, 3)

    def diffs(self) -> list[StagedDiff]:
        """The diffs one by one, for observers."""
        contents = np.array(self.contents, self._dtype)
        rows, starts, ends = self.heads[::3], self.heads[1::3], self.heads[2::3]
        each = zip(rows, starts, pairwise([0, *ends]), strict=True)
        return [StagedDiff(row, start, contents[begin:end]) for row, start, (begin, end) in each]

    def remove_row(self, row: int) -> None:
        """Forget the diffs of ``row``."""
        if row in self.distinct_rows:
            kept = [diff for diff in self.diffs() if diff.row != row]
            self.clear()
            for diff in kept:
                self.append(diff.row, diff.start, diff.values)

    def overlap(self) -> tuple[int, int] | None:
        """Row and column at which two diffs overlap. Free where no row is staged twice."""
        if 3 * len(self.distinct_rows) == len(self.heads):
            return None
        rows, starts, ends = self.matrix().T
        order = np.lexsort((starts, rows))
        rows, starts, lengths = rows[order], starts[order], np.diff(ends, prepend=np.int32(0))[order]
        found = np.flatnonzero((rows[1:] == rows[:-1]) & (starts[:-1] + lengths[:-1] > starts[1:]))
        return (int(rows[found[0]]), int(starts[found[0] + 1])) if len(found) else None


FEW, FEW_VALUES = 64, 4096
"""Diffs of the least slab beside greater ones, and the values of one table that each of these has room for at least: a
prompt."""


class PackedDiffs:
    """Carries the diffs of one table, or of several of one dtype, through staging uploads of the transfer policy: one
    for ``expected_writes`` and smaller ones, eight times each other's size, that a step with few diffs sends few bytes;
    and greater ones once they are needed. Each has 16 values a diff, of every table.

    ``row_lens``: of several tables, the values of a row of each.
    """

    def __init__(
        self,
        transfers: TransferPolicy,
        name: str,
        dtype: torch.dtype,
        expected_writes: int,
        row_lens: Sequence[int] = (),
    ) -> None:
        self._make = partial(_Slab, transfers, dtype, tuple(row_lens))
        self._name = f"{name}.diffs"
        self._slabs: list[_Slab] = []
        """By size. An outgrown one stays: queued kernels may still read it, and a later step has use for it."""
        writes = FEW
        while writes < expected_writes:
            self._slabs.append(self._make(f"{self._name}.{writes}", writes, FEW_VALUES))
            writes *= 8
        self._slabs.append(self._make(self._name, expected_writes, 0))

    def send(self, lists: Sequence[DiffList]) -> tuple[Parts, int, int]:
        """groups [w] (a diff's is the index of its list; None for one table), rows [w], starts [w], cu_lens [w + 1]
        int32 and contents on the device, how many diffs w > 0 there are, and their greatest length.

        The tensors may be longer than that. Of several tables some diffs are nobody's: they start behind the end of
        their row, so that they write nothing.
        """
        count = sum([len(one.heads) for one in lists]) // 3
        for slab in self._slabs:
            if slab.fits(count, lists):
                break
        else:
            rooms = [next_power_of_2(len(one.contents)) for one in lists]
            slab = self._make(self._name, next_power_of_2(count), 0, rooms)
            self._slabs.append(slab)
        parts, num_writes = slab.send(lists)
        return parts, num_writes, max([one.longest for one in lists])


class _Slab:
    """One upload for up to ``writes`` diffs: groups, rows, starts, where the values begin, and the values.

    Each part begins at a fixed place, and so do the values of each table: where a policy lets a kernel read what a
    later step has written (``unsafe``, or a pool that is too shallow), rows must stay rows, and token ids token ids. A
    slab for more diffs is another upload, for the same reason. Every table has room for 16 values a diff, for a whole
    row of at most ``values``, and for its ``rooms``; the one with the longest rows comes last, and has as much as it
    needs.
    """

    def __init__(
        self,
        transfers: TransferPolicy,
        dtype: torch.dtype,
        row_lens: tuple[int, ...],
        name: str,
        writes: int,
        values: int,
        rooms: Sequence[int] = (),
    ) -> None:
        self._writes = writes
        self._dtype = dtype
        self._words = NUMPY_DTYPES[dtype]().itemsize // 4
        self._depth = transfers.depth
        self._grouped = bool(row_lens)
        self._row_lens = row_lens or (0,)
        self._order = sorted(range(len(self._row_lens)), key=self._row_lens.__getitem__)
        self._rooms = [max(min(row_len, 16) * writes, min(row_len, values)) for row_len in self._row_lens]
        self._rooms[self._order[-1]] = max(16 * writes, values)
        if rooms:
            self._rooms = list(map(max, self._rooms, rooms))
        self._places = [0] * len(self._rooms)
        place = 0
        for group in self._order:
            self._places[group] = place
            place += self._rooms[group]
        # One column more is the 0 that cu_lens begins with; and one a table leads over to its values.
        self._stride = aligned(writes + 1 + len(row_lens))
        self._contents = (4 if self._grouped else 3) * self._stride
        size = self._contents + place * self._words
        self._upload = transfers.staging(name, size, torch.int32)
        self._views: dict[int, tuple[torch.Tensor, Parts]] = {}
        self._make_host(size)

    def fits(self, count: int, lists: Sequence[DiffList]) -> bool:
        """Whether ``count`` diffs, those of ``lists``, have room."""
        if count > self._writes:
            return False
        return all(len(lists[group].contents) <= self._rooms[group] for group in self._order[:-1])

    def _make_host(self, size: int) -> None:
        # [size] int32: what is sent
        self._host: Int32 = np.zeros(size, np.int32)
        # [3 or 4, stride] of it: groups where they were asked for, rows, starts, ends; diffs from column 1 on, so that
        # the 0 before the first end makes cu_lens of them
        self._heads = self._host[: self._contents].reshape(-1, self._stride)

    def send(self, lists: Sequence[DiffList]) -> tuple[Parts, int]:
        """Send the diffs of all lists, those of one table together; how many there are with those that only lead over
        to the next table's values."""
        words, last = self._words, self._order[-1]
        need = self._contents + words * (self._places[last] + len(lists[last].contents))
        if need > len(self._host):
            self._make_host(next_power_of_2(need))
        host, heads = self._host, self._heads
        at, value = 1, 0
        for group in self._order:
            one, place = lists[group], self._places[group]
            if not one.heads:
                continue
            if value < place:
                heads[:, at] = (group, 0, self._row_lens[group], place)
                at += 1
            given = one.matrix().T
            end = at + given.shape[1]
            part = heads[:, at:end]
            part[-3:] = given
            if self._grouped:
                part[0] = group
            if place:
                part[-1] += place
            at, value = end, place + len(one.contents)
            begin = self._contents + words * place
            host[begin : begin + words * len(one.contents)] = np.frombuffer(one.contents, np.int32)
        self._end(at, value)
        return self._parts(self._upload.send_whole(host[: self._contents + words * value])), at - 1

    def _end(self, column: int, end: int) -> None:
        """Behind the last diff are empty ones: a launch for more diffs that gets to read this slab finds no others."""
        self._heads[-1, column:] = end

    def _parts(self, slab: torch.Tensor) -> Parts:
        """The views of ``slab``, which is one of a few that are used in turn."""
        found = self._views.get(id(slab))
        if found is None:
            if len(self._views) > self._depth:  # one has grown
                self._views.clear()
            heads = slab[: self._contents].view(-1, self._stride)
            groups = heads[0, 1:] if self._grouped else None
            parts = (groups, heads[-3, 1:], heads[-2, 1:], heads[-1], slab[self._contents :].view(self._dtype))
            found = self._views[id(slab)] = slab, parts
        return found[1]


Parts = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def aligned(words: int) -> int:
    """At least ``words``, and a multiple of 16 bytes, by whose alignment Triton compiles a kernel anew."""
    return -(-words // 4) * 4
