"""Block tables of every request, one table a KV-cache group. Counterpart in vLLM: ``block_table.py``."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

import numpy as np
import torch

from mrv2lab.memory.diffs import Int32, StagedDiff
from mrv2lab.memory.staged_write import FusedStagedWriter, StagedWriteTensor, pointers
from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.slot_mapping import slot_mapping
from mrv2lab.protocol import BlockIds
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.state.prefix import Prefix


class BlockTables:
    """Row-indexed block ids on the device, gathered each step into fixed input tables in batch order.

    Entries past a row's ``num_blocks`` are stale and never read. Input-table rows past the batch are the null block 0.
    Addresses never change.
    """

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        *,
        block_sizes: tuple[int, ...],
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.rt = rt
        self.block_sizes = block_sizes
        groups = range(len(block_sizes))
        widths = [-(-max_model_len // size) for size in block_sizes]
        # G x [R, B_g] int32, by row
        self.row_tables = tuple(
            StagedWriteTensor(rt, None, f"block_table.{g}", (max_num_reqs, widths[g]), torch.int32) for g in groups
        )
        self._gpu_tables = tuple(table.gpu for table in self.row_tables)
        # [G, R] int32: how many blocks each row has
        self.num_blocks = UvaBackedTensor(transfers, "num_blocks", (len(block_sizes), max_num_reqs), torch.int32)
        # G x [R, B_g] int32, by batch index: what attention reads
        self.input_tables = tuple(
            rt.zeros((max_num_reqs, widths[g]), torch.int32, name=f"input_block_table.{g}") for g in groups
        )
        # [G, T] int64: where each token's KV goes, -1 = nowhere
        self.slot_mappings = rt.zeros((len(block_sizes), max_num_batched_tokens), torch.int64, name="slot_mappings")
        self._writer = FusedStagedWriter(rt, transfers, "block_tables", self.row_tables)
        self._input_pointers = pointers(rt, self.input_tables, "input_table.pointers")
        # [G] int32
        self.block_sizes_gpu = rt.adopt(torch.tensor(block_sizes, dtype=torch.int32), "block_sizes")
        self.pointed_tables = (
            self._gpu_tables,
            self._writer.pointers,
            self.input_tables,
            self._input_pointers,
            self._writer.strides,
        )
        """Row tables and input tables, each with its pointers, and the widths of both, as kernels take them."""
        self._first_rows = tuple(Prefix(table) for table in self.input_tables)
        self._num_dirty_rows = 0
        self._changed = False

    def append_block_ids(self, row: int, block_ids: BlockIds, *, overwrite: bool) -> None:
        """Stage new blocks of ``row``: appended, or from column 0 when the row has a new owner.

        Raises, before anything is staged, ``RuntimeError`` when the row's capacity (max_model_len) is exceeded and
        ``ValueError`` when there is not one list a group.
        """
        counts = self.num_blocks.np
        starts = [0] * len(block_ids) if overwrite else counts[:, row].tolist()
        for g, (table, start, ids) in enumerate(zip(self.row_tables, starts, block_ids, strict=True)):
            if start + len(ids) > table.row_len:
                raise self._overfull(row, start + len(ids), g)
        for g, ids in enumerate(block_ids):
            table = self.row_tables[g]
            if overwrite:
                table.unstage(row)
            if ids:
                table.stage_write(row, starts[g], ids)
            counts[g, row] = starts[g] + len(ids)
        self._changed = True

    def extend_block_ids(self, rows: Int32, block_ids: Collection[BlockIds]) -> None:
        """Stage new blocks of ``rows`` int32[c], each behind those it has. Raises as :meth:`append_block_ids`.

        A decode step gives some of its requests a block each: one call for all of them, not one a request.
        """
        by_group = list(zip(*block_ids, strict=True))  # G x c lists
        if len(by_group) != len(self.row_tables):
            raise ValueError(f"{len(by_group)} lists of blocks for {len(self.row_tables)} KV-cache groups")
        staged = []
        for g, (table, lists) in enumerate(zip(self.row_tables, by_group, strict=True)):
            ids, counts = list(chain.from_iterable(lists)), self.num_blocks.np[g]
            # Mostly one block each, which spares the lengths.
            one_each = len(ids) == len(lists) and all(lists)
            lengths = None if one_each else np.fromiter(map(len, lists), np.int32, len(lists))
            starts = counts[rows]
            ends = starts + (1 if lengths is None else lengths)
            if ends.max() > table.row_len:
                i = int(ends.argmax())
                raise self._overfull(int(rows[i]), int(ends[i]), g)
            staged.append((table.staged, counts, starts, ends, lengths, ids))
        for diffs, counts, starts, ends, lengths, ids in staged:
            diffs.extend(rows, starts, lengths, ids)
            counts[rows] = ends
        self._changed = True

    def _overfull(self, row: int, count: int, g: int) -> RuntimeError:
        return RuntimeError(
            f"row {row} would hold {count} blocks in group {g}, but max_model_len allows {self.row_tables[g].row_len}"
        )

    def apply_staged_writes(self) -> None:
        """Flush the staged blocks of every group in one launch; nothing if no table changed."""
        if self._changed:
            self._changed = False
            self._writer.apply_write()
            self.num_blocks.publish()

    def gather(self, idx_mapping: torch.Tensor, num_reqs: int, num_reqs_padded: int) -> tuple[torch.Tensor, ...]:
        """Fill the input tables in batch order; returns their first ``num_reqs_padded`` rows, one table a group."""
        gather_block_tables(
            self.rt,
            idx_mapping,
            self.num_blocks.gpu,
            *self.pointed_tables,
            num_reqs,
            self.rows_to_fill(num_reqs, num_reqs_padded),
        )
        return self.first_rows(num_reqs_padded)

    def rows_to_fill(self, num_reqs: int, num_reqs_padded: int) -> int:
        """How many rows of the input tables the step's gather writes: the padded batch, and whatever the last gather
        has left behind it. To be asked once a gather."""
        num_rows, self._num_dirty_rows = max(num_reqs_padded, self._num_dirty_rows), num_reqs
        return num_rows

    def first_rows(self, n: int) -> tuple[torch.Tensor, ...]:
        """The first ``n`` rows of the input tables, one table a group."""
        return tuple([first(n) for first in self._first_rows])

    def compute_slot_mappings(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, positions: torch.Tensor, num_reqs: int
    ) -> torch.Tensor:
        """Fill all of ``slot_mappings`` [G, T] for this step's tokens and return it."""
        slot_mapping(
            self.rt,
            idx_mapping,
            query_start_loc,
            positions,
            self._gpu_tables,
            self._writer.pointers,
            self._writer.strides,
            self.block_sizes_gpu,
            self.slot_mappings,
            num_reqs,
        )
        return self.slot_mappings

    def reset(self) -> None:
        """Forget what is staged; rows get their blocks anew when they get an owner."""
        for table in self.row_tables:
            table.drop_pending()
        self._changed = True  # a queued copy of num_blocks may have been dropped, so it is published anew
        self._num_dirty_rows = self.input_tables[0].shape[0]

    def staged(self) -> dict[str, list[StagedDiff]]:
        """The diffs that the next ``apply_staged_writes`` will apply, by table."""
        return {table.name: table.pending for table in self.row_tables if table.staged}

    def tables(self) -> dict[str, torch.Tensor]:
        """Every table that kernels read, by name."""
        inputs = {f"input_block_table.{g}": table for g, table in enumerate(self.input_tables)}
        rows = {table.name: table.gpu for table in self.row_tables}
        return rows | inputs | {"num_blocks": self.num_blocks.gpu, "slot_mappings": self.slot_mappings}

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth of the published tables, by name."""
        return {"num_blocks": self.num_blocks.np}
