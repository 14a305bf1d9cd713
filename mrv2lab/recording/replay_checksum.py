"""Checksums of the rebuilt tables, by the spec of the op that the recorder launches on the device's."""

from __future__ import annotations

import numpy as np

from mrv2lab.ops.checksum import checksum
from mrv2lab.recording.schema import Array

WORD = 1 << 64


def valid_lengths(name: str, tables: dict[str, Array]) -> Array | None:
    """How many cells of each row of the table count, int32[rows]; None = all. What lies behind them is stale."""
    lengths: Array | None = None
    if name == "all_token_ids":
        lengths = tables["total_len"]
    elif name.startswith("block_table."):
        lengths = tables["num_blocks"][int(name.rpartition(".")[2])]
    return lengths


def table_checksum(name: str, tables: dict[str, Array]) -> int:
    """64-bit checksum of one table, 0 .. 2^64 - 1. Float tables count by their bits."""
    table = tables[name]
    if table.dtype == np.float32:
        table = table.view(np.int32)
    lengths = valid_lengths(name, tables)
    if lengths is None:
        # A cell counts by its flat index, so a table whose cells all count may as well be one long row.
        table, lengths = table.reshape(1, -1), np.array([table.size], np.int32)
    out = np.zeros(len(table), np.int64)
    checksum.spec(table, lengths, out)
    return int(out.view(np.uint64).sum(dtype=np.uint64))
