"""Large tables that live on the device and are changed by packed diffs. Counterpart in vLLM: ``StagedWriteTensor``.

The host collects diffs ``(row, start, values)``; ``apply_write`` sends them packed and launches one kernel. State that
the device writes too (num_computed_tokens) needs nothing more: the host's writes are kernels in the same stream order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrv2lab.memory.diffs import DiffList, Int32, PackedDiffs, StagedDiff, Values
from mrv2lab.ops.apply_write import apply_write
from mrv2lab.ops.fused_apply_write import fused_apply_write
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.runtime.uva import NUMPY_DTYPES


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
        self.staged = DiffList(dtype)
        """What was staged and not applied yet."""
        self._packed = PackedDiffs(transfers, name, dtype, expected_writes)

    @property
    def pending(self) -> list[StagedDiff]:
        """Diffs that were staged and not applied yet, made for whoever looks."""
        return self.staged.diffs()

    def stage_write(self, row: int, start: int, values: Values) -> None:
        """Stage ``table[row, start : start + len(values)] = values``."""
        length = len(values)
        if not (0 <= row < self.num_rows and 0 <= start <= self.row_len - length):
            raise self._outside(row, start, length)
        if length:
            self.staged.append(row, start, values)

    def stage_writes(self, rows: Int32, starts: Int32, lengths: Int32, contents: Values) -> None:
        """Stage ``w`` writes at once: the i-th puts ``lengths[i]`` values, which lie end to end in ``contents``, into
        row ``rows[i]`` from column ``starts[i]`` on. All int32[w]. Raises before anything is staged."""
        outside = (rows < 0) | (rows >= self.num_rows) | (starts < 0) | (starts + lengths > self.row_len)
        if outside.any():
            i = int(outside.argmax())
            raise self._outside(int(rows[i]), int(starts[i]), int(lengths[i]))
        if len(contents) != lengths.sum():
            raise ValueError(f"{self.name}: {len(contents)} values for {int(lengths.sum())} cells")
        if len(contents):
            self.staged.extend(rows, starts, lengths, contents)

    def _outside(self, row: int, start: int, length: int) -> IndexError:
        return IndexError(
            f"{self.name}: row {row}, columns {start}..{start + length - 1} lie outside "
            f"[{self.num_rows}, {self.row_len}]"
        )

    def stage_write_elem(self, row: int, value: int | float) -> None:
        """Stage ``table[row] = value`` (the first column of a 2-D table)."""
        self.stage_write(row, 0, (value,))

    def apply_write(self) -> None:
        """Send the staged diffs and launch the kernel that applies them; nothing if none are staged."""
        if not self.staged:
            return
        self.check_disjoint()
        (_, rows, starts, cu_lens, contents), longest = self._packed.send((self.staged,))
        apply_write(self.rt, self._matrix, rows, starts, cu_lens, contents, len(self.staged), longest)
        self.drop_pending()

    def check_disjoint(self) -> None:
        """Raise ``ValueError`` if two staged diffs overlap. Free where no row is staged twice."""
        found = self.staged.overlap()
        if found is not None:
            raise ValueError(f"{self.name}: two staged writes overlap in row {found[0]} at column {found[1]}")

    def unstage(self, row: int) -> None:
        """Forget what is staged for ``row``, whose owner is gone."""
        self.staged.remove_row(row)

    def drop_pending(self) -> None:
        """Forget the staged diffs: the way back after a step that broke off between staging and applying."""
        self.staged.clear()


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
        self._packed = PackedDiffs(transfers, name, torch.int32, expected, grouped=True)

    def apply_write(self) -> None:
        """Send every table's staged diffs and launch the one kernel; nothing if none are staged."""
        count = sum([len(table.staged) for table in self.tables])
        if not count:
            return
        for table in self.tables:
            table.check_disjoint()
        parts, longest = self._packed.send([table.staged for table in self.tables])
        fused_apply_write(self.rt, self._tensors, self.pointers, self.strides, *parts, count, longest)
        for table in self.tables:
            table.drop_pending()
