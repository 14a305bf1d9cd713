"""What reading must not leave behind or bring along."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrv2lab.trace.read import load
from mrv2lab.trace.trace import TraceCancelled, TraceError
from tests.trace.synthetic import write_synthetic


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_the_collector_is_as_it_was(tmp_path: Path, collecting: bool) -> None:
    """Read, refused and cancelled: the garbage collector pauses meanwhile only."""
    file = write_synthetic(tmp_path / "a.json", 100)
    seen: list[bool] = []

    def cancel() -> bool:
        seen.append(gc.isenabled())
        return len(seen) > 1

    assert len(load(file, cache=False)) == 100
    assert gc.isenabled() is collecting
    with pytest.raises(TraceCancelled):
        load(file, cache=False, cancel=cancel)
    assert gc.isenabled() is collecting
    assert seen[0] is False
    (tmp_path / "b.json").write_text('{"traceEvents": 5}')
    with pytest.raises(TraceError):
        load(tmp_path / "b.json")
    assert gc.isenabled() is collecting


def test_no_bar_no_tqdm(tmp_path: Path) -> None:
    """Its import costs a small trace more than the reading."""
    file = write_synthetic(tmp_path / "a.json", 100)
    code = f"import sys; from mrv2lab.trace.read import load; load({str(file)!r}); print('tqdm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
