"""One test, several machines: the runtimes that fixture ``rt`` goes through, each with an EventLog as its observer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.observer import EventLog, Mark
from mrv2lab.runtime.base import Event, Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import TransferPolicy

MACHINES = ["deferred", "threaded", pytest.param("cuda", marks=pytest.mark.gpu)]


def fill(dst: torch.Tensor, value: int) -> None:
    dst.fill_(value)


def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


def add(dst: torch.Tensor, value: int) -> None:
    dst.add_(value)


def boom(dst: torch.Tensor) -> None:
    raise ArithmeticError("the kernel divides by zero")


@contextmanager
def machine(name: str, **options: Any) -> Iterator[Runtime]:
    """A runtime with the segments above registered."""
    rt: Runtime
    options.setdefault("observer", EventLog())
    if name == "cuda":
        from mrv2lab.runtime.cuda import CudaRuntime

        rt = CudaRuntime(**options)
    else:
        rt = CpuRuntime(stream=name, **options)
    for fn in (fill, copy, add, boom):
        rt.register(fn.__name__, fn)
    try:
        yield rt
    finally:
        rt.close()


@pytest.fixture(params=MACHINES)
def rt(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with machine(request.param) as made:
        yield made


@pytest.fixture(params=["deferred", "threaded"])
def soft(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with machine(request.param) as made:
        yield made


@pytest.fixture
def cpu() -> Iterator[CpuRuntime]:
    with machine("deferred") as made:
        assert isinstance(made, CpuRuntime)
        yield made


def log(rt: Runtime) -> EventLog:
    """The runtime's observer."""
    assert isinstance(rt.observer, EventLog)
    return rt.observer


def marks(rt: Runtime, *kinds: str) -> list[Mark]:
    """What the observer saw of these kinds, in order."""
    return [mark for mark in log(rt).marks if mark.kind in kinds]


def pinned(rt: Runtime, values: Any, name: str = "pinned", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A pinned buffer that holds ``values``."""
    tensor = rt.empty(len(values), dtype, name=name, place="pinned")
    tensor.numpy()[:] = values
    return tensor


def device(rt: Runtime, size: int, name: str = "device", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A device buffer of zeros."""
    return rt.zeros(size, dtype, name=name)


def seen(rt: Runtime, tensor: torch.Tensor) -> list[Any]:
    """Its values after everything queued."""
    values: list[Any] = rt.read(tensor).tolist()
    return values


def raw_values(rt: Runtime, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """CPU machines: what the bytes are *now*, with nothing drained."""
    return rt.raw(tensor).numpy().copy()


class Steps:
    """The engine's discipline: ``with steps: ...`` is one step's host writes, and two steps are in flight at most."""

    def __init__(self, rt: Runtime, policy: TransferPolicy) -> None:
        self.rt = rt
        self.policy = policy
        self._flight: list[Event] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        if len(self._flight) == 2:
            self._flight.pop(0).synchronize()
        with self.policy.prepare():
            yield
        done = self.rt.event("done")
        done.record()
        self._flight.append(done)
        self.rt.end_step()
