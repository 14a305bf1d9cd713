"""FusedStagedWriter: several tables, one upload and one launch; and what kernels know of tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.memory import FusedStagedWriter, staged_write
from mrv2lab.memory import diffs as diffs_module
from mrv2lab.runtime.base import DeviceError, Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from tests.memory.test_staged_write import SAFE, make
from tests.runtime.machines import Steps, log, machine, marks

SHAPES: list[tuple[Any, str]] = [((6, 4), "device"), ((6, 9), "uva"), (6, "device"), ((6, 5), "device")]
"""Matrices, one of them in host memory, and a table of one value a row."""


def _tables(rt: Runtime, policy: Any, name: str) -> list[Any]:
    return [make(rt, shape, policy=policy, name=f"{name}.{i}", place=place) for i, (shape, place) in enumerate(SHAPES)]


def _writer(rt: Runtime, transfers: Any, name: str = "writer") -> FusedStagedWriter:
    """A writer of tables that have no other."""
    return FusedStagedWriter(rt, transfers, name, _tables(rt, None, name))


def _stage(tables: Any, steps: Any) -> None:
    for g, row, start, values in steps:
        tables[g].stage_write(row, start, values)


@st.composite
def _diffs(draw: st.DrawFn) -> list[tuple[int, int, int, list[int]]]:
    """One a row and table at most, in any order: table, row, start, values."""
    found = []
    for g, (shape, _) in enumerate(SHAPES):
        width = shape[1] if isinstance(shape, tuple) else 1
        for row in draw(st.sets(st.integers(0, 5), max_size=4)):
            start = draw(st.integers(0, width))
            values = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=width - start)
            found.append((g, row, start, draw(values)))
    return draw(st.permutations(found))


def check_fused(rt: Runtime, policy: str, applies: list[list[tuple[int, int, int, list[int]]]]) -> None:
    """The same diffs, table by table and all at once."""
    transfers = POLICIES[policy](rt)
    separate, writer, steps = _tables(rt, transfers, "separate"), _writer(rt, transfers), Steps(rt, transfers)
    for diffs in applies:
        with steps.step():
            _stage(separate, diffs)
            _stage(writer.tables, diffs)
            for table in separate:
                table.apply_write()
            written = tuple(table.name for table in writer.tables if table.pending)
            before = len(marks(rt, "kernel"))
            writer.apply_write()
            assert [mark.writes for mark in marks(rt, "kernel")[before:]] == ([written] if written else [])
            assert not any(table.pending for table in writer.tables)
    for one, other in zip(separate, writer.tables, strict=True):
        assert rt.read(one.gpu).tolist() == rt.read(other.gpu).tolist()


def check_many_long_diffs(rt: Runtime, policy: str) -> None:
    """Two tables, of as many rows with as many values: a step that admits long prompts stages whole rows of both."""
    transfers = POLICIES[policy](rt)
    tables = [make(rt, (8, 64), policy=None, name=name) for name in ("one", "other")]
    writer, steps, slabs = FusedStagedWriter(rt, transfers, "writer", tables), Steps(rt, transfers), set()
    for step in range(3):
        with steps.step():
            for g, table in enumerate(tables):
                for row in range(8):
                    table.stage_write(row, 0, [1000 * g + 10 * row + step] * 64)
            writer.apply_write()
        assert writer._packed is not None
        slabs.add(len(writer._packed._slabs))
        for g, table in enumerate(tables):
            assert rt.read(table.gpu).tolist() == [[1000 * g + 10 * row + step] * 64 for row in range(8)]
    assert len(slabs) == 1, "the slab that was made for the first of them serves the others"


@pytest.mark.parametrize("policy", SAFE)
def test_many_long_diffs_of_two_tables(rt: Runtime, policy: str) -> None:
    check_many_long_diffs(rt, policy)


def test_mutant_a_slab_without_room_for_what_it_was_made_for(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = diffs_module._Slab.__init__
    monkeypatch.setattr(diffs_module._Slab, "__init__", lambda self, *args: whole(self, *args[:6]))
    with pytest.raises(AssertionError):
        check_many_long_diffs(cpu, "pinned_copy")


EVERYWHERE = [(0, 5, 1, [7, 8]), (1, 2, 0, list(range(9))), (2, 4, 0, [-3]), (2, 1, 0, [6]), (3, 0, 4, [5])]


@pytest.mark.parametrize("policy", SAFE)
def test_a_fused_writer_equals_separate_ones(rt: Runtime, policy: str) -> None:
    """In device and host memory, of one value a row and of many."""
    check_fused(rt, policy, [EVERYWHERE, EVERYWHERE[:1], [], EVERYWHERE[2:]])


@settings(max_examples=25, deadline=None)
@given(st.lists(_diffs(), min_size=1, max_size=3), st.sampled_from(SAFE))
def test_any_diffs_fused_equal_separate_ones(applies: Any, policy: str) -> None:
    with machine("deferred") as rt:
        check_fused(rt, policy, applies)


def test_a_fused_writer_launches_nothing_for_nothing(rt: Runtime) -> None:
    writer = _writer(rt, POLICIES["uva_pool"](rt))
    log(rt).clear()
    writer.apply_write()
    assert log(rt).marks == []


@pytest.mark.parametrize("policy", SAFE)
def test_one_upload_and_one_launch_for_every_table(rt: Runtime, policy: str) -> None:
    writer = _writer(rt, POLICIES[policy](rt))
    log(rt).clear()
    _stage(writer.tables, EVERYWHERE)
    writer.apply_write()
    assert [mark.name for mark in marks(rt, "kernel")] == ["fused_apply_write"]
    assert len(marks(rt, "h2d" if policy != "uva_pool" else "publish")) == 1
    assert log(rt).waits() == []


def test_a_fused_writer_takes_int32_tables_only(rt: Runtime) -> None:
    with pytest.raises(TypeError, match=r"int32 tables, but state is torch\.int64"):
        FusedStagedWriter(rt, POLICIES["uva_pool"](rt), "writer", [make(rt, 4, torch.int64)])


def test_a_table_of_a_fused_writer_is_not_applied_alone(rt: Runtime) -> None:
    table = _writer(rt, POLICIES["uva_pool"](rt)).tables[2]
    table.apply_write()
    table.stage_write_elem(3, 1)
    with pytest.raises(RuntimeError, match=r"writer\.2: .* FusedStagedWriter"):
        table.apply_write()


def check_overlap(rt: Runtime, g: int) -> None:
    writer = _writer(rt, POLICIES["uva_pool"](rt))
    _stage(writer.tables, [*EVERYWHERE, (g, 3, 0, [1]), (g, 3, 0, [2])])
    log(rt).clear()
    with pytest.raises(ValueError, match=rf"writer\.{g}: two staged writes overlap in row 3 at column 0"):
        writer.apply_write()
    assert log(rt).marks == []


@pytest.mark.parametrize("g", range(4))
def test_an_overlap_names_its_table(cpu: CpuRuntime, g: int) -> None:
    check_overlap(cpu, g)


def test_what_is_unstaged_or_dropped_is_not_applied(rt: Runtime) -> None:
    writer = _writer(rt, POLICIES["uva_pool"](rt))
    _stage(writer.tables, EVERYWHERE)
    writer.tables[1].drop_pending()
    writer.tables[2].unstage(4)
    writer.apply_write()
    one, two, three, four = (rt.read(table.gpu).tolist() for table in writer.tables)
    assert (one[5], two, three, four[0]) == ([0, 7, 8, 0], [[0] * 9] * 6, [0, 6, 0, 0, 0, 0], [0, 0, 0, 0, 5])


@pytest.mark.gpu
def test_a_host_table_is_written_through_its_pointer() -> None:
    """The host sees what the kernel stored, in a table of which the kernel knows an address only."""
    with machine("cuda") as rt:
        writer = _writer(rt, POLICIES["uva_pool"](rt))
        host = writer.tables[1].gpu
        assert not host.is_cuda
        _stage(writer.tables, EVERYWHERE)
        writer.apply_write()
        rt.synchronize()
        assert host.tolist()[2] == list(range(9))
        assert int(host.sum()) == sum(range(9))


# -- what an unsafe transfer leaves -----------------------------------------------------------------------------------


def check_shallow_pool(rt: Runtime) -> None:
    """A launch that reads the slab of a later step, which has fewer diffs: it applies those and nothing else."""
    writer = _writer(rt, POLICIES["uva_pool"](rt, depth=1))
    for diffs in (EVERYWHERE, EVERYWHERE[:1], EVERYWHERE[2:3]):
        _stage(writer.tables, diffs)
        writer.apply_write()
    tables = [rt.read(table.gpu).tolist() for table in writer.tables]
    assert tables == [[[0] * 4] * 6, [[0] * 9] * 6, [0, 0, 0, 0, -3, 0], [[0] * 5] * 6]


def test_a_shallow_pool_applies_no_diffs_that_nobody_staged(cpu: CpuRuntime) -> None:
    check_shallow_pool(cpu)


def test_mutant_ends_of_earlier_steps_stay(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffs_module._Slab, "_end", lambda *args: None)
    with pytest.raises((AssertionError, DeviceError)):
        check_shallow_pool(cpu)


def check_values_stay_values(rt: Runtime) -> None:
    """What stands in a table was staged for it, though a copy brings the host's slab of a later step, as far as the
    copy's own step went."""
    transfers = POLICIES["unsafe"](rt)
    writer = _writer(rt, transfers)
    tokens, blocks = writer.tables[1], writer.tables[3]
    for step, (rows, length) in enumerate([(5, 9), (0, 0), (1, 9), (0, 0), (3, 4), (0, 0), (6, 9), (0, 0)] * 2):
        with transfers.prepare():
            for row in range(rows):
                tokens.stage_write(row, 0, [1000 + step] * length)
            for row in range(6 - rows):
                blocks.stage_write(row, 0, [1 + step] * (1 + (row + step) % 5))
            writer.apply_write()
        rt.end_step()
    assert set(rt.read(blocks.gpu).flatten().tolist()) < set(range(1000))
    assert set(rt.read(tokens.gpu).flatten().tolist()) <= {0, *range(1000, 1016)}


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_an_unsafe_copy_brings_no_table_another_ones_values(lag: int) -> None:
    with machine("deferred", lag=lag) as rt:
        check_values_stay_values(rt)


def test_mutant_values_that_lie_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    send = diffs_module._Slab.send

    def tight(self: Any, lists: Any) -> Any:
        place = 0
        for group in self._order:
            self._places[group], place = place, place + len(lists[group].contents)
        return send(self, lists)

    monkeypatch.setattr(diffs_module._Slab, "send", tight)
    with machine("deferred", lag=2) as rt, pytest.raises((AssertionError, DeviceError)):
        check_values_stay_values(rt)


# -- addresses, and mutants --------------------------------------------------------------------------------------------


def _interpreted(bug: Any) -> None:
    """Kernels go by addresses and strides, of which specs know nothing."""
    pytest.importorskip("triton")
    with machine("deferred", backend="interpret") as rt:
        bug(rt)


def check_addresses(rt: Runtime) -> None:
    check_fused(rt, "uva_pool", [EVERYWHERE])


def test_addresses_and_strides_are_those_of_the_tables() -> None:
    _interpreted(check_addresses)


@pytest.mark.parametrize("bug", ["swapped pointers", "no stride for one value a row"])
def test_mutant_addresses_that_are_not_the_tables(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lead lies within the tables all the same: this is memory of the process."""
    addresses = staged_write.pointers

    def swap(rt: Runtime, tables: Any, name: str) -> torch.Tensor:
        return addresses(rt, [tables[i] for i in (3, 1, 2, 0)], name)

    def flat(rt: Runtime, tables: Any, name: str) -> torch.Tensor:
        return rt.adopt(torch.tensor([table.stride(0) if table.shape[1] > 1 else 0 for table in tables]), name)

    name, mutant = ("pointers", swap) if bug == "swapped pointers" else ("strides", flat)
    monkeypatch.setattr(staged_write, name, mutant)
    with pytest.raises(AssertionError):
        _interpreted(check_addresses)


def check_long_diffs(rt: Runtime) -> None:
    """Longer than a program, beside one of one value."""
    transfers = POLICIES["uva_pool"](rt)
    tables = [make(rt, (2, 2600), policy=None), make(rt, 3, policy=None)]
    writer = FusedStagedWriter(rt, transfers, "long", tables)
    tables[0].stage_write(1, 50, list(range(2500)))
    tables[1].stage_write_elem(2, 9)
    writer.apply_write()
    assert rt.read(tables[0].gpu)[1].tolist() == [0] * 50 + list(range(2500)) + [0] * 50
    assert rt.read(tables[1].gpu).tolist() == [0, 0, 9]


def test_diffs_longer_than_a_program() -> None:
    _interpreted(check_long_diffs)


def test_mutant_programs_for_the_first_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_write, "_reach", lambda length: staged_write.BLOCK)
    with pytest.raises(AssertionError):
        _interpreted(check_long_diffs)
