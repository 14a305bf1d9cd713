"""StagedWriteTensor: the design document's example, one launch an apply, and what must not be staged."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.memory import StagedWriteTensor
from mrv2lab.memory.diffs import PackedDiffs
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.places import Place
from mrv2lab.runtime.transfer import POLICIES
from tests.runtime.machines import Steps, log, marks, seen

SAFE = ["barrier", "pinned_copy", "uva_pool"]


def make(rt: Runtime, shape: Any, dtype: torch.dtype = torch.int32, policy: Any = "uva_pool", **options: Any) -> Any:
    transfers = POLICIES[policy](rt) if isinstance(policy, str) else policy
    return StagedWriteTensor(rt, transfers, options.pop("name", "state"), shape, dtype, **options)


@pytest.mark.parametrize("policy", SAFE)
def test_the_design_documents_example(rt: Runtime, policy: str) -> None:
    state = make(rt, (1024, 1000), policy=policy)
    state.stage_write(row=2, start=3, values=[3, 1, 2])
    state.stage_write(row=0, start=1, values=[-1, -2, -5])
    state.apply_write()
    table = rt.read(state.gpu)
    assert table[:3, :6].tolist() == [[0, -1, -2, -5, 0, 0], [0] * 6, [0, 0, 0, 3, 1, 2]]
    assert int(table.abs().sum()) == 14


@pytest.mark.parametrize("policy", SAFE)
def test_one_launch_an_apply_and_no_wait(rt: Runtime, policy: str) -> None:
    state = make(rt, (8, 16), policy=policy)
    log(rt).clear()
    for row in range(8):
        state.stage_write(row, row, [row] * (16 - row))
    state.apply_write()
    (kernel,) = marks(rt, "kernel")
    assert (kernel.name, kernel.writes) == ("apply_write", ("state",))
    assert log(rt).waits() == []
    log(rt).clear()
    state.apply_write()
    assert log(rt).marks == []


def test_an_empty_write_stages_nothing(rt: Runtime) -> None:
    state = make(rt, (2, 4))
    state.stage_write(0, 4, [])
    assert state.pending == []
    state.apply_write()
    assert marks(rt, "kernel") == []


@pytest.mark.parametrize(
    ("row", "start", "length"), [(-1, 0, 1), (4, 0, 1), (0, -1, 1), (0, 5, 2), (0, 6, 1), (0, 0, 7), (3, 7, 0)]
)
def test_writes_outside_the_table_are_refused_when_staged(rt: Runtime, row: int, start: int, length: int) -> None:
    state = make(rt, (4, 6))
    with pytest.raises(IndexError, match=rf"state: row {row}, columns {start}\.\..* outside \[4, 6\]"):
        state.stage_write(row, start, [1] * length)
    assert state.pending == []


def test_one_value_a_row(rt: Runtime) -> None:
    state = make(rt, 5)
    state.stage_write_elem(4, 40)
    state.stage_write_elem(1, 10)
    state.apply_write()
    assert seen(rt, state.gpu) == [0, 10, 0, 0, 40]
    with pytest.raises(IndexError, match=r"\[5, 1\]"):
        state.stage_write(0, 1, [1])


@pytest.mark.parametrize("place", ["device", "uva"])
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int32, [2**31 - 1, -(2**31), 7]),
        (torch.int64, [2**63 - 1, -(2**63), 7]),
        (torch.float32, [0.5, -1e30, float("inf")]),
    ],
)
def test_dtypes_and_places(rt: Runtime, dtype: torch.dtype, values: list[Any], place: str) -> None:
    state = make(rt, (2, 5), dtype, place=place)
    state.stage_write(1, 1, values)
    state.apply_write()
    assert rt.read(state.gpu).tolist() == [[0] * 5, [0, *torch.tensor(values, dtype=dtype).tolist(), 0]]
    buffer = rt.registry.find(state.gpu)
    assert buffer is not None
    assert buffer.place is Place(place)


def test_other_dtypes_and_values_are_refused(rt: Runtime) -> None:
    with pytest.raises(TypeError, match=r"not torch\.float16"):
        make(rt, 4, torch.float16)
    state = make(rt, 4)
    with pytest.raises(OverflowError):
        state.stage_write_elem(0, 2**31)
    assert state.pending == []


@pytest.mark.parametrize("policy", SAFE)
def test_host_and_device_writes_land_in_stream_order(rt: Runtime, policy: str) -> None:
    """num_computed_tokens: the host sets it when a request comes, the device adds to it in every step."""
    transfers = POLICIES[policy](rt)
    state, steps = make(rt, 4, policy=transfers), Steps(rt, transfers)
    for step in range(6):
        with steps.step():
            if step % 2 == 0:
                state.stage_write_elem(step // 2, 100 * (step // 2 + 1))
            state.apply_write()
            rt.run("add", state.gpu, 1, writes=(state.gpu,))
    assert seen(rt, state.gpu) == [106, 204, 302, 6]


def test_pending_diffs_are_visible_until_applied(rt: Runtime) -> None:
    state = make(rt, (4, 4))
    state.stage_write(2, 1, [5, 6])
    state.stage_write(0, 0, (7,))
    assert [(diff.row, diff.start, diff.values.tolist()) for diff in state.pending] == [(2, 1, [5, 6]), (0, 0, [7])]
    state.apply_write()
    assert state.pending == []
    state.stage_write(1, 0, [9])
    state.drop_pending()
    state.apply_write()
    assert rt.read(state.gpu)[1].tolist() == [0] * 4


@pytest.mark.parametrize("kind", [list, np.array])
def test_values_are_those_of_the_moment(rt: Runtime, kind: Any) -> None:
    state, values = make(rt, (1, 3)), kind([1, 2, 3])
    state.stage_write(0, 0, values)
    values[0] = 99
    state.apply_write()
    assert rt.read(state.gpu).tolist() == [[1, 2, 3]]


def test_overlapping_diffs_are_refused_at_the_apply(rt: Runtime) -> None:
    state = make(rt, (2, 6))
    state.stage_write(0, 3, [1, 1])
    state.stage_write(1, 0, [1] * 6)
    state.stage_write(0, 0, [2, 2, 2])  # side by side is fine
    state.apply_write()
    assert rt.read(state.gpu).tolist() == [[2, 2, 2, 1, 1, 0], [1] * 6]
    state.stage_write(0, 3, [1, 1])
    state.stage_write(0, 4, [2])
    with pytest.raises(ValueError, match="state: two staged writes overlap in row 0 at column 4"):
        state.apply_write()


def test_a_row_can_be_unstaged(rt: Runtime) -> None:
    state = make(rt, 4)
    for row in (1, 2, 1, 3):
        state.stage_write_elem(row, 5)
    state.unstage(1)
    state.unstage(0)
    assert [diff.row for diff in state.pending] == [2, 3]
    state.stage_write_elem(1, 6)
    state.apply_write()
    assert seen(rt, state.gpu) == [0, 6, 5, 5]


@pytest.mark.parametrize("policy", SAFE)
def test_more_diffs_than_expected(rt: Runtime, policy: str) -> None:
    transfers = POLICIES[policy](rt)
    state, steps = make(rt, (50, 40), policy=transfers, expected_writes=1), Steps(rt, transfers)
    right = np.zeros((50, 40), np.int32)
    for size in (1, 3, 2, 50, 7):
        with steps.step():
            for row in range(size):
                right[row, :] = size
                state.stage_write(row, 0, [size] * 40)
            state.apply_write()
    assert rt.read(state.gpu).tolist() == right.tolist()


@pytest.mark.parametrize("policy", SAFE)
def test_random_diffs_equal_numpy(rt: Runtime, policy: str) -> None:
    transfers, choose, right = POLICIES[policy](rt), random.Random(7), np.zeros((9, 12), np.int32)
    state, steps = make(rt, (9, 12), policy=transfers), Steps(rt, transfers)
    for _ in range(40):
        with steps.step():
            for row in choose.sample(range(9), choose.randrange(6)):
                start = choose.randrange(12)
                values = [choose.randrange(1000) for _ in range(choose.randrange(13 - start))]
                state.stage_write(row, start, values)
                right[row, start : start + len(values)] = values
            state.apply_write()
    assert rt.read(state.gpu).tolist() == right.tolist()


@pytest.mark.parametrize("policy", SAFE)
def test_many_writes_at_once(rt: Runtime, policy: str) -> None:
    state = make(rt, (4, 6), policy=policy)
    rows, starts, lengths = (np.array(part, np.int32) for part in ([2, 0, 3], [1, 4, 0], [2, 0, 6]))
    state.stage_writes(rows, starts, lengths, [5, 6, 1, 2, 3, 4, 5, 6])
    state.apply_write()
    assert rt.read(state.gpu).tolist() == [[0] * 6, [0] * 6, [0, 5, 6, 0, 0, 0], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("bad", [([4], [0], [1]), ([-1], [0], [1]), ([0], [5], [2]), ([0], [-1], [1])], ids=str)
def test_of_many_writes_one_that_lies_outside_stages_nothing(rt: Runtime, bad: Any) -> None:
    state = make(rt, (4, 6))
    rows, starts, lengths = (np.array([first, *part], np.int32) for first, part in zip((1, 0, 1), bad, strict=True))
    with pytest.raises(IndexError, match=f"row {bad[0][0]}, columns {bad[1][0]}.."):
        state.stage_writes(rows, starts, lengths, [1] * int(lengths.sum()))
    with pytest.raises(ValueError, match="3 values for 1 cells"):
        state.stage_writes(rows[:1], starts[:1], lengths[:1], [1, 2, 3])
    assert state.pending == []


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_mutant_an_apply_that_forgets_to_clear(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedWriteTensor, "drop_pending", lambda self: None)
    for test in (test_host_and_device_writes_land_in_stream_order, test_one_launch_an_apply_and_no_wait):
        with pytest.raises((AssertionError, ValueError)):
            test(cpu, "uva_pool")


def test_mutant_a_check_that_is_left_out(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedWriteTensor, "check_disjoint", lambda self: None)
    with pytest.raises(pytest.fail.Exception):
        test_overlapping_diffs_are_refused_at_the_apply(cpu)


def test_mutant_diffs_that_are_packed_in_another_order(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    send = PackedDiffs.send

    def swapped(self: PackedDiffs, lists: Any) -> Any:
        (groups, rows, starts, *rest), count, longest = send(self, lists)
        return (groups, starts, rows, *rest), count, longest

    monkeypatch.setattr(PackedDiffs, "send", swapped)
    with pytest.raises((AssertionError, IndexError)):
        test_the_design_documents_example(cpu, "uva_pool")
