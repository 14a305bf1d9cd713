"""A JupyterLab of its own on a copy of the notebooks, and a browser that reaches nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TOKEN = "test"


def free_port() -> int:
    """A port that nobody listens on, this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def lab(folder: Path) -> Iterator[str]:
    """Serve a copy of ``notebooks/`` under ``folder``; yields the address. Its settings are empty and its own."""
    work = folder / "course"
    for name in ("notebooks", "traces"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, work / name)
    shutil.copy(ROOT / "GLOSSARY.md", work)
    port = free_port()
    home = folder / "home"
    home.mkdir()
    places = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    settings = folder / "jupyter_config_dir" / "lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    environment = os.environ | places | {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [f"--port={port}", "--ip=127.0.0.1", "--no-browser", f"--IdentityProvider.token={TOKEN}"]
    words += [f"--ServerApp.root_dir={work}", "--allow-root"]
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *words], cwd=work, env=environment, stdout=log, stderr=log
        )
        address = f"http://127.0.0.1:{port}"
        try:
            _await(f"{address}/api?token={TOKEN}", server, folder / "lab.log")
            yield address
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()


def _await(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"JupyterLab did not answer within {seconds} s:\n{log.read_text()[-2000:]}")


@contextmanager
def offline_page(browser: Any, address: str, width: int = 1400, height: int = 1000) -> Iterator[tuple[Any, list[str]]]:
    """A page that can reach ``address`` alone, and the list of what else it asked for."""
    context = browser.new_context(viewport={"width": width, "height": height})
    asked: list[str] = []

    def decide(route: Any) -> None:
        url = route.request.url
        if url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            asked.append(url)
            route.abort()

    context.route("**/*", decide)
    try:
        yield context.new_page(), asked
    finally:
        context.close()
