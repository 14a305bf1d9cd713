"""Transfer policies: what kernels read is what the host meant, with two steps in flight, whatever it does next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.observer import EventLog
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.places import Place
from mrv2lab.runtime.transfer import POLICIES, TransferPolicy
from mrv2lab.runtime.uva import UvaBuffer, UvaBufferPool
from tests.runtime.machines import device, log, machine, marks, seen

SAFE = ["barrier", "pinned_copy", "uva_pool"]


def _contents_with_two_steps_in_flight(
    rt: Runtime, policy: TransferPolicy, sizes: list[int]
) -> list[tuple[list[list[Any]], list[list[Any]]]]:
    """Per step, what the device saw of a table, an upload and staged diffs of ``sizes[step]``, and what is right."""
    shape = (2, 8)
    table = policy.table("table", shape, torch.int32)
    upload = policy.upload("upload", 4, torch.int64)
    staged = policy.staging("staged", 4, torch.float32)
    steps = []
    flight: list[Any] = []
    for step, size in enumerate(sizes):
        with policy.prepare():
            table.np[:] = 100 * step + np.arange(16).reshape(shape)
            table.publish()
            sent = upload.send(np.arange(size) + 1000 * step)
            diffs = staged.send(np.arange(size, dtype=np.float32) + step / 2)
        right = [table.np.reshape(-1).tolist(), (np.arange(size) + 1000 * step).tolist()]
        right.append((np.arange(size, dtype=np.float32) + step / 2).tolist())
        sources = (table.gpu.view(-1), sent, diffs)
        kept = [rt.empty(len(one), one.dtype, name="kept") for one in sources]
        for target, source in zip(kept, sources, strict=True):
            rt.run("copy", target, source, reads=(source,), writes=(target,))
        assert [len(one) for one in sources[1:]] == [size, size]
        with policy.prepare():
            table.np[:] = -1  # the host goes on at once
        done = rt.event("done")
        done.record()
        flight.append(done)
        rt.end_step()
        if len(flight) == 2:
            flight.pop(0).synchronize()
        steps.append((kept, right))
    return [([seen(rt, one) for one in kept], right) for kept, right in steps]


@pytest.mark.parametrize("policy", SAFE)
def test_contents_are_right_with_two_steps_in_flight(rt: Runtime, policy: str) -> None:
    for got, right in _contents_with_two_steps_in_flight(rt, POLICIES[policy](rt, 2), [3, 4, 1, 2, 3, 4, 2, 1]):
        assert got == right


@pytest.mark.parametrize("policy", SAFE)
def test_contents_are_right_while_buffers_grow(rt: Runtime, policy: str) -> None:
    for got, right in _contents_with_two_steps_in_flight(rt, POLICIES[policy](rt, 2), [1, 4, 5, 9, 9, 40, 3, 41, 100]):
        assert got == right


def test_unsafe_contents_are_wrong_on_a_deferred_stream(cpu: CpuRuntime) -> None:
    steps = _contents_with_two_steps_in_flight(cpu, POLICIES["unsafe"](cpu, 2), [3] * 8)
    assert [got == right for got, right in steps] == [False] * 8


@pytest.mark.parametrize("policy", list(POLICIES))
def test_places_and_copies_by_policy(cpu: CpuRuntime, policy: str) -> None:
    """The module's table, literally."""
    made = POLICIES[policy](cpu, 2)
    table, upload, staging = (
        made.table("t", 4, torch.int32),
        made.upload("u", 4, torch.int32),
        made.staging("s", 4, torch.int32),
    )
    log(cpu).clear()
    with made.prepare():
        table.np[:] = 1
        table.publish()
        sent, diffs = upload.send(np.ones(2, np.int32)), staging.send(np.ones(2, np.int32))
    cpu.synchronize()

    def place(tensor: torch.Tensor) -> str:
        buffer = cpu.registry.find(tensor)
        assert buffer is not None
        return buffer.place.value

    kinds = [mark.kind for mark in marks(cpu, "publish", "h2d", "implicit_sync")]
    row = (place(table.gpu), place(sent), place(diffs), kinds.count("publish"), kinds.count("h2d"), len(kinds))
    assert (
        row
        == {
            "unsafe": ("device", "device", "device", 2, 3, 5),
            "barrier": ("device", "device", "device", 2, 3, 5),
            "pinned_copy": ("device", "device", "device", 3, 3, 6),
            "uva_pool": ("uva", "device", "uva", 3, 1, 4),
        }[policy]
    )


def test_uploads_keep_their_address_until_they_grow(rt: Runtime) -> None:
    upload = POLICIES["pinned_copy"](rt).upload("u", 4, torch.int32)
    first = upload.send(np.arange(4, dtype=np.int32))
    assert upload.send(np.arange(2, dtype=np.int32)).data_ptr() == first.data_ptr()
    assert upload.send(np.arange(5, dtype=np.int32)).data_ptr() != first.data_ptr()
    assert seen(rt, first) == [0, 1, 2, 3]


def test_temporaries_live_as_long_as_queued_work_needs_them(cpu: CpuRuntime) -> None:
    upload = POLICIES["pinned_copy"](cpu).upload("u", 4, torch.int32)
    before, kept = cpu.registry.nbytes(Place.PINNED), [device(cpu, 4) for _ in range(10)]
    for i, target in enumerate(kept):
        sent = upload.send(np.full(4, i, np.int32))
        cpu.run("copy", target, sent, reads=(sent,), writes=(target,))
    assert cpu.registry.nbytes(Place.PINNED) == before + 160
    assert [seen(cpu, target)[0] for target in kept] == list(range(10))
    assert cpu.registry.nbytes(Place.PINNED) == before


def test_empty_arrays_can_be_sent(rt: Runtime) -> None:
    for policy in SAFE:
        made = POLICIES[policy](rt)
        for upload in (made.upload("u", 4, torch.int32), made.staging("s", 4, torch.int32)):
            for _ in range(3):
                assert len(upload.send(np.empty(0, np.int32))) == 0
            assert seen(rt, upload.send(np.arange(3, dtype=np.int32))) == [0, 1, 2]
    assert not marks(rt, "implicit_sync")


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_the_pool_publishes_in_turn(rt: Runtime) -> None:
    pool = UvaBufferPool(rt, 4, torch.int32, 3, "p")
    views = [pool.copy_to_uva(np.full(4, i, np.int32)) for i in range(7)]
    assert [rt.registry.name(view) for view in views] == ["p.uva0", "p.uva1", "p.uva2"] * 2 + ["p.uva0"]
    assert [view.tolist() for view in views[-3:]] == [[4] * 4, [5] * 4, [6] * 4]


def test_a_slot_that_grows_is_retired_until_its_reader_is_done(cpu: CpuRuntime) -> None:
    pool = UvaBufferPool(cpu, 2, torch.int32, 2, "p")
    kept, bytes_before = device(cpu, 2), cpu.registry.nbytes(Place.UVA)
    view = pool.copy_to_uva(np.array([7, 8], np.int32))
    cpu.run("copy", kept, view, reads=(view,), writes=(kept,))
    pool.copy_to_uva(np.array([1, 1], np.int32))
    pool.copy_to_uva(np.array([9] * 5, np.int32))  # its turn comes round to the first slot, which is too small
    address, view = view.data_ptr(), None  # type: ignore[assignment]
    assert [slot.gpu.data_ptr() for _, slot in pool._retired] == [address]
    assert cpu.registry.nbytes(Place.UVA) == bytes_before + 4 * 8
    assert [len(slot.np) for slot in pool.slots] == [8, 2]
    assert seen(cpu, kept) == [7, 8]
    for _ in range(2):
        assert pool._retired
        pool.copy_to_uva(np.array([1], np.int32))
    assert pool._retired == []
    assert cpu.registry.nbytes(Place.UVA) == bytes_before + 4 * 8 - 8


def test_a_pool_of_matrices_grows_by_rows(rt: Runtime) -> None:
    pool = UvaBufferPool(rt, (2, 3), torch.int64, 2, "p")
    view = pool.copy_to_uva(np.arange(15).reshape(5, 3))
    assert view.shape == (5, 3)
    assert pool.slots[0].np.shape == (8, 3)
    assert view.tolist() == np.arange(15).reshape(5, 3).tolist()


def test_a_pool_needs_a_slot(rt: Runtime) -> None:
    with pytest.raises(ValueError, match="depth 0"):
        UvaBufferPool(rt, 4, torch.int32, 0, "p")


def test_a_uva_buffer_is_one_memory(rt: Runtime) -> None:
    buffer, there = UvaBuffer(rt, 3, torch.int32, "b"), device(rt, 3)
    buffer.np[:] = [1, 2, 3]
    rt.run("copy", there, buffer.gpu, reads=(buffer.gpu,), writes=(there,))
    assert seen(rt, there) == [1, 2, 3]


# -- the barrier -------------------------------------------------------------------------------------------------------


def test_the_barrier_waits_for_the_previous_copies_and_no_more(cpu: CpuRuntime) -> None:
    policy, there = POLICIES["barrier"](cpu), device(cpu, 1)
    upload = policy.upload("u", 2, torch.int32)
    with policy.prepare():
        upload.send(np.ones(2, np.int32))
    copies = cpu.main.queued
    for _ in range(5):
        cpu.run("add", there, 1, writes=(there,))
    assert cpu.main.done == 0
    with policy.prepare():
        assert cpu.main.done == copies
    assert [mark.name for mark in log(cpu).waits()] == ["prepare_inputs"]


def test_the_barrier_records_after_an_error_too(cpu: CpuRuntime) -> None:
    policy = POLICIES["barrier"](cpu)
    upload = policy.upload("u", 2, torch.int32)

    def broken() -> None:
        with policy.prepare():
            upload.send(np.ones(2, np.int32))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with policy.prepare():
        assert cpu.main.done == cpu.main.queued == 1


# -- mutants -----------------------------------------------------------------------------------------------------------


def _always_the_first_slot(self: UvaBufferPool, values: Any, original: Callable[..., Any]) -> Any:
    self._published = 0
    return original(self, values)


def test_mutant_a_pool_that_does_not_go_round(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    original = UvaBufferPool.copy_to_uva
    monkeypatch.setattr(
        UvaBufferPool, "copy_to_uva", lambda self, values: _always_the_first_slot(self, values, original)
    )
    with pytest.raises(AssertionError):
        test_the_pool_publishes_in_turn(cpu)
    with pytest.raises(AssertionError):
        test_contents_are_right_with_two_steps_in_flight(cpu, "uva_pool")


def test_mutant_a_barrier_that_does_not_wait(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICIES["barrier"], "prepare", TransferPolicy.prepare)
    with pytest.raises(AssertionError):
        test_contents_are_right_with_two_steps_in_flight(cpu, "barrier")


def test_mutant_a_temporary_that_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine("deferred", observer=EventLog()) as rt:
        shared: dict[Any, torch.Tensor] = {}
        empty = CpuRuntime.empty

        def reuse(
            self: CpuRuntime, shape: Any, dtype: torch.dtype, *, name: str, place: str = "device"
        ) -> torch.Tensor:
            if not name.endswith(".tmp"):
                return empty(self, shape, dtype, name=name, place=place)
            return shared.setdefault((name, shape), empty(self, shape, dtype, name=name, place=place))

        monkeypatch.setattr(CpuRuntime, "empty", reuse)
        with pytest.raises(AssertionError):
            test_contents_are_right_with_two_steps_in_flight(rt, "pinned_copy")


def _every_copy_has_a_name(rt: Runtime, policy: str) -> None:
    transfers = POLICIES[policy](rt)
    transfers.upload("u", 4, torch.int32).send(np.arange(3, dtype=np.int32))
    transfers.staging("s", 4, torch.int32).send(np.arange(3, dtype=np.int32))
    transfers.table("t", 4, torch.int32).publish()
    rt.synchronize()
    made = [mark for mark in log(rt).marks if mark.kind in ("publish", "h2d")]
    assert made
    assert all("?" not in (mark.name, *mark.reads, *mark.writes) for mark in made), made


@pytest.mark.parametrize("policy", POLICIES)
def test_every_copy_has_a_name(rt: Runtime, policy: str) -> None:
    """Temporaries too, while somebody listens."""
    _every_copy_has_a_name(rt, policy)


def test_a_nameless_temporary_is_noticed(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's own mutant."""
    name = cpu.registry.name
    monkeypatch.setattr(cpu.registry, "name", lambda t: "?" if name(t).endswith(".tmp") else name(t))
    with pytest.raises(AssertionError):
        _every_copy_has_a_name(cpu, "pinned_copy")


# -- first rows, and arrays filled in place ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_publishes_its_first_rows(rt: Runtime, policy: str) -> None:
    """V1 sends the rows of the batch; what lies behind them is nobody's to read."""
    table = POLICIES[policy](rt, 2).table("table", (4, 3), torch.int32)
    for step, rows in enumerate([2, 4, 1, 3, None]):
        table.np[:] = 100 * step + np.arange(12).reshape(4, 3)
        table.publish(rows)
        rt.synchronize()
        assert tuple(table.gpu.shape) == (4, 3)
        assert seen(rt, table.gpu.view(-1))[: 3 * (rows or 4)] == table.np[:rows].reshape(-1).tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_only_the_first_rows_are_copied(policy: str) -> None:
    rt = CpuRuntime()
    table = POLICIES[policy](rt, 2).table("table", (4, 3), torch.int32)
    kept = EventLog()
    rt.observer = kept
    table.publish(2)
    assert {mark.nbytes for mark in kept.marks if mark.kind in ("h2d", "publish")} == {2 * 3 * 4}


@pytest.mark.parametrize("policy", SAFE)
def test_an_array_filled_in_place_is_right_with_two_steps_in_flight(rt: Runtime, policy: str) -> None:
    transfers = POLICIES[policy](rt, 2)
    upload = transfers.upload("array", 5, torch.int64)
    kept = []
    for step, n in enumerate([3, 5, 1, 4]):
        with transfers.prepare():
            upload.np[:] = np.arange(5) + 10 * step
            sent = upload.send_first(n)
        assert len(sent) == n
        target = rt.empty(n, torch.int64, name="kept")
        rt.run("copy", target, sent, reads=(sent,), writes=(target,))
        kept.append((target, (np.arange(n) + 10 * step).tolist()))
    assert [seen(rt, target) for target, _ in kept] == [right for _, right in kept]


def test_a_pinned_array_is_copied_from_where_it_was_filled() -> None:
    """V1's own way pays for no second copy on the host."""
    rt, kept = CpuRuntime(), EventLog()
    for policy, kinds in (("barrier", ["h2d"]), ("pinned_copy", ["publish", "h2d"])):
        upload = POLICIES[policy](rt, 2).upload(f"array.{policy}", 5, torch.int64)
        rt.observer = kept
        kept.clear()
        upload.np.fill(3)
        upload.send_first(2)
        assert [mark.kind for mark in kept.marks] == kinds
