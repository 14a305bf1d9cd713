"""The timeline in real notebooks: what nbclient saves, and data that does not wait for the cells behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import TOKEN, lab, offline_page

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
MAKE = (
    "from tests.widgets.timeline_page import random_trace\n"
    "from mrv2lab.widgets.timeline import Timeline\n"
    "trace = random_trace(20_000)"
)


def notebook(*cells: str) -> Any:
    """Code cells for this interpreter's kernel."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def test_two_timelines_are_saved_in_300_kb_besides_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = notebook(MAKE, "Timeline(trace)", "Timeline(trace, trace, align=(0, 100))")
    nbclient.NotebookClient(made, timeout=120, store_widget_state=True).execute()
    states = made.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    assert sum("Timeline" in str(state["state"].get("_anywidget_id")) for state in states) == 2
    outputs = [output for cell in made.cells for output in cell.outputs]
    twins = [output["data"].pop("text/html") for output in outputs]
    assert len(twins) == 2 and all("<svg" in twin and len(twin.encode()) <= 60_000 for twin in twins)
    size = len(nbformat.writes(made).encode())
    assert size <= 300_000
    assert "random: 20,000 events" in json.dumps(made.cells[1].outputs)


@pytest.mark.browser
@pytest.mark.slow
def test_the_picture_is_there_while_a_cell_behind_it_runs(browser: Any, tmp_path: Path, screenshots: Path) -> None:
    pytest.importorskip("jupyterlab")
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\nprint('gone', 'on')"
    made = notebook(MAKE, "timeline = Timeline(trace)\ntimeline", wait, "timeline.selected.to_frame().name[0]")
    with lab(tmp_path) as address:
        nbformat.write(made, str(tmp_path / "course/notebooks/timeline.ipynb"))
        with offline_page(browser, address) as (page, asked):
            page.set_default_timeout(60_000)
            page.goto(f"{address}/lab/tree/notebooks/timeline.ipynb?token={TOKEN}")
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
            for index in range(3):
                page.locator(".jp-CodeCell").nth(index).locator(".cm-content").click()
                page.keyboard.press("Control+Enter")
            page.wait_for_function("performance.getEntriesByName('mrv2lab-timeline-first-paint').length")
            assert "gone on" not in page.locator(".jp-Notebook").inner_text(), "the cell behind still runs"
            page.locator(".mx-tl-scroll").focus()
            cells = page.locator(".jp-CodeCell").count()
            for key in ["n", "a", "d", "x", "X"]:  # the notebook's keys: above, below, cut
                page.keyboard.press(key)
            assert page.locator(".jp-CodeCell").count() == cells
            go.touch()
            page.get_by_text("gone on").wait_for()
            page.locator(".mx-tl-details [data-list=facts]").get_by_text("kernel").first.wait_for()
            page.locator(".jp-CodeCell").nth(3).locator(".cm-content").click()
            page.keyboard.press("Control+Enter")
            page.locator(".jp-CodeCell").nth(3).get_by_text("void kernel").wait_for()
            page.screenshot(path=screenshots / "timeline_lab.png")
            assert asked == []
