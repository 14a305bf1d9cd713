"""What tests and notebooks share: skips for what this machine lacks, notebook marks, hypothesis's settings."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # No deadlines: CI's cores are shared. In CI the examples are the same every time.
    settings.register_profile(
        "mrv2lab", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("mrv2lab")

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Path of a Chromium that Playwright can drive, or None."""
    found = next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)
    if found is None:
        cache = Path.home() / ".cache" / "ms-playwright"
        found = next((str(path) for path in sorted(cache.glob("chromium-*/chrome-linux*/chrome"))), None)
    return found


def _spare_the_collector() -> None:
    """Walk no more what lives until the end."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Torch and thousands of tests, walked again and again, take a sixth of the whole run."""
    _spare_the_collector()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)  # when the file's own fixtures have gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file leaves in caches would be walked by every later test that collects."""
    if nextitem is None or nextitem.path != item.path:
        _spare_the_collector()


def pytest_unconfigure() -> None:
    """Extensions complain at the end of a process about objects that the collector may not take."""
    gc.unfreeze()


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="DIR", help="folder for the browser tests' pictures")


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where browser tests leave their pictures: ``--screenshots DIR``, else a folder under ``--basetemp``."""
    given = request.config.getoption("--screenshots")
    folder = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Path of Chromium for Playwright's ``executable_path``; the test is skipped without one."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
    return path


@pytest.hookimpl(tryfirst=True)  # before -m deselects by the marks given here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":
            metadata = json.loads(item.path.read_text(encoding="utf-8"))["metadata"]
            for mark in metadata.get("mrv2lab", {}).get("marks", ()):
                item.add_marker(mark)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and a CUDA build of torch"))
    browser = [item for item in items if item.get_closest_marker("browser")]
    if browser and find_chromium() is None:
        for item in browser:
            item.add_marker(pytest.mark.skip(reason="needs Chromium: apt-get install chromium"))
