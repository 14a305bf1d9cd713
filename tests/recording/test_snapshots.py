"""Snapshots: small, and thinned out when there are many."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.recording.snapshots import Packed, Snapshot, Snapshots


@pytest.mark.parametrize("shape", [(5,), (4, 6), (1, 3)])
@pytest.mark.parametrize("filled", [0, 1, 3])
def test_packed_is_the_table(shape: tuple[int, ...], filled: int) -> None:
    rng = np.random.default_rng(filled)
    table = np.zeros(shape, np.int64)
    table.reshape(-1)[rng.choice(table.size, filled, replace=False)] = 7
    packed, other = Packed.of(table), np.full(shape, 9)
    packed.restore(other)
    assert np.array_equal(other, table)


def test_packed_leaves_out_rows_and_columns_without_anything() -> None:
    """1,024 rows of 4,096 tokens are 16 MB; three requests of a hundred tokens are not."""
    table = np.zeros((1024, 4096), np.int32)
    table[1021:, :100] = 1
    packed = Packed.of(table)
    assert (packed.corner, packed.values.nbytes) == ((1021, 0), 3 * 100 * 4)
    table[1023, 0] = 5
    assert packed.values[2, 0] == 1, "a copy"


def snapshot(nbytes: int) -> Snapshot:
    return Snapshot({"x": Packed.of(np.ones(nbytes, np.int8))}, {}, 0)


def test_latest() -> None:
    snapshots = Snapshots(every=16)
    assert snapshots.latest(5) is None
    for index in (0, 16, 32):
        assert snapshots.wants(index)
        snapshots.add(index, snapshot(1))
    assert not snapshots.wants(16) and not snapshots.wants(17)
    assert [snapshots.latest(index)[0] for index in (0, 15, 16, 33)] == [0, 0, 16, 32]  # type: ignore[index]


def test_every_second_goes_when_they_are_too_many() -> None:
    snapshots = Snapshots(every=16, budget=40)
    for index in range(0, 16 * 5, 16):
        snapshots.add(index, snapshot(10))
    assert (len(snapshots), snapshots.every, snapshots.nbytes) == (3, 32, 30)
    assert [snapshots.latest(index)[0] for index in (31, 63, 79)] == [0, 32, 64]  # type: ignore[index]
    assert not snapshots.wants(80) and snapshots.wants(96)
