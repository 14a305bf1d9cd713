"""What the host may do with device storage: views are free, reads are seen and right, all else is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.runtime.base import PlaceError
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.device_tensor import DeviceTensor
from mrv2lab.runtime.places import Place
from tests.runtime.machines import device, fill, marks

T = torch.Tensor
HOST = torch.zeros(4, dtype=torch.int32)


def _into(write: Callable[[T], Any]) -> list[int]:
    host = torch.zeros(4, dtype=torch.int32)
    write(host)
    return host.tolist()


# t is int32 [4], and the queue holds fill(t, 6): what is right is what the host sees after the drain.
READS: dict[str, tuple[Callable[[T], Any], Any]] = {
    "item": (lambda t: t[0].item(), 6),
    "tolist": (lambda t: t.tolist(), [6] * 4),
    "numpy": (lambda t: t.numpy().tolist(), [6] * 4),
    "np.asarray": (lambda t: np.asarray(t).tolist(), [6] * 4),
    "np.array": (lambda t: np.array(t[:2], np.int64).tolist(), [6, 6]),
    "bool": (lambda t: bool(t[0]), True),
    "if": (lambda t: 1 if t[0] else 2, 1),
    "int": (lambda t: int(t[0]), 6),
    "float": (lambda t: float(t[0]), 6.0),
    "index": (lambda t: list(range(7))[t[0]], 6),
    "range": (lambda t: len(range(t[0])), 6),
    "slice bound": (lambda t: HOST[: t[0]].shape[0], 4),
    "nonzero": (lambda t: t.nonzero().shape, (4, 1)),
    "torch.nonzero(input=)": (lambda t: torch.nonzero(input=t).shape, (4, 1)),
    "nonzero as tuple": (lambda t: t.nonzero(as_tuple=True)[0].shape, (4,)),
    "mask index": (lambda t: t[torch.tensor([True, False, True, False])].shape, (2,)),
    "list index": (lambda t: t[[0, 3]].tolist(), [6, 6]),
    "array index": (lambda t: t[np.array([0, 3])].shape, (2,)),
    "repr": (lambda t: repr(t), "tensor([6, 6, 6, 6], dtype=torch.int32)"),
    "str": (lambda t: str(t[0]), "tensor(6, dtype=torch.int32)"),
    "format": (lambda t: f"{t[0]:03d}", "006"),
    "cpu": (lambda t: t.cpu().tolist(), [6] * 4),
    "to('cpu')": (lambda t: t.to("cpu").tolist(), [6] * 4),
    "to(device=)": (lambda t: t.to(device=torch.device("cpu"), dtype=torch.int64).tolist(), [6] * 4),
    "to(host tensor)": (lambda t: t.to(HOST).tolist(), [6] * 4),
    "equal": (lambda t: torch.equal(t[:2], t[2:]), True),
    "allclose": (lambda t: torch.allclose(t[:2], t[2:]), True),
    "in": (lambda t: 6 in t, True),
    "host.copy_": (lambda t: _into(lambda host: host.copy_(t)), [6] * 4),
    "host[...] =": (lambda t: _into(lambda host: host.__setitem__(slice(1, 3), t[:2])), [0, 6, 6, 0]),
    "pickle": (lambda t: pickle.loads(pickle.dumps(t)).tolist(), [6] * 4),
    "copy.copy": (lambda t: copy.copy(t).tolist(), [6] * 4),
    "iteration over values": (lambda t: sum(int(one) for one in t), 24),
    "torch.full": (lambda t: torch.full((1,), t[0]).tolist(), [6]),
    "torch.arange": (lambda t: len(torch.arange(t[0])), 6),
    "torch.tensor of scalars": (lambda t: torch.tensor([t[0], t[1]]).tolist(), [6, 6]),
    "unique": (lambda t: t.unique().shape, (1,)),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("case", READS)
def test_reads_are_seen_and_see_what_was_queued(cpu: CpuRuntime, case: str) -> None:
    read, right = READS[case]
    tensor = device(cpu, 4, "tokens")
    cpu.run("fill", tensor, 6, writes=(tensor,))
    with cpu.watch_syncs() as lines:
        assert read(tensor) == right
    assert lines
    assert all(" on 'tokens' at " in line or "'result of " in line for line in lines), lines
    assert "test_device_tensor.py:" in lines[0]
    mark = marks(cpu, "implicit_sync")[0]
    assert mark.reads == ("tokens",)
    assert mark.stream == "main"
    assert mark.site is not None
    assert "test_device_tensor.py:" in mark.site


VIEWS: dict[str, Callable[[T], T]] = {
    "slice": lambda t: t[1:3],
    "step": lambda t: t[::2],
    "int": lambda t: t[1],
    "np.int64": lambda t: t[np.int64(1)],
    "host scalar": lambda t: t[torch.tensor(1)],
    "none": lambda t: t[None],
    "ellipsis": lambda t: t[..., 0],
    "tuple": lambda t: t.view(2, 2)[1:, 0],
    "view": lambda t: t.view(2, 2),
    "dtype": lambda t: t.view(torch.float32),
    "reshape": lambda t: t.reshape(2, 2),
    "flatten": lambda t: t.view(2, 2).flatten(),
    "contiguous": lambda t: t.contiguous(),
    "t": lambda t: t.view(2, 2).t(),
    "T": lambda t: t.view(2, 2).T,
    "mT": lambda t: t.view(2, 2).mT,
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "expand": lambda t: t.unsqueeze(0).expand(3, 4),
    "narrow": lambda t: t.narrow(0, 1, 2),
    "split": lambda t: t.split(2)[1],
    "chunk": lambda t: t.chunk(2)[1],
    "unbind": lambda t: t.unbind()[1],
    "iter": lambda t: list(t)[1],
    "as_tensor": lambda t: torch.as_tensor(t),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views_are_free_and_stay_on_the_device(cpu: CpuRuntime, case: str) -> None:
    tensor = device(cpu, 4, "tokens")
    cpu.run("fill", tensor, 6, writes=(tensor,))
    view = VIEWS[case](tensor)
    assert type(view) is DeviceTensor
    assert cpu.registry.name(view) == "tokens"
    assert not marks(cpu, "implicit_sync", "synchronize")
    assert cpu.main.done == 0  # type: ignore[attr-defined]
    with pytest.raises(PlaceError):
        view + 1


def test_facts_are_free(cpu: CpuRuntime) -> None:
    tensor = device(cpu, 6).view(2, 3)
    cpu.run("fill", tensor, 6, writes=(tensor,))
    assert (tensor.shape, tensor.dtype, len(tensor), tensor.dim()) == ((2, 3), torch.int32, 2, 2)
    assert (tensor.stride(), tensor.numel(), tensor.element_size()) == ((3, 1), 6, 4)
    assert tensor.data_ptr() == cpu.raw(tensor).data_ptr()
    assert {tensor: 1}[tensor] == 1
    assert not marks(cpu, "implicit_sync")


REFUSED: dict[str, Callable[[T], Any]] = {
    "add": lambda t: t + 1,
    "radd": lambda t: 1 + t,
    "eq": lambda t: t == 6,
    "sum": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(HOST),
    "__setitem__": lambda t: t.__setitem__(0, 1),
    "to": lambda t: t.to(torch.float32),
    "to (asynchronous)": lambda t: t.to("cpu", non_blocking=True),
    "copy_ (asynchronous)": lambda t: torch.zeros(4, dtype=torch.int32).copy_(t, non_blocking=True),
    "stack": lambda t: torch.stack([t, t]),
    "cat": lambda t: torch.cat([HOST, t]),
    "out": lambda t: torch.add(HOST, 1, out=t),
    "host + device": lambda t: HOST + t,
    "host[device]": lambda t: HOST[t[:1]],
    "device[device indices]": lambda t: t[t],
    "index_select": lambda t: t.index_select(0, torch.tensor([0])),
    "torch.tensor": lambda t: torch.tensor(t),
    "torch.as_tensor (dtype)": lambda t: torch.as_tensor(t, dtype=torch.float32),
    "torch.IntTensor": lambda t: torch.IntTensor(t),
    "new_tensor": lambda t: HOST.new_tensor(t),
    "empty_like": lambda t: torch.empty_like(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "reshape that copies": lambda t: t.view(2, 2).t().reshape(-1),
    "contiguous that copies": lambda t: t[::2].contiguous(),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "np.from_dlpack": lambda t: np.from_dlpack(t),
    "as_subclass": lambda t: t.as_subclass(T),
    "Parameter": lambda t: torch.nn.Parameter(t),
    "np.add": lambda t: np.add(t, 1),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("case", REFUSED)
def test_other_torch_operations_are_refused(cpu: CpuRuntime, case: str) -> None:
    tensor = device(cpu, 4, "tokens")
    cpu.run("fill", tensor, 2, writes=(tensor,))
    with pytest.raises(PlaceError, match=r"at .*test_device_tensor\.py:\d+: queued work would not have run yet"):
        REFUSED[case](tensor)
    cpu.synchronize()
    assert cpu.raw(tensor).tolist() == [2] * 4


def test_the_error_names_operation_and_line(cpu: CpuRuntime) -> None:
    with pytest.raises(PlaceError, match=r"^torch\.relu on device storage outside rt\.kernel and rt\.run, at "):
        torch.relu(device(cpu, 4))


def test_plain_tensors_are_none_of_our_business(cpu: CpuRuntime) -> None:
    tensor, buffer = torch.arange(4), cpu.empty(4, torch.int32, name="out", place="pinned")
    with cpu.watch_syncs() as lines:
        buffer.fill_(1)
        assert (tensor + 1).tolist() == [1, 2, 3, 4]
        assert bool(buffer[0])
        assert buffer.numpy().tolist() == [1] * 4
    assert lines == []
    assert not marks(cpu, "implicit_sync")


def test_watching_nests_and_ends(cpu: CpuRuntime) -> None:
    tensor = device(cpu, 1)
    with cpu.watch_syncs() as outer:
        tensor.tolist()
        with cpu.watch_syncs() as inner:
            tensor.item()
        tensor.numpy()
    tensor.item()
    assert [line.split()[0] for line in outer] == ["tolist", "numpy"]
    assert [line.split()[0] for line in inner] == ["item"]


@pytest.mark.parametrize("read", [T.cpu, T.numpy, lambda t: t.to("cpu"), copy.copy])
def test_a_read_is_a_snapshot(cpu: CpuRuntime, read: Callable[[T], Any]) -> None:
    """What the host was given does not change when later work does; nor the device when the host writes."""
    tensor = device(cpu, 2)
    snapshot = read(tensor)
    cpu.run("fill", tensor, 5, writes=(tensor,))
    cpu.synchronize()
    assert snapshot.tolist() == [0, 0]
    snapshot[:] = 9
    assert tensor.tolist() == [5, 5]


def test_what_a_read_makes_on_the_device_is_device_storage(cpu: CpuRuntime) -> None:
    tensor = device(cpu, 4, "tokens")
    cpu.run("fill", tensor, 6, writes=(tensor,))
    found = tensor[[0, 1]]
    buffer = cpu.registry.find(found)
    assert buffer is not None
    assert (buffer.name, buffer.place) == ("result of __getitem__", Place.DEVICE)
    cpu.run("fill", found, 1, writes=(found,))
    assert found.tolist() == [1, 1]
    (where,) = tensor.nonzero(as_tuple=True)
    assert type(where) is DeviceTensor


def test_an_index_read_from_the_device_gives_a_view(cpu: CpuRuntime) -> None:
    tensor, index = device(cpu, 4, "tokens"), device(cpu, 1, "index")
    cpu.run("fill", index, 2, writes=(index,))
    view = tensor[index[0]]
    assert cpu.registry.name(view) == "tokens"
    cpu.run("fill", view, 9, writes=(view,))
    assert tensor.tolist() == [0, 0, 9, 0]
    assert [mark.name for mark in marks(cpu, "implicit_sync")] == ["__getitem__", "tolist"]


def test_a_mask_on_the_device_is_read(cpu: CpuRuntime) -> None:
    tensor, mask = device(cpu, 4), device(cpu, 4, "mask", torch.bool)
    cpu.run("fill", mask[1:3], 1, writes=(mask,))
    assert tensor[mask].shape == (2,)
    assert [mark.name for mark in marks(cpu, "implicit_sync")] == ["__getitem__"]


def test_a_read_drains_the_current_stream_only(cpu: CpuRuntime) -> None:
    one, other = device(cpu, 1), device(cpu, 1)
    cpu.run("fill", one, 1, writes=(one,))
    with cpu.use(cpu.copy):
        cpu.run("fill", other, 1, writes=(other,))
    assert one.item() == 1
    assert cpu.copy.done == 0
    with cpu.use(cpu.copy):
        assert other.item() == 1


def test_a_read_during_a_capture_is_an_error_as_on_cuda(cpu: CpuRuntime) -> None:
    tensor, graph = device(cpu, 1, "tokens"), cpu.graph("g")
    with graph.capture():
        with pytest.raises(
            RuntimeError, match=r"item on 'tokens' at .*test_device_tensor.*'g', which is being captured"
        ):
            tensor.item()
        with pytest.raises(RuntimeError, match="pageable h2d"):
            cpu.h2d(tensor, torch.zeros(1, dtype=torch.int32))
    assert tensor.item() == 0


def test_reads_are_seen_in_every_thread(cpu: CpuRuntime) -> None:
    tensor = device(cpu, 1)
    cpu.run("fill", tensor, 3, writes=(tensor,))
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(tensor.item()))
    thread.start()
    thread.join()
    assert values == [3]
    assert len(marks(cpu, "implicit_sync")) == 1


def test_tensors_outlive_their_runtime() -> None:
    rt = CpuRuntime()
    rt.register("fill", fill)
    tensor = device(rt, 2)
    rt.run("fill", tensor, 4, writes=(tensor,))
    rt.synchronize()
    del rt
    gc.collect()
    assert tensor.owner() is None  # type: ignore[attr-defined]
    assert tensor.tolist() == [4, 4]
    assert tensor[1:].item() == 4
    assert tensor[[0]].tolist() == [4]
    with pytest.raises(PlaceError):
        tensor + 1


def test_results_of_queued_work_are_plain_inside_it(cpu: CpuRuntime) -> None:
    kinds: list[type] = []
    cpu.register("look", lambda t, pair: kinds.extend((type(t), type(t[0] + 1), type(pair[0]))))
    tensor = device(cpu, 2)
    cpu.run("look", tensor, (tensor[:1], 3))
    cpu.synchronize()
    assert kinds == [T, T, T]
    assert not marks(cpu, "implicit_sync")


def test_mutant_a_read_that_does_not_drain_is_caught(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "implicit_sync", lambda *_: None)
    with pytest.raises(AssertionError):
        test_reads_are_seen_and_see_what_was_queued(cpu, "item")
