"""The quickstart in JupyterLab: opened, run, stepped by mouse and by keyboard alone, with the network blocked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import FLAGS, TOKEN, lab, offline_page

pytestmark = pytest.mark.browser

pytest.importorskip("jupyterlab")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install mrv2lab[test]")

NOTEBOOK = "notebooks/00_quickstart.ipynb"
EXPLORER = ".jp-OutputArea-output .mx-root"


@pytest.fixture(scope="module")
def opened(
    chromium_path: str, screenshots: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, list[str]]]:
    """The quickstart, run to its end."""
    with playwright_api.sync_playwright() as driver, lab(tmp_path_factory.mktemp("lab")) as address:
        chromium = driver.chromium.launch(executable_path=chromium_path, args=FLAGS)
        with offline_page(chromium, address) as (page, asked):
            page.set_default_timeout(60_000)
            page.goto(f"{address}/lab/tree/{NOTEBOOK}?token={TOKEN}")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell")
            assert page.locator(".jp-Dialog").count() == 0, "JupyterLab asks something on opening"
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            page.wait_for_selector(EXPLORER)
            explorer(page)
            page.screenshot(path=screenshots / "lab_first_step.png")
            _idle(page)
            yield page, asked
        chromium.close()


def _idle(page: Any) -> None:
    """Until no cell waits."""
    page.wait_for_function(
        "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every((p) => !p.innerText.includes('*'))"
    )


def explorer(page: Any, number: int = 0) -> Any:
    """The explorer of that number, scrolled into view (JupyterLab renders what is near)."""
    root = page.locator(EXPLORER).nth(number)
    root.scroll_into_view_if_needed()
    return root


def step_of(root: Any) -> int:
    return int(root.locator("input[type=number]").first.input_value())


def wait_for_step(page: Any, root: Any, step: int) -> None:
    handle = root.locator("input[type=number]").first.element_handle()
    page.wait_for_function("([field, step]) => field.value === String(step)", arg=[handle, step])


def test_no_cell_failed_and_nothing_was_asked_of_the_network(opened: tuple[Any, list[str]]) -> None:
    page, asked = opened
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts() == []
    assert page.locator(".jp-OutputArea-output .ansi-red-fg").count() == 0
    assert asked == []


def test_stepping_by_mouse(opened: tuple[Any, list[str]], screenshots: Path) -> None:
    page, _ = opened
    root = explorer(page)
    root.get_by_role("button", name="Last step").first.click()
    page.wait_for_function(
        "(field) => field.closest('.mx-group').textContent.endsWith(`of 0–${field.value}`)",
        arg=root.locator("input[type=number]").first.element_handle(),
    )
    before = step_of(root)
    root.get_by_role("button", name="Next step of the live engine").first.click()
    wait_for_step(page, root, before + 1)
    root.get_by_role("button", name="Previous step").first.click()
    wait_for_step(page, root, before)
    page.screenshot(path=screenshots / "lab_stepped.png")


def test_stepping_by_keyboard_alone(opened: tuple[Any, list[str]]) -> None:
    page, _ = opened
    root = explorer(page)
    cells = page.locator(".jp-Cell").count()
    root.focus()
    before = step_of(root)
    page.keyboard.press("ArrowLeft")
    wait_for_step(page, root, before - 1)
    page.keyboard.press("End")
    page.keyboard.press("n")
    page.keyboard.press("Home")
    wait_for_step(page, root, 0)
    # Keys that JupyterLab would take in command mode: new cell above, cut, copy, new cell below.
    for key in ("a", "x", "c", "b", "d", "d", "ArrowDown"):
        page.keyboard.press(key)
    page.keyboard.press("?")
    assert root.locator(".mx-help").is_visible()
    page.keyboard.press("Escape")
    assert page.locator(".jp-Cell").count() == cells
    assert page.locator(".jp-Dialog").count() == 0


def test_axe_finds_nothing_serious(opened: tuple[Any, list[str]], screenshots: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, _ = opened
    for number in range(page.locator(EXPLORER).count()):
        explorer(page, number).screenshot(path=screenshots / f"lab_explorer_{number}.png")
    found = axe.Axe().run(page, context=EXPLORER).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")] == []
