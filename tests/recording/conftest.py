"""What the tests of damaged and hostile files begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recording.tampered import write_good


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording file with nothing wrong; not to be changed."""
    return write_good(tmp_path_factory.mktemp("good") / "good.mrv2rec")
