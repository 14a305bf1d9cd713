"""The timeline by keyboard, for axe-core, on narrow, dark and forced-colour screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrv2lab.widgets.timeline.assets import module_text, style_text
from tests.slow import mostly_slow
from tests.widgets.conftest import OpenPage
from tests.widgets.timeline_page import (
    STATE,
    Caught,
    event_named,
    inner,
    page,
    random_trace,
    shown,
    small_trace,
    steps_frame,
    two_runs,
)

pytestmark = pytest.mark.browser

VIEW = "inner.view()"


def name_of_selected(opened: Any) -> str:
    """Name of the selected slice; empty without one."""
    text: str = opened.evaluate(
        f"{VIEW}.selected < 0 ? '' : {VIEW}.data.nameOf({VIEW}.data.posOf[{VIEW}.selected])",
    )
    return text


def lane(opened: Any) -> str:
    """Label of the lane the cursor is on."""
    text: str = opened.locator(".mx-tl-lane.now").inner_text()
    return text


def test_by_keyboard_alone(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(two_runs()[2]))
    press = opened.keyboard.press
    assert opened.locator(".mx-tl").get_attribute("data-lm-suppress-shortcuts") == "true"
    for _ in range(40):
        press("Tab")
        if opened.evaluate("document.activeElement.getAttribute('role')") == "application":
            break
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == "Timeline. Press ? for keys."
    # Lanes and slices.
    assert lane(opened) == "▾ A annotations"
    for key, label in [("ArrowDown", "phases"), ("ArrowDown", "Python"), ("ArrowUp", "phases")]:
        press(key)
        assert label in lane(opened), key
    press("ArrowDown")
    for key, name in [
        ("n", "engine.py(12): step"),
        ("n", "runner.py(88): execute_model"),
        ("n", "engine.py(12): step"),
        ("p", "runner.py(88): execute_model"),
    ]:
        press(key)
        assert name_of_selected(opened) == name, key
    live = ".mx-tl > [aria-live=polite]"
    opened.wait_for_function(f"document.querySelector('{live}').textContent.startsWith('runner.py(88)')")
    assert opened.locator(live).inner_text() == "runner.py(88): execute_model, python, 4 µs, A Python"
    press("p")
    press("p")
    assert name_of_selected(opened) == "engine.py(12): step", "the first stays selected"
    # Zoom, pan, fit.
    span = opened.evaluate(f"{VIEW}.axis.span")
    for key in "ww":
        press(key)
    assert opened.evaluate(f"{VIEW}.axis.span") < span
    press("s")
    press("-")
    assert opened.evaluate(f"{VIEW}.axis.span") == pytest.approx(span)
    press("+")
    start = opened.evaluate(f"{VIEW}.axis.start")
    press("d")
    assert opened.evaluate(f"{VIEW}.axis.start") > start
    press("f")
    assert opened.evaluate(f"{VIEW}.axis.span") == pytest.approx(span)
    press("z")
    assert opened.evaluate(f"{VIEW}.axis.span") == pytest.approx(9002 * 1.1)
    press("f")
    # Fold, hide, show.
    press("c")
    assert lane(opened).startswith("▸ A Python")
    press("c")
    press("x")
    assert opened.evaluate(STATE, "hidden_lanes") == [2] and "calls" in lane(opened)
    press("X")
    assert opened.evaluate(STATE, "hidden_lanes") == []
    # Marks.
    press("Home")
    press("k")
    assert opened.locator(".mx-tl-status").inner_text() == "sync: barrier, 2 µs"
    press("k")
    assert opened.locator(".mx-tl-status").inner_text().startswith("hazard: <img")
    press("K")
    assert opened.evaluate(f"{VIEW}.cursor") == 6000
    # Help, search, and out again.
    press("?")
    assert opened.locator(".mx-tl-help").is_visible()
    press("Escape")
    assert not opened.locator(".mx-tl-help").is_visible()
    press("/")
    opened.keyboard.type("sync")
    press("ArrowLeft")
    press("Enter")
    assert name_of_selected(opened) == "cudaEventSynchronize"
    press("Escape")
    assert opened.evaluate("document.activeElement.getAttribute('role')") == "application"
    press("Escape")
    assert name_of_selected(opened) == ""
    press("Escape")
    assert opened.evaluate("document.activeElement === document.body")


def test_a_range_by_keys(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    opened.locator(".mx-tl-scroll").focus()
    press = opened.keyboard.press
    press("Home")
    step = opened.evaluate(f"{VIEW}.axis.span / 40")
    for _ in range(3):
        press("Shift+ArrowRight")
    assert opened.evaluate(STATE, "selection_ns") == pytest.approx([0, 3 * step], abs=3)
    press("Shift+ArrowLeft")
    assert opened.evaluate(STATE, "selection_ns") == pytest.approx([0, 2 * step], abs=3)
    press("Escape")
    assert opened.evaluate(STATE, "selection_ns") is None
    # Measure from here, and keep what was measured.
    here = opened.evaluate(f"{VIEW}.cursor")
    press("m")
    press("ArrowRight")
    press("ArrowRight")
    opened.wait_for_function("document.querySelector('.mx-tl > [aria-live]').textContent.includes('from the mark')")
    assert opened.evaluate(STATE, "selection_ns") is None
    press("m")
    assert opened.evaluate(STATE, "selection_ns") == pytest.approx([here, here + 2 * step], abs=3)
    press("m")
    press("Escape")
    assert not opened.evaluate(f"{VIEW}.anchored")
    assert opened.evaluate(STATE, "selection_ns") is not None, "one level at a time"


def test_enter_selects_the_innermost_slice_at_the_cursor(open_page: OpenPage) -> None:
    trace = small_trace()
    opened = shown(open_page, inner(Caught(trace)))
    opened.locator(".mx-tl-scroll").focus()
    moment = int(trace.start[event_named(trace, "cudaGraphLaunch", 2)]) + 100
    opened.evaluate(f"(moment) => {{ {VIEW}.moveLane(3); {VIEW}.cursor = moment; }}", moment)
    opened.keyboard.press("Enter")
    assert name_of_selected(opened) == "cudaGraphLaunch"


def test_keys_of_the_notebook_are_left_alone_outside_the_picture(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    opened.evaluate("window.seen = []; document.addEventListener('keydown', (e) => seen.push(e.key))")
    opened.locator(".mx-tl-scroll").focus()
    for key in ["a", "x", "ArrowUp", "Escape"]:
        opened.keyboard.press(key)
    assert opened.evaluate("seen") == []
    for key in ["a", "Control+s"]:
        opened.evaluate("document.activeElement.blur()")
        opened.keyboard.press(key)
    assert opened.evaluate("seen") == ["a", "Control", "s"]


def test_the_table_twin_says_what_is_in_sight(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    opened.wait_for_function("document.querySelector('.mx-tl-table tbody')")
    rows = "[...document.querySelectorAll('.mx-tl-table tbody')].map((b) => [...b.rows].map((r) => [...r.cells].map("
    rows += "(c) => c.textContent)))"
    lanes, slices = opened.evaluate(rows)
    assert lanes[3:5] == [
        ["calls", "13", "aten::linear", "3,000"],
        ["stream 7", "12", "kernel_0", "1,400"],
    ]
    assert slices[0] == ["mrv2lab.step#0", "annotation", "0", "9,000"] and len(slices) == 4
    opened.evaluate("models[0].emit('msg:custom', {type: 'show', start: 2000, end: 3400}, [])")
    opened.wait_for_function("document.querySelector('.mx-tl-table caption').textContent.includes('from 2,000 ns')")
    lanes, slices = opened.evaluate(rows)
    assert lanes[4] == ["stream 7", "1", "kernel_0", "1,400"] and len(slices) == 1
    assert opened.locator(".mx-tl-table").get_attribute("aria-label") == "What is in sight, as tables"


@pytest.mark.parametrize("theme", mostly_slow(["light", "dark", "lab-dark"], 1))
def test_axe_finds_nothing_serious(open_page: OpenPage, screenshots: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    scheme = "dark" if theme == "dark" else "light"
    opened = shown(open_page, page(two_runs()[2], theme=theme), scheme=scheme)
    opened.locator(".mx-tl-scroll").focus()
    opened.keyboard.press("n")
    opened.get_by_role("button", name="Keys").click()
    opened.get_by_role("button", name="Show the table").click()
    opened.locator("[data-kind=op]").click()
    opened.wait_for_timeout(500)
    found = axe.run(opened).response["violations"]
    bad = [
        (v["id"], v["nodes"][0]["html"], v["nodes"][0]["failureSummary"])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert bad == []
    opened.screenshot(path=screenshots / f"timeline_{theme}.png", full_page=True)


@pytest.mark.slow
def test_axe_can_find_something(open_page: OpenPage) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    opened = shown(open_page, page(Caught(small_trace())))
    opened.evaluate("document.querySelector('.mx-tl-scroll').removeAttribute('tabindex')")
    opened.evaluate("document.querySelector('[type=search]').removeAttribute('aria-label')")
    opened.evaluate("document.querySelector('[type=search]').removeAttribute('placeholder')")
    assert "label" in [v["id"] for v in axe.run(opened).response["violations"]]


def test_no_mark_is_said(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    opened.locator(".mx-tl-scroll").press("k")
    assert opened.locator(".mx-tl-status").inner_text() == "There are no marks: none were given as marks="
    opened = shown(open_page, inner(two_runs()[2]))
    opened.locator(".mx-tl-scroll").press("End")
    opened.locator(".mx-tl-scroll").press("k")
    assert opened.locator(".mx-tl-status").inner_text() == "No more marks"


def test_a_notebooks_own_sheet_breaks_no_word(open_page: OpenPage) -> None:
    sheet = "<style>dl dt { float: left; width: 20% } dl dd { float: left; width: 80% }</style>"
    html = inner(Caught(small_trace())).replace("<style>:root", sheet + "<style>:root", 1)
    opened = shown(open_page, html, width=900)
    opened.evaluate("models[0].set('selected_slice', 20)")
    opened.get_by_role("button", name="Keys").click()
    opened.wait_for_function("document.querySelector('.mx-tl-details [data-list=facts]').textContent.includes('end')")
    lines = "[...document.querySelectorAll('.mx-tl dt')].map((dt) => dt.getBoundingClientRect().height)"
    heights = opened.evaluate(lines)
    assert len(heights) > 20 and max(heights) < 24, "every term on one line"


@pytest.mark.parametrize("width", mostly_slow([320, 400], 1))
def test_narrow_screens_need_no_sideways_scrolling(open_page: OpenPage, screenshots: Path, width: int) -> None:
    opened = shown(open_page, inner(two_runs()[2]), width=width)
    opened.evaluate("models[0].set('selected_slice', 9)")
    opened.get_by_role("button", name="Show the table").click()
    opened.wait_for_timeout(500)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.evaluate(f"{VIEW}.canvas.clientWidth") > width / 2
    opened.screenshot(path=screenshots / f"timeline_{width}.png", full_page=True)


def test_the_picture_follows_its_width(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(random_trace(300, lanes=2))))
    width = opened.evaluate(f"{VIEW}.canvas.width")
    opened.evaluate("document.getElementById('out').style.width = '600px'")
    opened.wait_for_function(f"{VIEW}.canvas.width < {width}")
    assert opened.evaluate(f"{VIEW}.top.width === {VIEW}.canvas.width && {VIEW}.axis.width === {VIEW}.canvas.width")


def test_a_theme_that_changes_recolours_the_picture(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    corner = f"[...{VIEW}.canvas.getContext('2d').getImageData(1, 1, 1, 1).data.slice(0, 3)].join()"
    opened.wait_for_function(f"{corner} === '255,255,255'")
    opened.evaluate(
        "document.body.style.setProperty('--jp-layout-color1', '#111');"
        "document.body.setAttribute('data-jp-theme-light', 'false')"
    )
    opened.wait_for_function(f"{corner} === '17,17,17'")


def test_forced_colours_keep_the_cues(open_page: OpenPage, screenshots: Path) -> None:
    trace = small_trace()
    opened = shown(open_page, inner(Caught(trace, steps=steps_frame(trace))), scheme="dark", forced="active")
    opened.locator(".mx-tl-scroll").focus()
    border = "getComputedStyle(document.querySelector('.mx-tl-lane.now')).borderLeftWidth"
    assert opened.evaluate(border) == "4px"
    assert opened.locator(".mx-tl-swatch").first.inner_text() == "P"
    opened.screenshot(path=screenshots / "timeline_forced_colours.png", full_page=True)


def test_nothing_moves_by_itself() -> None:
    """So there is nothing that prefers-reduced-motion would have to stop."""
    for word in ("transition", "animation", '"smooth"', "setInterval"):
        assert word not in module_text() + style_text(), word
