"""The staged diffs' arrays and their uploads."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from mrv2lab.memory.diffs import DiffList, PackedDiffs, slab_places
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES
from tests.runtime.machines import Steps


def test_values_that_do_not_fit_leave_nothing_behind() -> None:
    staged = DiffList(torch.int32)
    staged.append(3, 0, [7])
    for values, error in (([1, 2, 2**31], OverflowError), ([1, "2"], TypeError), ([1, 2.5], TypeError)):
        with pytest.raises(error):
            staged.append(4, 0, values)  # type: ignore[arg-type]
    for array in (np.array([1, 2**31]), np.array([1.5])):
        with pytest.raises(OverflowError, match=r"^(2147483648|1.5) is no int32"):
            staged.append(4, 0, array)
    staged.append(5, 1, (8, 9))
    assert [(diff.row, diff.start, diff.values.tolist()) for diff in staged.diffs()] == [(3, 0, [7]), (5, 1, [8, 9])]


def check_extend() -> None:
    """At once what one by one gives: one value each or several, empty ones among them, behind others."""
    rng = np.random.default_rng(5)
    for lengths in (None, [2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]):
        one, other = DiffList(torch.int64), DiffList(torch.int64)
        for staged in (one, other):
            staged.append(9, 9, [9, 9])
        sizes = [1] * 4 if lengths is None else lengths
        values = rng.integers(-(2**40), 2**40, sum(sizes))
        rows, starts = np.array([3, 1, 7, 2], np.int32), np.array([0, 5, 5, 1], np.int32)
        one.extend(rows, starts, None if lengths is None else np.array(lengths, np.int32), values)
        at = 0
        for row, start, size in zip(rows.tolist(), starts.tolist(), sizes, strict=True):
            if size:
                other.append(row, start, values[at : at + size].tolist())
            at += size
        for part in ("rows", "starts", "ends", "contents", "distinct_rows"):
            assert getattr(one, part) == getattr(other, part)


def test_many_diffs_at_once() -> None:
    check_extend()
    staged = DiffList(torch.int32)
    staged.append(3, 0, [7])
    two = np.array([4, 5], np.int32)
    for values, error in (([1, 2**31], OverflowError), ([1, "2"], TypeError)):
        with pytest.raises(error):
            staged.extend(two, two, None, values)  # type: ignore[arg-type]
    assert [(diff.row, diff.values.tolist()) for diff in staged.diffs()] == [(3, [7])]


def test_mutant_ends_that_forget_what_was_staged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DiffList.extend

    def forgetful(self: DiffList, *args: Any) -> None:
        count = len(self.ends)
        begin = self.ends[-1] if self.ends else 0
        honest(self, *args)
        for i in range(count, len(self.ends)):
            self.ends[i] -= begin

    monkeypatch.setattr(DiffList, "extend", forgetful)
    with pytest.raises(AssertionError):
        check_extend()


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
            arrays, longest = packed.send(lists)
        groups, rows, starts, cu_lens, contents = (rt.read(array) for array in cast(tuple[torch.Tensor, ...], arrays))
        order = [*range(0, count, 2), *range(1, count, 2)]
        wanted = [100 * i + k for i in order for k in range(1 + i % 3)]
        assert groups[:count].tolist() == [2 * (i % 2) for i in order]
        assert rows[:count].tolist() == order
        assert starts[:count].tolist() == [10 + i for i in order]
        assert np.diff(cu_lens[: count + 1]).tolist() == [1 + i % 3 for i in order]
        assert contents.dtype == dtype
        assert contents[: len(wanted)].tolist() == wanted
        assert longest == min(count, 3)


def check_rows_stay_rows(rt: Runtime, expected: int) -> None:
    packed = PackedDiffs(POLICIES["uva_pool"](rt, depth=1), "of", torch.int32, expected)
    seen = []
    for count in (8, 7, 3):
        staged = DiffList(torch.int32)
        for i in range(count):
            staged.append(i, 500, [1000] * count)
        seen.append(packed.send([staged])[0][1])
    assert all(rt.read(rows)[:8].max() < 8 for rows in seen)


@pytest.mark.parametrize("expected", [8, 2])
def test_a_shallow_pool_mixes_up_no_rows_with_values(rt: Runtime, expected: int) -> None:
    """What a kernel reads as rows was staged as rows, whatever a later apply has written meanwhile."""
    check_rows_stay_rows(rt, expected)


def test_mutant_parts_that_lie_end_to_end(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as there are, then the starts: a longer list's rows would be a shorter one's starts, or values."""
    send = PackedDiffs.send

    def tight(self: PackedDiffs, lists: Any) -> Any:
        self._writes = sum(map(len, lists))
        self._places = slab_places((0, self._writes, self._writes, self._writes + 1))
        self._views.clear()
        return send(self, lists)

    monkeypatch.setattr(PackedDiffs, "send", tight)
    with pytest.raises(AssertionError):
        check_rows_stay_rows(rt, 8)


def test_every_part_is_aligned_alike() -> None:
    """Triton compiles a kernel anew for an address that is no multiple of 16."""
    for writes in range(1, 40):
        places = slab_places((writes, writes, writes, writes + 1))
        assert all(place % 4 == 0 for place in places)
        assert all(b - a >= size for a, b, size in zip(places, places[1:], (writes,) * 3 + (writes + 1,), strict=False))


def test_views_are_made_once(rt: Runtime) -> None:
    """A step whose slab is an old one gets the views of then, so that its launch is one that was made before."""
    for policy in ("pinned_copy", "uva_pool"):
        transfers = POLICIES[policy](rt)
        packed, seen = PackedDiffs(transfers, f"of.{policy}", torch.int32, 4), []
        for step in range(8):
            staged = DiffList(torch.int32)
            staged.append(step, 0, [1] * (1 + step % 2))
            seen.append(packed.send([staged])[0])
        assert len({id(parts) for parts in seen}) == (1 if policy == "pinned_copy" else transfers.depth)
