"""Places of memory: who is where, who may go where, and what is captured by reference."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.ops.apply_write import apply_write
from mrv2lab.runtime.base import PlaceError, Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.places import Place, Registry
from tests.runtime.machines import device, machine, marks, pinned, seen


@pytest.mark.parametrize("place", ["host", "pinned", "uva", "device"])
def test_views_inherit_their_place(rt: Runtime, place: str) -> None:
    tensor = rt.empty((4, 6), torch.float32, name="table", place=place)
    for view in (tensor, tensor[1:], tensor[2], tensor.view(-1)[3:5], tensor.t()):
        buffer = rt.registry.find(view)
        assert buffer is not None
        assert (buffer.name, buffer.place, buffer.nbytes) == ("table", Place(place), 96)


def test_an_entry_lives_as_long_as_a_view(rt: Runtime) -> None:
    before = len(rt.registry)
    view = rt.empty(100, torch.int32, name="table")[50:]
    assert rt.registry.name(view) == "table"
    del view
    assert len(rt.registry) == before


def test_an_entry_lives_as_long_as_queued_work_needs_it(cpu: CpuRuntime) -> None:
    there = device(cpu, 3)
    cpu.h2d(there, pinned(cpu, [1, 2, 3], "temporary"))
    assert "temporary" in {buffer.name for buffer in cpu.registry.buffers()}
    assert seen(cpu, there) == [1, 2, 3]
    assert "temporary" not in {buffer.name for buffer in cpu.registry.buffers()}


def test_bytes_by_place_are_the_bytes_asked_for(rt: Runtime) -> None:
    before = {place: rt.registry.nbytes(place) for place in Place}
    wanted = dict.fromkeys(Place, 0)
    keep = []
    for place in Place:
        for shape, dtype in (((3, 5), torch.int64), (7, torch.bool), (11, torch.bfloat16), ((2, 0), torch.int32)):
            tensor = rt.empty(shape, dtype, name="buffer", place=place.value)
            wanted[place] += tensor.numel() * dtype.itemsize
            keep.append(tensor)
    assert {place: rt.registry.nbytes(place) - before[place] for place in Place} == wanted
    keep.clear()
    tensor = None
    assert {place: rt.registry.nbytes(place) for place in Place} == before


def test_empty_buffers_do_not_share_an_entry(rt: Runtime) -> None:
    one = rt.empty(0, torch.int32, name="one", place="pinned")
    other = rt.empty(0, torch.int32, name="other", place="pinned")
    assert (rt.registry.name(one), rt.registry.name(other)) == ("one", "other")
    del other
    assert rt.registry.name(one) == "one"


def test_a_new_owner_of_an_address_survives_the_old_ones_end() -> None:
    registry, tensor = Registry(), torch.zeros(4)
    registry.add(tensor, "old", Place.HOST)
    registry.add(tensor, "new", Place.DEVICE)
    assert len(registry) == 1
    old = next(iter(registry.buffers()))
    registry._forget(tensor.untyped_storage().data_ptr(), type(old)("old", Place.HOST, 16))
    assert registry.name(tensor) == "new"


def test_counting_bytes_while_a_worker_drops_buffers() -> None:
    with machine("threaded") as rt:
        stop = threading.Event()

        def count() -> Iterator[int]:
            while not stop.is_set():
                yield rt.registry.nbytes(Place.PINNED)

        there, errors = device(rt, 2), []

        def look() -> None:
            try:
                list(count())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        for _ in range(300):
            rt.h2d(there, pinned(rt, [1, 2]))
        rt.synchronize()
        stop.set()
        thread.join()
        assert errors == []


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32]
)
def test_untouched_device_storage_is_poisoned(cpu: CpuRuntime, dtype: torch.dtype) -> None:
    values = cpu.raw(cpu.empty(3, dtype, name="x"))
    poison = torch.full((3,), torch.nan if dtype.is_floating_point else 1 if dtype.itemsize == 1 else -0x5EED).to(dtype)
    assert torch.equal(values.isnan(), poison.isnan()) if dtype.is_floating_point else torch.equal(values, poison)


def test_adopted_weights_are_device_storage(rt: Runtime) -> None:
    weight = rt.adopt(torch.nn.Parameter(torch.ones(3)), "weight")
    buffer = rt.registry.find(weight)
    assert buffer is not None
    assert (buffer.name, buffer.place, buffer.nbytes) == ("weight", Place.DEVICE, 12)
    assert not weight.requires_grad
    again = rt.adopt(weight, "tied")
    rt.run("fill", again, 2, writes=(again,))
    assert seen(rt, again) == [2, 2, 2]


def test_pageable_tensors_are_refused_by_runs_and_kernels(cpu: CpuRuntime) -> None:
    there = device(cpu, 4)
    for host in (torch.zeros(4, dtype=torch.int32), cpu.empty(4, torch.int32, name="h", place="host")):
        with pytest.raises(PlaceError, match=r"copy: a pageable host tensor .* at .*test_places\.py:\d+; copy it with"):
            cpu.run("copy", there, host)
        with pytest.raises(PlaceError, match="apply_write: a pageable host tensor"):
            apply_write(cpu, there.view(1, 4), host, host, host, host, 1, 1)
        with pytest.raises(PlaceError, match="pageable"):
            cpu.run("copy", there, (host, 1))
    assert cpu.main.queued == 0


@pytest.mark.parametrize("arg", [np.zeros(3), [1, 2], {"a": 1}, np.int32(3), object(), lambda: 1])
def test_only_tensors_and_scalars_can_be_queued(cpu: CpuRuntime, arg: Any) -> None:
    with pytest.raises(PlaceError, match=rf"fill: {type(arg).__name__} cannot be queued, .* at .*test_places\.py"):
        cpu.run("fill", device(cpu, 1), arg)
    assert cpu.main.queued == 0


@pytest.mark.parametrize("place", ["pinned", "uva"])
def test_host_memory_goes_by_reference_and_that_is_the_race(cpu: CpuRuntime, place: str) -> None:
    there, host = device(cpu, 2), cpu.zeros(2, torch.int32, name="shared", place=place)
    cpu.run("copy", there, host, reads=(host,), writes=(there,))
    host.fill_(7)  # after the launch, before anybody waits
    assert seen(cpu, there) == [7, 7]


def test_pinned_copies_go_by_reference_too(cpu: CpuRuntime) -> None:
    there, host = device(cpu, 2), pinned(cpu, [1, 1])
    cpu.h2d(there, host)
    host.fill_(7)
    assert seen(cpu, there) == [7, 7]


def test_a_pageable_copy_is_over_when_it_returns(cpu: CpuRuntime) -> None:
    there, host = device(cpu, 2), torch.ones(2, dtype=torch.int32)
    cpu.h2d(there, host)
    host.fill_(7)
    back = torch.zeros(2, dtype=torch.int32)
    cpu.d2h(back, there)
    assert back.tolist() == [1, 1]
    assert [mark.name for mark in marks(cpu, "implicit_sync")] == ["pageable h2d", "pageable d2h"]


def test_mutant_without_the_place_check(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(self: CpuRuntime, what: str, arg: Any) -> Any:
        return self.raw(arg)

    monkeypatch.setattr(CpuRuntime, "_capture", lenient)
    for test in (test_pageable_tensors_are_refused_by_runs_and_kernels,):
        with pytest.raises(pytest.fail.Exception):
            test(cpu)


def test_mutant_registry_that_keeps_its_entries(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "_forget", lambda *_: None)
    with pytest.raises(AssertionError):
        test_an_entry_lives_as_long_as_a_view(cpu)
