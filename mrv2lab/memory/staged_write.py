"""Large tables that live on the device and are changed by packed diffs. Counterpart in vLLM: ``StagedWriteTensor``.

The host collects diffs ``(row, start, values)``; ``apply_write`` sends them packed and launches one kernel. State that
the device writes too (num_computed_tokens) needs nothing more: the host's writes are kernels in the same stream order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mrv2lab.ops.apply_write import apply_write
from mrv2lab.ops.fused_apply_write import fused_apply_write
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.runtime.uva import NUMPY_DTYPES

Values = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class StagedDiff:
    """One staged write: ``table[row, start : start + len(values)] = values``, with the values of that moment."""

    row: int
    start: int
    values: np.ndarray[Any, Any]


class StagedWriteTensor:
    """A 1-D or 2-D table ``gpu`` of int32, int64 or float32, in device memory or (``place="uva"``) in host memory.

    Diffs of one apply must not overlap: each is its own program of the kernel, so their order is undefined. Raises
    ``IndexError`` for a write outside the table when it is staged, ``ValueError`` for overlapping diffs at the apply.
    """

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        name: str,
        shape: int | tuple[int, ...],
        dtype: torch.dtype,
        *,
        place: str = "device",
        expected_writes: int = 64,
    ) -> None:
        if dtype not in NUMPY_DTYPES:
            raise TypeError(f"staged writes carry int32, int64 or float32, not {dtype}")
        self.rt = rt
        self.name = name
        self.gpu = rt.zeros(shape, dtype, name=name, place=place)
        size = (shape,) if isinstance(shape, int) else shape
        self.num_rows, self.row_len = size[0], (size[1] if len(size) > 1 else 1)
        self._matrix = self.gpu if len(size) > 1 else self.gpu.view(-1, 1)
        self.pending: list[StagedDiff] = []
        """Diffs that were staged and not applied yet."""
        self._pending_rows: set[int] = set()
        self._dtype = NUMPY_DTYPES[dtype]
        self._packed = PackedDiffs(transfers, name, dtype, expected_writes)

    def stage_write(self, row: int, start: int, values: Values) -> None:
        """Stage ``table[row, start : start + len(values)] = values``."""
        if not (0 <= row < self.num_rows and start >= 0 and start + len(values) <= self.row_len):
            raise IndexError(
                f"{self.name}: row {row}, columns {start}..{start + len(values) - 1} lie outside "
                f"[{self.num_rows}, {self.row_len}]"
            )
        if len(values):
            self.pending.append(StagedDiff(row, start, np.array(values, self._dtype)))
            self._pending_rows.add(row)

    def stage_write_elem(self, row: int, value: int | float) -> None:
        """Stage ``table[row] = value`` (the first column of a 2-D table)."""
        self.stage_write(row, 0, (value,))

    def apply_write(self) -> None:
        """Send the staged diffs and launch the kernel that applies them; nothing if none are staged."""
        if not self.pending:
            return
        self.check_disjoint()
        rows, starts, cu_lens, contents, longest = self._packed.send(self.pending)
        apply_write(self.rt, self._matrix, rows, starts, cu_lens, contents, len(self.pending), longest)
        self.drop_pending()

    def check_disjoint(self) -> None:
        """Raise ``ValueError`` if two staged diffs overlap. Free where no row is staged twice."""
        if len(self._pending_rows) == len(self.pending):
            return
        ordered = sorted(self.pending, key=lambda diff: (diff.row, diff.start))
        for one, other in pairwise(ordered):
            if one.row == other.row and one.start + len(one.values) > other.start:
                raise ValueError(f"{self.name}: two staged writes overlap in row {one.row} at column {other.start}")

    def unstage(self, row: int) -> None:
        """Forget what is staged for ``row``, whose owner is gone."""
        if row in self._pending_rows:
            self._pending_rows.discard(row)
            self.pending = [diff for diff in self.pending if diff.row != row]

    def drop_pending(self) -> None:
        """Forget the staged diffs: the way back after a step that broke off between staging and applying."""
        self.pending = []
        self._pending_rows = set()


class PackedDiffs:
    """The four arrays that carry diffs to the device, through the transfer policy's staging uploads."""

    def __init__(self, transfers: TransferPolicy, name: str, dtype: torch.dtype, expected_writes: int) -> None:
        self._dtype = NUMPY_DTYPES[dtype]
        self._rows = transfers.staging(f"{name}.rows", expected_writes, torch.int32)
        self._starts = transfers.staging(f"{name}.starts", expected_writes, torch.int32)
        self._cu_lens = transfers.staging(f"{name}.cu_lens", expected_writes + 1, torch.int32)
        self._contents = transfers.staging(f"{name}.contents", 16 * expected_writes, dtype)

    def send(self, diffs: Sequence[StagedDiff]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """rows [w], starts [w], cu_lens [w + 1], contents [sum of lengths] on the device, and the greatest length."""
        count = len(diffs)
        lengths = np.fromiter((len(diff.values) for diff in diffs), np.int32, count)
        cu_lens = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=cu_lens[1:])
        contents = np.empty(cu_lens[-1], self._dtype)
        for diff, start, end in zip(diffs, cu_lens[:-1].tolist(), cu_lens[1:].tolist(), strict=True):
            contents[start:end] = diff.values
        return (
            self._rows.send(np.fromiter((diff.row for diff in diffs), np.int32, count)),
            self._starts.send(np.fromiter((diff.start for diff in diffs), np.int32, count)),
            self._cu_lens.send(cu_lens),
            self._contents.send(contents),
            int(lengths.max()),
        )


class FusedStagedWriter:
    """Applies the pending diffs of several int32 tables in one launch. Counterpart in vLLM: ``FusedStagedWriter``."""

    def __init__(
        self, rt: Runtime, transfers: TransferPolicy, name: str, tables: Sequence[StagedWriteTensor], expected: int
    ) -> None:
        if any(table.gpu.dtype != torch.int32 or table.gpu.dim() != 2 for table in tables):
            raise TypeError("fused staged writes need 2-D int32 tables")
        self.rt = rt
        self.tables = tuple(tables)
        self._tensors = tuple(table.gpu for table in tables)
        self.pointers = rt.adopt(
            torch.tensor([table.data_ptr() for table in self._tensors], dtype=torch.uint64), f"{name}.pointers"
        )
        self.strides = rt.adopt(torch.tensor([table.shape[1] for table in self._tensors]), f"{name}.strides")
        self._groups = transfers.staging(f"{name}.groups", expected, torch.int32)
        self._packed = PackedDiffs(transfers, name, torch.int32, expected)

    def apply_write(self) -> None:
        """Send every table's staged diffs and launch the one kernel; nothing if none are staged."""
        diffs = [diff for table in self.tables for diff in table.pending]
        if not diffs:
            return
        for table in self.tables:
            table.check_disjoint()
        counts = [len(table.pending) for table in self.tables]
        groups = self._groups.send(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        rows, starts, cu_lens, contents, longest = self._packed.send(diffs)
        fused_apply_write(
            self.rt,
            self._tensors,
            self.pointers,
            self.strides,
            groups,
            rows,
            starts,
            cu_lens,
            contents,
            len(diffs),
            longest,
        )
        for table in self.tables:
            table.drop_pending()
