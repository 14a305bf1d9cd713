"""The staged diffs' arrays and their uploads."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from mrv2lab.memory import diffs
from mrv2lab.memory.diffs import FEW, DiffList, PackedDiffs, aligned
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES
from tests.runtime.machines import Steps, log


def test_values_that_do_not_fit_leave_nothing_behind() -> None:
    staged = DiffList(torch.int32)
    staged.append(3, 0, [7])
    for values, error in (([1, 2, 2**31], OverflowError), ([1, "2"], TypeError), ([1, 2.5], TypeError)):
        with pytest.raises(error):
            staged.append(4, 0, values)  # type: ignore[arg-type]
    for array in (np.array([1, 2**31]), np.array([1.5])):
        with pytest.raises(OverflowError, match=r"^(2147483648|1.5) is no int32"):
            staged.append(4, 0, array)
    with pytest.raises(TypeError):
        staged.append(4, 0.0, [1])  # type: ignore[arg-type]
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
        for part in ("heads", "contents", "distinct_rows", "longest"):
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
        count, begin = len(self.heads), len(self.contents)
        honest(self, *args)
        for i in range(count + 2, len(self.heads), 3):
            self.heads[i] -= begin

    monkeypatch.setattr(DiffList, "extend", forgetful)
    with pytest.raises(AssertionError):
        check_extend()


@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_what_is_sent(rt: Runtime, policy: str, dtype: torch.dtype) -> None:
    """Diffs of three tables, one of which has none: the one with the longest rows comes last."""
    transfers = POLICIES[policy](rt)
    packed, steps = PackedDiffs(transfers, "of", dtype, 4, (50, 30, 40)), Steps(rt, transfers)
    for count in (1, 2, 3, 5, 13, 4):
        lists = [DiffList(dtype), DiffList(dtype), DiffList(dtype)]
        for i in range(count):
            lists[2 * (i % 2)].append(i, 10 + i, [100 * i + k for k in range(1 + i % 3)])
        with steps.step():
            arrays, found, longest = packed.send(lists)
        groups, rows, starts, cu_lens, contents = (
            rt.read(array).numpy() for array in cast(tuple[torch.Tensor, ...], arrays)
        )
        groups, rows, starts = groups[:found], rows[:found], starts[:found]
        mine = starts < np.array((50, 30, 40))[groups]  # the others lead over to another table's values
        order = [*range(1, count, 2), *range(0, count, 2)]
        assert groups[mine].tolist() == [2 * (i % 2) for i in order]
        assert rows[mine].tolist() == order
        assert starts[mine].tolist() == [10 + i for i in order]
        values = [contents[cu_lens[w] : cu_lens[w + 1]].tolist() for w in np.flatnonzero(mine)]
        assert values == [[100 * i + k for k in range(1 + i % 3)] for i in order]
        assert arrays[4].dtype == dtype
        assert (mine.sum(), longest) == (count, min(count, 3))


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
    send = diffs._Slab.send

    def tight(self: diffs._Slab, lists: Any) -> Any:
        self._stride = aligned(sum(map(len, lists)) + 1)
        self._contents = 3 * self._stride
        self._make_host(len(self._host))
        self._views.clear()
        return send(self, lists)

    monkeypatch.setattr(diffs._Slab, "send", tight)
    with pytest.raises(AssertionError):
        check_rows_stay_rows(rt, 8)


def test_every_part_is_aligned_alike(rt: Runtime) -> None:
    """Triton compiles a kernel anew for an address that turns a multiple of 16, or ceases to be one."""
    for row_lens in ((), (7,)):
        seen = set()
        for expected in (1, 2, 3, 5, 300):
            staged = DiffList(torch.int32)
            staged.append(0, 0, [1])
            parts, *_ = PackedDiffs(POLICIES["uva_pool"](rt), "of", torch.int32, expected, row_lens).send([staged])
            seen.add(tuple(part.data_ptr() % 16 for part in parts if part is not None))
        assert len(seen) == 1


def check_few_diffs_travel_alone(rt: Runtime) -> None:
    """A step with few diffs sends no room for many, and one with many does not change that."""
    packed, sizes = PackedDiffs(POLICIES["uva_pool"](rt), "of", torch.int32, 9 * FEW), []
    for count in (1, FEW + 1, FEW, 17 * FEW, 9 * FEW, 2):
        staged = DiffList(torch.int32)
        staged.extend(np.arange(count, dtype=np.int32), np.zeros(count, np.int32), None, list(range(count)))
        log(rt).clear()
        (_, rows, _, cu_lens, contents), found, longest = packed.send([staged])
        (mark,) = log(rt).marks
        sizes.append((mark.name.rpartition(".")[0], mark.nbytes // 4))
        assert (found, longest) == (count, 1)
        assert rt.read(rows)[:count].tolist() == rt.read(contents)[:count].tolist() == list(range(count))
        assert rt.read(cu_lens)[: count + 1].tolist() == list(range(count + 1))
    assert sizes == [
        ("of.diffs.64", 3 * 68 + 1),
        ("of.diffs.512", 3 * 516 + 65),
        ("of.diffs.64", 3 * 68 + 64),
        ("of.diffs", 3 * 2052 + 17 * 64),  # outgrown
        ("of.diffs", 3 * 580 + 9 * 64),
        ("of.diffs.64", 3 * 68 + 2),
    ]


def test_few_diffs_travel_alone(rt: Runtime) -> None:
    check_few_diffs_travel_alone(rt)


def test_mutant_one_slab_for_all(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffs, "FEW", 10_000)
    with pytest.raises(AssertionError):
        check_few_diffs_travel_alone(rt)


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
