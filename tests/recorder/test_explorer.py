"""The step explorer takes engines, recordings and files, says what it cannot take, and gives everything back."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ipywidgets import Widget

import mrv2lab
from mrv2lab import Recorder, Recording, StepExplorer
from mrv2lab.observer import Observer
from mrv2lab.recording.schema import RecordingError
from tests.engine.small import sampled
from tests.recorder.runs import work
from tests.recorder.test_live import engine_with_work

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def widgets_are_closed() -> Iterator[None]:
    yield
    Widget.close_all()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "run.mrv2rec"
    with engine_with_work() as engine, Recorder(engine, path):
        work(engine, 6)
    return path


def test_an_engine_is_stepped_from_the_explorer() -> None:
    observer = Observer()
    with engine_with_work(observer=observer) as engine:
        explorer = StepExplorer(engine)
        assert (explorer.count, explorer.view) == (0, None)
        assert explorer.advance() is None
        assert explorer.advance("phase") is None
        assert explorer.view is not None
        assert (explorer.index, explorer.view.meta["mode"], explorer.view.meta["paused_after"]) == (
            1,
            "step",
            "schedule",
        )
        assert explorer.advance() is None
        assert (explorer.index, explorer.view.meta["paused_after"]) == (1, None)
        explorer.index = 0
        assert (explorer.view.meta["step"], explorer.view.meta["mode"]) == (0, "record")
        assert len(explorer.view.meta["top_k"]["token_ids"][0]) == 8
        explorer.close()
        explorer.close()
        assert engine.observer is observer


def test_a_recording_and_its_file_are_shown(file: Path) -> None:
    for source in (Recording.load(file), file, str(file)):
        explorer = StepExplorer(source, index=-1)
        assert explorer.count == 6
        assert explorer.view is not None
        assert (explorer.view.meta["title"], explorer.view.meta["live"], explorer.index) == ("run.mrv2rec", False, 5)
        assert explorer.advance() == "A recording has no next step to run; only a live engine has."


def test_two_side_by_side(file: Path) -> None:
    with engine_with_work() as engine:
        explorer = StepExplorer(engine, file)
        explorer.advance()
        assert [view.meta["title"] for view in explorer.views if view] == ["run.mrv2rec"]  # at its step 5
        explorer.index = 0
        assert [view.meta["title"] for view in explorer.views if view] == ["live engine", "run.mrv2rec"]
        explorer.close()


@pytest.mark.parametrize(
    ("sources", "error", "sentence"),
    [
        ((), ValueError, "one source or two side by side, not 0"),
        ((7,), ValueError, "a int has no steps to show; give an Engine, a Recording or a recording's path"),
        (("no/such/file",), FileNotFoundError, "no/such/file"),
        ((__file__,), RecordingError, "test_explorer.py"),
    ],
    ids=["none", "number", "missing", "foreign"],
)
def test_what_has_no_steps_is_refused(sources: tuple[Any, ...], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        StepExplorer(*sources)


def test_a_refused_second_source_leaves_the_engine_alone() -> None:
    with engine_with_work() as engine:
        before = engine.observer
        with pytest.raises(ValueError, match="has no steps"):
            StepExplorer(engine, 7)
        with pytest.raises(ValueError, match="both sources are the same"):
            StepExplorer(engine, engine)
        assert engine.observer is before


def test_a_closed_explorer_holds_nothing() -> None:
    engine = engine_with_work()
    first, second = StepExplorer(engine), StepExplorer(engine)
    first.advance("phase")
    second.advance("step")
    assert first.count == second.count == 1
    first.close()
    second.close()
    engine.close()
    gone = [weakref.ref(engine), weakref.ref(first)]
    del engine, first, second
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_an_explorer_of_a_file_needs_no_torch(file: Path) -> None:
    code = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
from mrv2lab import Recording, StepExplorer

explorer = StepExplorer({str(file)!r}, Recording.load({str(file)!r}))
explorer.index = 3
print([view.meta["step"] for view in explorer.views])
assert not {{"torch", "triton"}} & set(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "[3, 3]\n"), result.stderr


def test_public_names() -> None:
    assert {"Recorder", "Recording", "StepExplorer", "KernelLens", "open_lens"} <= set(mrv2lab.__all__)
    assert sampled().max_tokens == 8
