"""The staged diffs' arrays and their uploads."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from mrv2lab.memory.diffs import DiffList, PackedDiffs
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES
from tests.runtime.machines import Steps


def test_values_that_do_not_fit_leave_nothing_behind() -> None:
    staged = DiffList(torch.int32)
    staged.append(3, 0, [7])
    for values, error in (([1, 2, 2**31], OverflowError), ([1, "2"], TypeError), ([1, 2.5], TypeError)):
        with pytest.raises(error):
            staged.append(4, 0, values)  # type: ignore[arg-type]
    staged.append(5, 1, (8, 9))
    assert [(diff.row, diff.start, diff.values.tolist()) for diff in staged.diffs()] == [(3, 0, [7]), (5, 1, [8, 9])]


@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_what_is_sent(rt: Runtime, policy: str, dtype: torch.dtype) -> None:
    """Diffs of three tables, one of which has none, in the order of the tables."""
    transfers = POLICIES[policy](rt)
    packed, steps = PackedDiffs(transfers, "of", dtype, 4, grouped=True), Steps(rt, transfers)
    for count in (1, 2, 3, 5, 13, 4):
        lists = [DiffList(dtype), DiffList(dtype), DiffList(dtype)]
        for i in range(count):
            lists[2 * (i % 2)].append(i, 10 + i, [100 * i + k for k in range(1 + i % 3)])
        with steps.step():
            *arrays, longest = cast(tuple[Any, ...], packed.send(lists))
        groups, rows, starts, cu_lens, contents = (rt.read(array) for array in arrays)
        order = [*range(0, count, 2), *range(1, count, 2)]
        wanted = [100 * i + k for i in order for k in range(1 + i % 3)]
        assert groups[:count].tolist() == [2 * (i % 2) for i in order]
        assert rows[:count].tolist() == order
        assert starts[:count].tolist() == [10 + i for i in order]
        assert np.diff(cu_lens[: count + 1]).tolist() == [1 + i % 3 for i in order]
        assert contents.dtype == dtype
        assert contents[: len(wanted)].tolist() == wanted
        assert longest == min(count, 3)


def test_a_shallow_pool_mixes_up_no_rows_with_values(rt: Runtime) -> None:
    """What a kernel reads as rows was staged as rows, whatever a later apply has written meanwhile."""
    packed = PackedDiffs(POLICIES["uva_pool"](rt, depth=1), "of", torch.int32, 8)
    seen = []
    for count in (8, 3, 7):
        staged = DiffList(torch.int32)
        for i in range(count):
            staged.append(i, 0, [1000] * count)
        seen.append(packed.send([staged])[1])
    assert all(rt.read(rows)[:8].max() < 8 for rows in seen)
