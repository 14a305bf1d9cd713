"""Staged diffs on the host, and the uploads that carry them to the device.

A diff is staged by appending to four flat arrays, so that it costs a few hundred nanoseconds and the apply has nothing
to collect: it sends the arrays. Those of a step go in one transfer, since each costs the host ten times a diff.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.transfer import TransferPolicy, Upload
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

    __slots__ = ("_dtype", "_typecode", "contents", "distinct_rows", "ends", "rows", "starts")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = NUMPY_DTYPES[dtype]
        self._typecode = _TYPECODES[dtype]
        self.clear()

    def clear(self) -> None:
        """Forget every diff. The arrays are made anew: somebody may still look at the old ones."""
        self.rows: array[int] = array("i")
        self.starts: array[int] = array("i")
        # where each diff's values end in contents
        self.ends: array[int] = array("i")
        self.contents: array[Any] = array(self._typecode)
        self.distinct_rows: set[int] = set()

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: int, start: int, values: Values) -> None:
        """Stage one diff. Raises, with nothing staged, for values that the dtype does not hold."""
        self._extend_contents(values)
        self.starts.append(start)
        self.ends.append(len(self.contents))
        self.distinct_rows.add(row)
        self.rows.append(row)

    def extend(self, rows: Int32, starts: Int32, lengths: Int32 | None, contents: Values) -> None:
        """Stage ``w`` diffs, whose values lie end to end in ``contents``; ``lengths`` None: one value each. Empty ones
        are left out. Raises, with nothing staged, as :meth:`append`."""
        if lengths is not None and not lengths.all():
            some = lengths > 0
            rows, starts, lengths = rows[some], starts[some], lengths[some]
        begin = len(self.contents)
        self._extend_contents(contents)
        if lengths is None:
            self.ends.extend(range(begin + 1, len(self.contents) + 1))
        else:
            self.ends.frombytes((begin + np.cumsum(lengths)).astype(np.int32).tobytes())
        self.starts.frombytes(starts.tobytes())
        self.distinct_rows.update(rows.tolist())
        self.rows.frombytes(rows.tobytes())

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
            del contents[self.ends[-1] if self.ends else 0 :]
            raise

    def diffs(self) -> list[StagedDiff]:
        """The diffs one by one, for observers."""
        contents = np.array(self.contents, self._dtype)
        each = zip(self.rows, self.starts, pairwise([0, *self.ends]), strict=True)
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
        if len(self.distinct_rows) == len(self.rows):
            return None
        rows, starts, ends = (np.frombuffer(one, np.int32) for one in (self.rows, self.starts, self.ends))
        order = np.lexsort((starts, rows))
        rows, starts, lengths = rows[order], starts[order], np.diff(ends, prepend=np.int32(0))[order]
        found = np.flatnonzero((rows[1:] == rows[:-1]) & (starts[:-1] + lengths[:-1] > starts[1:]))
        return (int(rows[found[0]]), int(starts[found[0] + 1])) if len(found) else None


class PackedDiffs:
    """The slab that carries the diffs of one table, or of several of one dtype, through a staging upload of the
    transfer policy: groups, rows, starts, where the values begin, and the values.

    Each part begins at a fixed place: where a policy lets a kernel read what a later step has written (``unsafe``, or a
    pool that is too shallow), rows must stay rows. A slab for more diffs is another upload, for the same reason.
    """

    def __init__(
        self, transfers: TransferPolicy, name: str, dtype: torch.dtype, expected_writes: int, grouped: bool = False
    ) -> None:
        self._transfers = transfers
        self._name = f"{name}.diffs"
        self._dtype = dtype
        self._words = NUMPY_DTYPES[dtype]().itemsize // 4
        self._grouped = grouped
        self._outgrown: list[Upload] = []
        """What queued kernels may still read; each is at most half of the next."""
        self._make(expected_writes)

    def _make(self, writes: int) -> None:
        """An upload for ``writes`` diffs of 16 values each. It grows by itself for more values."""
        self._writes = writes
        sizes = (writes if self._grouped else 0, writes, writes, writes + 1)
        self._places = slab_places(sizes)
        self._upload = self._transfers.staging(self._name, self._places[-1] + 16 * writes * self._words, torch.int32)
        # [words] int32: what is sent
        self._host: Int32 = np.zeros(self._places[-1] + 16 * writes * self._words, np.int32)
        self._views: dict[int, tuple[torch.Tensor, Parts]] = {}

    def send(self, lists: Sequence[DiffList]) -> tuple[Parts, int]:
        """groups [w] (a diff's is the index of its list; None where they were not asked for), rows [w], starts [w],
        cu_lens [w + 1] int32 and contents on the device, and the greatest length.

        The tensors may be longer than that.
        """
        counts = [len(one) for one in lists]
        total = sum(counts)
        if total > self._writes:
            self._outgrown.append(self._upload)
            self._make(next_power_of_2(total))
        groups, rows, starts, cu_lens, contents = self._places
        words = self._words * sum([len(one.contents) for one in lists])
        if contents + words > len(self._host):
            self._host = np.zeros(next_power_of_2(contents + words), np.int32)
        host = self._host
        at, end, value = 0, cu_lens + 1, contents
        host[cu_lens] = 0
        for group, (count, one) in enumerate(zip(counts, lists, strict=True)):
            if not count:
                continue
            if self._grouped:
                host[groups + at : groups + at + count] = group
            host[rows + at : rows + at + count] = one.rows
            host[starts + at : starts + at + count] = one.starts
            ends = host[end : end + count]
            ends[:] = one.ends
            if value > contents:
                ends += (value - contents) // self._words
            size = self._words * len(one.contents)
            host[value : value + size] = np.frombuffer(one.contents, np.int32)
            at, end, value = at + count, end + count, value + size
        slab = self._upload.send_whole(host[:value])
        lengths = host[cu_lens + 1 : end] - host[cu_lens : end - 1]
        return self._parts(slab), int(lengths.max())

    def _parts(self, slab: torch.Tensor) -> Parts:
        """The views of ``slab``, which is one of a few that are used in turn."""
        found = self._views.get(id(slab))
        if found is None:
            if len(self._views) > self._transfers.depth:  # one has grown
                self._views.clear()
            groups, rows, starts, cu_lens, contents = self._places
            writes = self._writes
            parts = (
                slab[groups : groups + writes] if self._grouped else None,
                slab[rows : rows + writes],
                slab[starts : starts + writes],
                slab[cu_lens : cu_lens + writes + 1],
                slab[contents:].view(self._dtype),
            )
            found = self._views[id(slab)] = slab, parts
        return found[1]


Parts = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def slab_places(sizes: Sequence[int]) -> list[int]:
    """Where each of the parts of ``sizes`` words begins, and where they end: at multiples of 16 bytes, by whose
    alignment Triton compiles a kernel anew."""
    places = [0]
    for size in sizes:
        places.append(-(-(places[-1] + size) // 4) * 4)
    return places
