"""The KV cache's blocks as a picture shows them: who holds each, how full it is, and what the step writes into it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mrv2lab.recording.schema import Array

FREE, NULL = -1, -2
"""Owners of a block that no row holds, and of block 0, which is never handed out."""


@dataclass
class Pages:
    """All [num_blocks] int32, after the step."""

    owner: Array
    """Row of its first holder, :data:`FREE` or :data:`NULL`."""
    shared: Array
    """How many rows hold it."""
    fill: Array
    """Tokens of it whose KV is valid."""
    written: Array
    """Tokens that the step wrote into it."""


def pages(
    tables: dict[str, Array],
    rows: list[int],
    valid_tokens: Array,
    slots: Array,
    *,
    num_blocks: int,
    block_size: int,
) -> Pages:
    """The blocks behind the block tables of ``rows``, the first of ``rows`` counting as owner of what is shared.

    ``valid_tokens`` [R]: tokens of each row whose KV is valid. ``slots`` [G, t]: where the step wrote, -1 = nowhere.
    """
    owner = np.full(num_blocks, FREE, np.int32)
    shared, fill = np.zeros(num_blocks, np.int32), np.zeros(num_blocks, np.int32)
    for g, counts in enumerate(tables["num_blocks"]):
        table = tables[f"block_table.{g}"]
        for row in rows:
            held = table[row, : counts[row]]
            inside = np.clip(valid_tokens[row] - np.arange(len(held)) * block_size, 0, block_size)
            there = (held > 0) & (held < num_blocks)
            held, inside = held[there], inside[there]
            owner[held] = np.where(owner[held] == FREE, row, owner[held])
            shared[held] += 1
            fill[held] = np.maximum(fill[held], inside)
    owner[0] = NULL
    used = slots[slots >= 0].ravel() // block_size
    written = np.bincount(used[used < num_blocks], minlength=num_blocks).astype(np.int32)
    return Pages(owner, shared, fill, written)
