"""From a device's name to a runtime, with a clear sentence where it cannot be had."""

from __future__ import annotations

import importlib.util

import torch

from mrv2lab.config import RunnerConfig
from mrv2lab.observer import NULL_OBSERVER, Observer
from mrv2lab.protocol import Backend, TritonMissing
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.cuda import CudaRuntime


class DeviceMissing(RuntimeError):
    """The device that was asked for is not here."""


def have_triton() -> bool:
    """Whether Triton is installed (not whether it can compile: that needs a GPU)."""
    return importlib.util.find_spec("triton") is not None


def resolve_device(device: str) -> torch.device:
    """``"auto"`` is the first GPU if torch sees one, else the CPU. Raises :class:`DeviceMissing`."""
    if not isinstance(device, (str, torch.device)):
        raise DeviceMissing(f"device {device!r} is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        made = torch.device(device)
    except RuntimeError as error:
        raise DeviceMissing(f"device {device!r} is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if made.type not in ("cpu", "cuda"):
        raise DeviceMissing(f"device {device!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if made.type == "cuda":
        if not torch.cuda.is_available():
            why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no NVIDIA GPU or driver"
            raise DeviceMissing(f"device {device!r} was asked for, but {why}; use device='cpu' or 'auto'")
        if made.index is not None and made.index >= torch.cuda.device_count():
            raise DeviceMissing(f"device {device!r} was asked for, but there are {torch.cuda.device_count()} GPUs")
    return made


def make_runtime(config: RunnerConfig | None = None, observer: Observer = NULL_OBSERVER) -> Runtime:
    """The runtime that ``config`` asks for. Raises :class:`DeviceMissing` or ``TritonMissing`` with the remedy."""
    config = config or RunnerConfig()
    device = resolve_device(config.device)
    if device.type == "cuda":
        if config.kernels not in ("auto", "triton"):
            raise ValueError(f"kernels={config.kernels!r} runs on a CPU only; on CUDA use 'auto' or 'triton'")
        if not have_triton():
            raise TritonMissing("device 'cuda' needs Triton: `pip install triton` (Linux), or use device='cpu'")
        return CudaRuntime(index=device.index or 0, observer=observer)
    if config.kernels == "triton":
        raise ValueError("kernels='triton' needs a GPU; on a CPU use 'spec' or 'interpret'")
    if config.kernels == "interpret" and not have_triton():
        raise TritonMissing("kernels='interpret' needs Triton: `pip install triton` (Linux), or use kernels='spec'")
    backend: Backend = "interpret" if config.kernels == "interpret" else "spec"
    return CpuRuntime(stream=config.stream, lag=config.lag, backend=backend, threads=config.threads, observer=observer)
