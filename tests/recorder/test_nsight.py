"""One sentence for each of the cases in which Nsight's magics are there or not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mrv2lab.recorder import nsight
from mrv2lab.recorder.nsight import nsight_hint, nsight_status
from tests.engine.small import small_engine


@pytest.fixture
def shell() -> InteractiveShell:
    """An IPython without Nsight, not the running one."""
    return InteractiveShell()


def installs(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """What is installed, by name with ``_`` for ``-``; nothing else is."""

    def version(package: str) -> str:
        if package.replace("-", "_") not in versions:
            raise PackageNotFoundError(package)
        return versions[package.replace("-", "_")]

    monkeypatch.setattr(nsight, "version", version)


def registered(shell: InteractiveShell, *kinds: str) -> InteractiveShell:
    for kind in kinds:
        name = kind.strip("%")
        shell.register_magic_function(lambda line, cell=None: None, "cell" if kind[:2] == "%%" else "line", name)
    return shell


def test_outside_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "_running_shell", lambda: None)
    status = nsight_status()
    assert not status.available and status.magics == ()
    assert "not IPython" in status.sentence


def test_here_nothing_is_started_and_a_status_comes() -> None:
    status = nsight_status()
    assert status.sentence == str(status) and "\n" not in status.sentence


def test_not_installed(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, jupyterlab="4.6.0")
    status = nsight_status(shell)
    assert not status.available
    assert "pip install -e '.[nsight]'" in status.sentence
    assert "nsys >= 2024.1.1" in status.sentence and "JupyterLab 4" in status.sentence


@pytest.mark.parametrize("lab", [{}, {"jupyterlab": "3.6.8"}], ids=["none", "3"])
def test_installed_without_jupyterlab_4(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, lab: dict[str, str]
) -> None:
    installs(monkeypatch, jupyterlab_nvidia_nsight="1.0.1", **lab)
    status = nsight_status(shell)
    assert not status.available
    assert "needs JupyterLab 4" in status.sentence
    assert ("3.6.8" if lab else "no JupyterLab") in status.sentence


def test_installed_and_the_kernel_not_started_by_it(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, jupyterlab_nvidia_nsight="1.0.1", jupyterlab="4.6.0")
    status = nsight_status(shell)
    assert not status.available
    assert "1.0.1 is installed, but this kernel was not started by it" in status.sentence
    assert "nbclient" in status.sentence


@pytest.mark.parametrize(("which", "path"), [(lambda name: "nsys", False), (lambda name: None, True)], ids=["", "lost"])
def test_ready(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, which: Callable[[str], Any], path: bool
) -> None:
    installs(monkeypatch)  # whether the package is seen here does not matter
    monkeypatch.setattr(nsight.shutil, "which", which)
    status = nsight_status(registered(shell, "%nsys", "%%nsys", "%ncu"))
    assert status.available
    assert status.magics == ("%nsys", "%%nsys", "%ncu")
    assert "%nsys enable restarts the kernel" in status.sentence and "%%nsys before a cell" in status.sentence
    assert ("NVIDIA_NSIGHT_INSTALLATION_PATH" in status.sentence) == path


def test_ncu_alone(shell: InteractiveShell) -> None:
    status = nsight_status(registered(shell, "%%ncu"))
    assert status.available and status.magics == ("%%ncu",)
    assert "restarts" not in status.sentence


def test_the_hint_beside_a_software_stream() -> None:
    with small_engine() as engine:
        assert "CUDA work only" in nsight_hint(engine)


def test_the_hint_beside_a_gpu(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    installs(monkeypatch)
    assert nsight_hint(shell=shell).startswith("No Nsight here: the Nsight extension for JupyterLab is not installed")
    ready = nsight_hint(shell=registered(shell, "%nsys"))
    assert "with annotate(engine): engine.run(workload)" in ready
