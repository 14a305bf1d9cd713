"""Where the real traces of a development machine lie; tests that want them skip elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


def shared_file(prefix: str) -> Path:
    """The one file whose name begins with ``prefix`` (``"01"``), or a skip."""
    found = sorted(SHARED_TRACES.glob(f"{prefix}*"))
    if not found:
        pytest.skip(f"no trace {prefix}* in ../shared/traces")
    return found[0]
