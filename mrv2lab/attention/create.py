"""Which backend a run gets. Counterpart in vLLM: ``v1/attention/selector.py``."""

from __future__ import annotations

from typing import get_args

from mrv2lab.attention.builder import AttentionBackend
from mrv2lab.attention.flashinfer_backend import FlashInferBackend, load_flashinfer
from mrv2lab.attention.torch_backend import TorchBackend
from mrv2lab.attention.triton_backend import TritonBackend
from mrv2lab.config import AttentionName, EngineConfig
from mrv2lab.runtime.base import Runtime


def make_backend(rt: Runtime, config: EngineConfig | AttentionName = "auto") -> AttentionBackend:
    """The backend of ``config.runner.attention``, or the one of that name (flashinfer needs the whole config).

    ``auto`` is ``torch`` where specs run and ``triton`` elsewhere. Raises ``ValueError`` for one that cannot run on
    ``rt`` and ``ImportError``, with the command to install it, for one that is not installed.
    """
    name = config.runner.attention if isinstance(config, EngineConfig) else config
    if name not in get_args(AttentionName):
        raise ValueError(f"attention must be one of {get_args(AttentionName)}, got {name!r}")
    if name == "auto":
        name = "torch" if rt.backend == "spec" else "triton"
    if name == "torch":
        return TorchBackend(rt.device)
    if name == "triton":
        return TritonBackend(rt, config.model if isinstance(config, EngineConfig) else None)
    if not isinstance(config, EngineConfig):
        raise ValueError("attention='flashinfer' plans for one model and batch size: give the EngineConfig, not a name")
    return FlashInferBackend(rt, config, load_flashinfer(rt, config))
