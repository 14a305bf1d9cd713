"""Whether NVIDIA Nsight can be used from this notebook, in one sentence that says why not and what helps.

``%nsys`` and ``%ncu`` come from the JupyterLab extension jupyterlab-nvidia-nsight, whose server part puts them into the
kernels it starts. So they are not there under nbclient, pytest or plain IPython even where the package is installed;
whether they are registered is all that counts.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2lab.engine.engine import Engine

EXTENSION = "jupyterlab-nvidia-nsight"
INSTALL = "pip install -e '.[nsight]' beside JupyterLab 4, and NVIDIA's nsys >= 2024.1.1"
MAGICS = (("line", "nsys", "%nsys"), ("cell", "nsys", "%%nsys"), ("line", "ncu", "%ncu"), ("cell", "ncu", "%%ncu"))


@dataclass(frozen=True)
class NsightStatus:
    """``available``: the magics are there. ``sentence``: how to use them, or why they are missing and what to do."""

    available: bool
    sentence: str
    magics: tuple[str, ...] = ()
    """Those that are registered."""

    def __str__(self) -> str:
        return self.sentence


def nsight_status(shell: Any = None) -> NsightStatus:
    """Looks at the running IPython, or at ``shell``; starts nothing and imports nothing of NVIDIA's."""
    if shell is None:
        shell = _running_shell()
    if shell is None:
        return NsightStatus(
            False,
            "this is not IPython, so there are no %nsys and %ncu: open a notebook in JupyterLab, or run nsys itself",
        )
    registered = shell.magics_manager.magics
    found = tuple(shown for kind, name, shown in MAGICS if name in registered.get(kind, {}))
    if found:
        return NsightStatus(True, _ready(found), found)
    installed = _installed(EXTENSION)
    if installed is None:
        return NsightStatus(False, f"the Nsight extension for JupyterLab is not installed: {INSTALL}")
    lab = _installed("jupyterlab")
    major = re.match(r"\d+", lab or "")
    if lab is None or major is None or int(major.group()) < 4:
        has = f"JupyterLab {lab} is" if lab else "no JupyterLab is"
        return NsightStatus(False, f"{EXTENSION} {installed} needs JupyterLab 4, and {has} installed here: {INSTALL}")
    return NsightStatus(
        False,
        f"{EXTENSION} {installed} is installed, but this kernel was not started by it: open the notebook in a "
        "JupyterLab that runs the extension; under nbclient, pytest or plain IPython its magics do not exist",
    )


def _ready(found: tuple[str, ...]) -> str:
    if "%nsys" not in found:
        return f"Nsight is ready: {', '.join(found)}"
    says = "Nsight is ready: %nsys enable restarts the kernel (all variables are lost) and profiles from then on"
    if "%%nsys" in found:
        says += "; %%nsys before a cell makes a report of that cell"
    if shutil.which("nsys") is None:
        says += "; nsys is not on this kernel's PATH, so set NVIDIA_NSIGHT_INSTALLATION_PATH to its folder"
    return says


def nsight_hint(engine: Engine | None = None, shell: Any = None) -> str:
    """What a panel says about Nsight beside ``engine``; None: beside whatever this machine would run."""
    if engine is not None:
        on_gpu = engine.rt.device.type == "cuda"
    else:
        import torch

        on_gpu = torch.cuda.is_available()
    if not on_gpu:
        return "Nsight sees CUDA work only, and there is none on a software stream: profile(engine) draws that one"
    status = nsight_status(shell)
    if not status.available:
        return f"No Nsight here: {status.sentence}. profile(engine) needs none of it"
    return f"{status.sentence}; with annotate(engine): engine.run(workload) names steps and phases in the report"


def _running_shell() -> Any:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    return get_ipython()  # type: ignore[no-untyped-call, unused-ignore]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
