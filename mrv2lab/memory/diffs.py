"""Staged diffs on the host, and the uploads that carry them to the device.

A diff is staged by appending to four flat arrays, so that it costs a few hundred nanoseconds and the apply has nothing
to collect: it sends the arrays.
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
from mrv2lab.runtime.uva import NUMPY_DTYPES

Values = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]

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
        contents = self.contents
        if isinstance(values, np.ndarray):
            contents.frombytes(values.astype(self._dtype).tobytes())
        else:
            try:
                contents.extend(values)
            except BaseException:
                del contents[self.ends[-1] if self.ends else 0 :]
                raise
        self.starts.append(start)
        self.ends.append(len(contents))
        self.distinct_rows.add(row)
        self.rows.append(row)

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
    """The arrays that carry the diffs of one table, or of several of one dtype, through the transfer policy's staging
    uploads. An array of its own for each: where a policy lets a kernel read what a later step has written (``unsafe``,
    or a pool that is too shallow), rows must stay rows."""

    def __init__(
        self, transfers: TransferPolicy, name: str, dtype: torch.dtype, expected_writes: int, grouped: bool = False
    ) -> None:
        def upload(part: str, size: int, dtype: torch.dtype = torch.int32) -> Upload:
            return transfers.staging(f"{name}.{part}", size, dtype)

        self._dtype = NUMPY_DTYPES[dtype]
        self._groups = upload("groups", expected_writes) if grouped else None
        self._rows = upload("rows", expected_writes)
        self._starts = upload("starts", expected_writes)
        self._cu_lens = upload("cu_lens", expected_writes + 1)
        self._contents = upload("contents", 16 * expected_writes, dtype)

    def send(
        self, lists: Sequence[DiffList]
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """groups [w] (a diff's is the index of its list; None where they were not asked for), rows [w], starts [w],
        cu_lens [w + 1] int32 and contents on the device, and the greatest length.

        The tensors may be longer than that.
        """
        counts = [len(one) for one in lists]
        cu_lens = np.zeros(sum(counts) + 1, np.int32)
        at = before = 0
        for count, one in zip(counts, lists, strict=True):
            ends = cu_lens[at + 1 : at + count + 1]
            ends[:] = one.ends
            ends += before
            at, before = at + count, before + len(one.contents)
        groups = None
        if self._groups is not None:
            groups = self._groups.send_whole(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        return (
            groups,
            self._rows.send_whole(_joined([one.rows for one in lists], np.int32)),
            self._starts.send_whole(_joined([one.starts for one in lists], np.int32)),
            self._cu_lens.send_whole(cu_lens),
            self._contents.send_whole(_joined([one.contents for one in lists], self._dtype)),
            int((cu_lens[1:] - cu_lens[:-1]).max()),
        )


def _joined(arrays: list[array[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    if len(arrays) == 1:
        return np.frombuffer(arrays[0], dtype)
    return np.concatenate([np.frombuffer(one, dtype) for one in arrays if one])
