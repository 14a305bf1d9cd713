"""The explorer over what a Recorder recorded of a real engine: every step of a run with preemptions and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the run needs mrv2lab[engine]")

from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.replay import Replay
from mrv2lab.widgets.step_explorer import StepExplorer
from tests.recorder.runs import busy_engine, work
from tests.widgets.conftest import OpenPage
from tests.widgets.harness import page as harness
from tests.widgets.test_step_explorer_page import grid


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """24 steps, through a file."""
    with busy_engine() as engine, Recorder(engine, top_k=3) as recorder:
        work(engine, steps=24, seed=3)
    path = tmp_path_factory.mktemp("recording") / "busy.mrv2rec"
    recorder.recording.save(path)
    return Recording.load(path)


def test_every_step_can_be_sent(recording: Recording) -> None:
    explorer = StepExplorer(recording)
    for index in range(len(recording)):
        explorer.index = index
        assert explorer.view is not None and explorer.view.meta["index"] == index
        data, _ = explorer._repr_mimebundle_()
        assert "Request rows" in data["text/html"]
    explorer.close()


@pytest.mark.browser
def test_every_step_is_drawn_as_the_replay_says(open_page: OpenPage, recording: Recording, screenshots: Path) -> None:
    """Counts of every row after the step, as shown, against the state rebuilt by the replay."""
    page = open_page(harness(recording))
    replay = Replay(recording)
    compared = 0
    for index in range(len(recording)):
        page.evaluate("(index) => model.reply(index)", index)
        assert page.locator(".mx-root").get_by_text("could not be drawn").count() == 0, index
        replay.seek(index)
        state = replay.tables
        heads = page.locator('[aria-label="Request rows"] [role=columnheader]').all_inner_texts()
        at = [head.replace("\n", "") for head in heads].index("total_len")
        for cells in grid(page, "Request rows"):
            row = int(cells[0].lstrip("ABDEFH"))
            if cells[1] not in ("free", "freeC"):
                assert int(cells[at].rstrip("GC")) == state["total_len"][row], (index, cells)
                assert int(cells[at + 1].rstrip("GC")) == state["num_computed_tokens"][row], (index, cells)
                compared += 1
    assert compared > 40
    page.screenshot(path=screenshots / "step_explorer_recording.png", full_page=True)
