"""V1's block tables: the truth is on the host, in batch order, and goes to the device whole in every step.

Counterpart in vLLM: ``BlockTable`` and ``MultiGroupBlockTable`` in ``v1/worker/block_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from mrv2lab.protocol import NULL_BLOCK

GroupBlockIds = Sequence[Sequence[int]]
"""Block ids of one request, one sequence a KV-cache group."""


class HostTable(Protocol):
    """A host table with a copy that kernels read; the runner makes them for its transfer policy."""

    np: np.ndarray[Any, Any]
    """The host's truth."""

    @property
    def gpu(self) -> torch.Tensor:
        """What kernels read; may be another tensor after each publish."""

    @property
    def stays(self) -> bool:
        """Whether ``gpu`` is one tensor for good, in device memory, as a graph needs it."""

    def publish(self, rows: int | None = None) -> None:
        """Make the first ``rows`` rows (all of them if None) readable by kernels queued from now on."""


MakeTable = Callable[[str, tuple[int, ...], torch.dtype], HostTable]
"""``make_table(name, shape, dtype)``: a table of fixed shape, zero at first."""


class BlockTable:
    """One KV-cache group's block ids, row = batch position.

    Invariant: entries past ``num_blocks_per_row`` are the null block 0, in every row, so that padding which reads them
    reads nobody's KV (vLLM #49757).
    """

    def __init__(self, table: HostTable, num_rows: int) -> None:
        self.table = table
        # [R, B] int32, host truth
        self.np: np.ndarray[Any, np.dtype[np.int32]] = table.np
        # [R] int32
        self.num_blocks_per_row: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(num_rows, np.int32)
        self.max_num_blocks = int(self.np.shape[1])

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks behind those that ``row`` has."""
        if block_ids:
            start = int(self.num_blocks_per_row[row])
            end = start + len(block_ids)
            self.np[row, start:end] = block_ids
            self.num_blocks_per_row[row] = end

    def clear_row(self, row: int) -> None:
        """Forget the blocks of ``row``: null blocks from end to end."""
        self.np[row, : self.num_blocks_per_row[row]] = NULL_BLOCK
        self.num_blocks_per_row[row] = 0

    def move_row(self, src: int, dst: int) -> int:
        """Give ``dst`` the blocks of ``src``, which is cleared; returns the bytes moved."""
        self.clear_row(dst)
        count = self.num_blocks_per_row[src]
        self.np[dst, :count] = self.np[src, :count]
        self.num_blocks_per_row[dst] = count
        self.clear_row(src)
        return (int(count) + 1) * self.np.itemsize

    def swap_row(self, i: int, j: int) -> int:
        """Exchange two rows; returns the bytes moved."""
        counts = self.num_blocks_per_row
        # Past the longer of the two, both hold null blocks.
        longest = max(int(counts[i]), int(counts[j]))
        rows, swapped = [i, j], [j, i]
        self.np[rows, :longest] = self.np[swapped, :longest]
        counts[rows] = counts[swapped]
        return 2 * (longest + 1) * self.np.itemsize


class MultiGroupBlockTable:
    """The block tables of all KV-cache groups, edited together.

    Each edit of ``append_row`` and ``add_row`` raises before anything has changed: ``ValueError`` when there is not one
    list a group, ``RuntimeError`` when a row's capacity (max_model_len) would be exceeded.
    """

    def __init__(
        self, block_sizes: Sequence[int], max_num_reqs: int, max_model_len: int, make_table: MakeTable
    ) -> None:
        self.block_sizes = tuple(block_sizes)
        # G x [R, B_g] int32
        self.groups = tuple(
            BlockTable(
                make_table(f"block_table.{g}", (max_num_reqs, -(-max_model_len // size)), torch.int32), max_num_reqs
            )
            for g, size in enumerate(self.block_sizes)
        )

    def __getitem__(self, group: int) -> BlockTable:
        return self.groups[group]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def gpu(self) -> tuple[torch.Tensor, ...]:
        """What kernels read, G x [R, B_g] int32, as of the last commit."""
        return tuple(group.table.gpu for group in self.groups)

    @property
    def stays(self) -> bool:
        """Whether ``gpu`` has fixed addresses."""
        return all(group.table.stays for group in self.groups)

    def check(self, block_ids: GroupBlockIds, row: int | None = None) -> None:
        """Raise if ``block_ids`` do not fit behind the blocks of ``row`` (None: into an empty row)."""
        if len(block_ids) != len(self.groups):
            raise ValueError(
                f"block ids came for {len(block_ids)} KV-cache groups, but there are {len(self.groups)}; "
                "give one list a group"
            )
        for g, (group, ids) in enumerate(zip(self.groups, block_ids, strict=True)):
            total = len(ids) + (0 if row is None else int(group.num_blocks_per_row[row]))
            if total > group.max_num_blocks:
                raise RuntimeError(
                    f"a row would hold {total} blocks in group {g}, but max_model_len allows {group.max_num_blocks}; "
                    "raise max_model_len or send fewer blocks"
                )

    def append_row(self, block_ids: GroupBlockIds, row: int) -> None:
        """Add new blocks behind those that ``row`` has."""
        self.check(block_ids, row)
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.append_row(ids, row)

    def add_row(self, block_ids: GroupBlockIds, row: int) -> None:
        """Replace the blocks of ``row`` by those of its new owner."""
        self.check(block_ids)
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.clear_row(row)
            group.append_row(ids, row)

    def clear_row(self, row: int) -> None:
        """Null blocks from end to end."""
        for group in self.groups:
            group.clear_row(row)

    def move_row(self, src: int, dst: int) -> int:
        """Give ``dst`` the blocks of ``src``, which is cleared; returns the bytes moved."""
        return sum(group.move_row(src, dst) for group in self.groups)

    def swap_row(self, i: int, j: int) -> int:
        """Exchange two rows; returns the bytes moved."""
        return sum(group.swap_row(i, j) for group in self.groups)

    def commit(self, num_reqs: int) -> None:
        """Send the whole ``[:num_reqs]`` rectangle of each group, changed or not, as V1 does in every step (a copy of
        the dirty rows alone was proposed and closed: vLLM #47936)."""
        for group in self.groups:
            group.table.publish(num_reqs)

    def reset(self) -> None:
        """Clear every row."""
        for group in self.groups:
            group.np.fill(NULL_BLOCK)
            group.num_blocks_per_row.fill(0)

    def tables(self) -> dict[str, torch.Tensor]:
        """What kernels read, by name."""
        return {f"block_table.{g}": table for g, table in enumerate(self.gpu)}

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth, by name, as the next commit will send it."""
        return {f"block_table.{g}": group.np for g, group in enumerate(self.groups)}
