"""Large tables that live on the device and are changed by packed diffs. Counterpart in vLLM: ``StagedWriteTensor``.

The host collects diffs ``(row, start, values)``; ``apply_write`` sends them packed and launches one kernel. State that
the device writes too (num_computed_tokens) needs nothing more: the host's writes are kernels in the same stream order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrv2lab.memory.diffs import DiffList, Int32, PackedDiffs, StagedDiff, Values
from mrv2lab.ops._repeat import device_address
from mrv2lab.ops.apply_write import BLOCK, apply_write
from mrv2lab.ops.fused_apply_write import fused_apply_write
from mrv2lab.runtime.base import PlaceError, Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.runtime.uva import NUMPY_DTYPES, next_power_of_2


class StagedWriteTensor:
    """A 1-D or 2-D table ``gpu`` of int32, int64 or float32, in device memory or (``place="uva"``) in host memory.

    ``transfers`` None: a :class:`FusedStagedWriter` applies its diffs, with those of other tables.

    Diffs of one apply must not overlap: each is its own program of the kernel, so their order is undefined. Raises
    ``IndexError`` for a write outside the table when it is staged, ``ValueError`` for overlapping diffs at the apply.
    """

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy | None,
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
        # [num_rows, row_len]: gpu, or its view
        self.matrix = self.gpu if len(size) > 1 else self.gpu.view(-1, 1)
        self.staged = DiffList(dtype)
        """What was staged and not applied yet."""
        self._packed = PackedDiffs(transfers, name, dtype, expected_writes) if transfers is not None else None

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
        """Send the staged diffs and launch the kernel that applies them; nothing if none are staged. Raises
        ``RuntimeError`` for a table whose diffs go with those of others."""
        if not self.staged.heads:
            return
        if self._packed is None:
            raise RuntimeError(
                f"{self.name}: its diffs go with those of other tables; its FusedStagedWriter applies them"
            )
        self.check_disjoint()
        (_, rows, starts, cu_lens, contents), count, longest = self._packed.send((self.staged,))
        apply_write(self.rt, self.matrix, rows, starts, cu_lens, contents, count, _reach(longest))
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
    """Applies the pending diffs of several int32 tables in one launch. Counterpart in vLLM: ``FusedStagedWriter``.

    They lie in device memory or UVA. Raises ``TypeError`` for other dtypes, ``PlaceError`` for pageable memory.
    """

    def __init__(self, rt: Runtime, transfers: TransferPolicy, name: str, tables: Sequence[StagedWriteTensor]) -> None:
        for table in tables:
            if table.gpu.dtype != torch.int32:
                raise TypeError(f"fused staged writes need int32 tables, but {table.name} is {table.gpu.dtype}")
        self.rt = rt
        self.tables = tuple(tables)
        self._lists = [table.staged for table in tables]
        matrices = [table.matrix for table in tables]
        # [G] uint64, [G] int64
        self.pointers = pointers(rt, matrices, f"{name}.pointers")
        self.strides = strides(rt, matrices, f"{name}.strides")
        most = sum(table.num_rows for table in tables)  # one a row and table in a step
        self._packed = PackedDiffs(transfers, name, torch.int32, most, [table.row_len for table in tables])

    def apply_write(self) -> None:
        """Send every table's staged diffs and launch the one kernel; nothing if none are staged. Raises ``ValueError``
        for diffs that overlap, with nothing sent."""
        staged = [table for table in self.tables if table.staged.heads]
        if not staged:
            return
        for table in staged:
            table.check_disjoint()
        parts, count, longest = self._packed.send(self._lists)
        # A launch says that it writes what it writes, not whatever it could.
        written = tuple([table.matrix if table.staged.heads else None for table in self.tables])
        fused_apply_write(self.rt, written, self.pointers, self.strides, *parts, count, _reach(longest))
        for table in staged:
            table.drop_pending()


def pointers(rt: Runtime, tables: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """[G] uint64 on the device: where kernels find each table. For constructors. Raises ``PlaceError`` for a table in
    pageable memory."""
    return rt.adopt(torch.tensor([_address(rt, table) for table in tables], dtype=torch.uint64), name)


def strides(rt: Runtime, tables: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """[G] int64 on the device: elements from a row of each table to the next. For constructors."""
    return rt.adopt(torch.tensor([table.stride(0) for table in tables]), name)


def _address(rt: Runtime, table: torch.Tensor) -> int:
    if rt.device.type != "cuda" or table.is_cuda:
        return table.data_ptr()
    address = device_address(table)
    if type(address) is not int:
        raise PlaceError(f"kernels do not reach the host table {rt.registry.name(table)!r}: it is not page-locked")
    return address


def _reach(length: int) -> int:
    """Values for which a launch has programs: at least ``length``, and the same for many a length, since a launch that
    is an earlier one again costs the host least (``ops/_repeat.py``). Programs behind a diff's end do nothing."""
    return max(BLOCK, next_power_of_2(length))
