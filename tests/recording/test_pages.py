"""Blocks: who holds them, how full they are, what a step writes."""

from __future__ import annotations

import numpy as np

from mrv2lab.recording.pages import pages


def test_pages() -> None:
    """Row 3 holds 5 1 2 with 9 tokens, row 2 shares 5 1 and has written nothing of its own yet. Blocks of 4."""
    table = np.zeros((4, 4), np.int32)
    table[3, :3], table[2, :4] = [5, 1, 2], [5, 1, 6, 7]
    tables = {"num_blocks": np.array([[0, 0, 3, 3]], np.int32), "block_table.0": table}
    valid = np.array([0, 0, 8, 9], np.int32)
    slots = np.array([[8, 24, 25, -1]], np.int64)
    found = pages(tables, [3, 2], valid, slots, num_blocks=8, block_size=4)
    assert found.owner.tolist() == [-2, 3, 3, -1, -1, 3, 2, -1]
    assert found.shared.tolist() == [0, 2, 1, 0, 0, 2, 1, 0]
    assert found.fill.tolist() == [0, 4, 1, 0, 0, 4, 0, 0]
    assert found.written.tolist() == [0, 0, 1, 0, 0, 0, 2, 0]


def test_block_ids_beyond_the_pool_are_left_out() -> None:
    tables = {"num_blocks": np.array([[2]], np.int32), "block_table.0": np.array([[9, 1]], np.int32)}
    found = pages(tables, [0], np.array([6], np.int32), np.array([[99]]), num_blocks=3, block_size=4)
    assert found.owner.tolist() == [-2, 0, -1] and found.fill.tolist() == [0, 2, 0] and not found.written.any()
