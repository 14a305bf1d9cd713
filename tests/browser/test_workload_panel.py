"""The workload panel in JupyterLab: run by keyboard alone, cancelled while it runs, laid on one axis, read by axe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import FLAGS, TOKEN, lab, offline_page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

pytest.importorskip("jupyterlab")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install mrv2lab[test]")

CELLS = (
    "from mrv2lab.recorder.workload_panel import WorkloadPanel\n\n"
    "panel = WorkloadPanel(device='cpu', requests=3, max_tokens='6', steps=12)\npanel",
    "panel.overlay()",
)


def notebook() -> str:
    cells = [
        {"cell_type": "code", "execution_count": None, "id": f"c{i}", "metadata": {}, "outputs": [], "source": source}
        for i, source in enumerate(CELLS)
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture(scope="module")
def opened(
    chromium_path: str, screenshots: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, list[str]]]:
    """The notebook with its panel shown."""
    folder = tmp_path_factory.mktemp("lab")
    with playwright_api.sync_playwright() as driver, lab(folder) as address:
        (folder / "course" / "panel.ipynb").write_text(notebook(), encoding="utf-8")
        chromium = driver.chromium.launch(executable_path=chromium_path, args=FLAGS)
        with offline_page(chromium, address) as (page, asked):
            page.set_default_timeout(60_000)
            page.goto(f"{address}/lab/tree/panel.ipynb?token={TOKEN}")
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
            page.locator(".jp-CodeCell").first.click()
            page.keyboard.press("Control+Enter")
            page.get_by_text("Nothing has run yet").wait_for()
            page.screenshot(path=screenshots / "panel_empty.png")
            yield page, asked
        chromium.close()


def tab_to(page: Any, role: str, name: str) -> None:
    """Tab until the control has the focus."""
    page.get_by_label("Model").first.focus()
    wanted = page.get_by_role(role, name=name, exact=True).first
    for _ in range(40):
        if wanted.evaluate("(one) => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"{name} is not reached by the Tab key")


def test_a_run_by_keyboard_alone(opened: tuple[Any, list[str]], screenshots: Path) -> None:
    page, asked = opened
    tab_to(page, "spinbutton", "Requests")
    page.keyboard.press("Control+a")
    page.keyboard.type("4")
    tab_to(page, "button", "Run")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Done: A and B.").wait_for()
    assert page.locator(".jp-OutputArea-output table").first.get_by_text("barrier_wait").is_visible()
    assert "burst(4, " in page.get_by_label("The same in Python").first.input_value()
    page.screenshot(path=screenshots / "panel_done.png")
    assert asked == []


def test_bad_input_is_said_aloud_and_cancel_works(opened: tuple[Any, list[str]]) -> None:
    page, _ = opened
    length = page.get_by_label("Prompt tokens").first
    length.fill("many")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("status").filter(has_text="Cannot run: prompt length must be a number").wait_for()
    length.fill("8")
    page.get_by_label("Output tokens").first.fill("900")
    steps = page.get_by_label("Steps (0 = all)").first
    steps.fill("0")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("status").filter(has_text="Running C and D").wait_for()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("status").filter(has_text="Cancelled").wait_for()


def test_the_overlay_in_the_next_cell(opened: tuple[Any, list[str]], screenshots: Path) -> None:
    page, asked = opened
    page.locator(".jp-CodeCell").nth(1).locator(".jp-InputArea").click()
    page.keyboard.press("Control+Enter")
    page.locator(".jp-CodeCell").nth(1).locator("canvas").first.wait_for()
    page.screenshot(path=screenshots / "panel_overlay.png")
    assert asked == []


def test_axe_finds_nothing_serious(opened: tuple[Any, list[str]]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page, _ = opened
    page.locator(".jp-CodeCell").first.scroll_into_view_if_needed()
    found = axe.run(page, context=".jp-CodeCell .widget-vbox").response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []
