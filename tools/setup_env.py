"""Set up a virtual environment for mrv2lab, with the right build of PyTorch. Needs Python >= 3.11 and nothing else.

The Makefile and binder/postBuild call it. On Linux the default PyTorch wheel brings gigabytes of CUDA libraries along,
so a machine without an NVIDIA driver takes PyTorch's CPU wheels where that index can be reached.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MIN_TORCH = (2, 11)
PROBE_SECONDS = 5


def reachable(url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether a package index answers in time."""
    try:
        request = urllib.request.Request(url.rstrip("/") + "/torch/", method="HEAD")
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # it answered; a mirror may refuse HEAD
    except (OSError, ValueError):
        return False


def torch_index(setting: str, platform: str, has_driver: bool) -> str | None:
    """The index to take torch from, or None for pip's own set-up.

    ``setting`` is "auto", a URL, or empty for none. "auto" wants the CPU index on Linux without an NVIDIA driver only:
    the default wheels of other systems are CPU builds already.
    """
    if setting != "auto":
        return setting or None
    if not platform.startswith("linux") or has_driver:
        return None
    if reachable(CPU_INDEX):
        return CPU_INDEX
    print(
        f"setup: {CPU_INDEX} cannot be reached; taking torch as pip is set up (on Linux that may be a large CUDA "
        "build; TORCH_INDEX=<url> names another index)",
        flush=True,
    )
    return None


def run(*command: str) -> None:
    """Run a command, shown, and stop with its status if it fails."""
    print("setup: " + shlex.join(command), flush=True)
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)


def present_torch(python: str) -> tuple[int, int] | None:
    """(major, minor) of the torch that ``python`` can already import, or None."""
    code = "import torch; print(*torch.__version__.split('.')[:2])"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if result.returncode:
        return None
    major, minor = result.stdout.split()
    return int(major), int(minor)


def make_venv(path: Path, args: list[str]) -> str:
    """The python of the virtual environment at ``path``, made if need be."""
    python = path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        command = [sys.executable, "-m", "venv", *args, str(path)]
        print("setup: " + shlex.join(command), flush=True)
        if subprocess.run(command).returncode:
            shutil.rmtree(path, ignore_errors=True)
            sys.exit("setup: no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv")
    return str(python)


def main() -> None:
    """Parse the arguments and set up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", default="", help="folder of the environment; empty: the running interpreter")
    parser.add_argument("--venv-args", default="", help="for `python -m venv`, such as --system-site-packages")
    parser.add_argument("--extras", default="engine,lab", help="extras of mrv2lab, separated by commas")
    parser.add_argument("--torch", default=TORCH, help="requirement for torch")
    parser.add_argument("--torch-index", default="auto", help='"auto", a URL, or empty for none')
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (the one file that an older Python may meet)
        sys.exit(f"setup: mrv2lab needs Python >= 3.11, this is {sys.version.split()[0]}; say make PYTHON=python3.12")

    python = make_venv(Path(args.venv), shlex.split(args.venv_args)) if args.venv else sys.executable
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    found = present_torch(python)
    if found is not None and found >= MIN_TORCH:
        print(f"setup: torch {found[0]}.{found[1]} is there already", flush=True)
    else:
        index = torch_index(args.torch_index, sys.platform, shutil.which("nvidia-smi") is not None)
        run(*pip, args.torch, *(["--index-url", index] if index else []))
    root = Path(__file__).resolve().parent.parent
    run(*pip, "--editable", f"{root}[{args.extras}]")


if __name__ == "__main__":
    main()
