"""From a configuration to a runtime, and the sentence where it cannot be had."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mrv2lab.config import RunnerConfig
from mrv2lab.observer import EventLog
from mrv2lab.protocol import TritonMissing
from mrv2lab.runtime import DeviceMissing, create, make_runtime
from mrv2lab.runtime.cpu import CpuRuntime

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def test_a_cpu_runtime_as_configured() -> None:
    log = EventLog()
    rt = make_runtime(RunnerConfig(device="cpu", stream="deferred", lag=2), log)
    assert isinstance(rt, CpuRuntime)
    assert (rt.lag, rt.backend, rt.observer, rt.device.type) == (2, "spec", log, "cpu")
    assert (rt.main.name, rt.copy.name, rt.current.name) == ("main", "copy", "main")


@no_gpu
def test_auto_is_the_cpu_without_a_gpu() -> None:
    assert make_runtime().device.type == "cpu"


@no_gpu
def test_no_gpu_is_said_with_the_remedy() -> None:
    with pytest.raises(DeviceMissing, match=r"'cuda' was asked for, but .*; use device='cpu' or 'auto'"):
        make_runtime(RunnerConfig(device="cuda"))


@pytest.mark.parametrize(("device", "why"), [("gpu", "unknown"), ("mps", "not supported"), ("cpu:x", "unknown")])
def test_unknown_devices(device: str, why: str) -> None:
    with pytest.raises(DeviceMissing, match=why):
        make_runtime(RunnerConfig(device=device))


def test_kernels_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        make_runtime(RunnerConfig(device="cpu", kernels="triton"))
    if importlib.util.find_spec("triton"):
        assert make_runtime(RunnerConfig(device="cpu", kernels="interpret")).backend == "interpret"
    monkeypatch.setattr(create, "have_triton", lambda: False)
    with pytest.raises(TritonMissing, match="pip install triton"):
        make_runtime(RunnerConfig(device="cpu", kernels="interpret"))


@pytest.mark.gpu
def test_auto_is_the_gpu_where_there_is_one() -> None:
    rt = make_runtime()
    assert (rt.device.type, rt.backend) == ("cuda", "triton")
    with pytest.raises(ValueError, match="runs on a CPU only"):
        make_runtime(RunnerConfig(device="cuda", kernels="spec"))
    with pytest.raises(DeviceMissing, match="there are"):
        make_runtime(RunnerConfig(device="cuda:99"))
