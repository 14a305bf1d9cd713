"""The timeline in Chromium by mouse and fingers: selection, ranges, search, filters, lanes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.widgets.conftest import OpenPage
from tests.widgets.timeline_page import (
    PAINTED,
    STATE,
    Caught,
    event_named,
    inner,
    point,
    settle,
    shown,
    small_trace,
    steps_frame,
    two_runs,
)

pytestmark = pytest.mark.browser


# -- mouse


def test_a_click_selects_and_python_answers_exactly(open_page: OpenPage, screenshots: Path) -> None:
    trace = small_trace()
    timeline = Caught(trace, steps=steps_frame(trace))
    opened = shown(open_page, inner(timeline))
    launch = event_named(trace, "cudaGraphLaunch", 1)
    opened.evaluate("models[0].held = models[0].answers; models[0].answers = {}")
    opened.mouse.click(*point(opened, timeline, launch))
    details = opened.locator(".mx-tl-details")
    assert "Asking Python" in details.inner_text() and "300 ns" in details.inner_text(), "a quick answer meanwhile"
    opened.wait_for_function("models[0].sent.some((m) => m.type === 'details')")
    number = timeline._slices.find(0, launch)
    opened.evaluate("(id) => models[0].emit('msg:custom', models[0].held[id], [])", number)
    facts = details.locator("[data-list=facts]").inner_text()
    assert "1,700,000,000,000,010,700 ns" in facts and "10,700 ns" in facts
    assert details.locator("li").all_inner_texts()[:2] == ["execute_model runner.py:88", "step engine.py:12"]
    assert opened.evaluate(STATE, "selected_slice") == number
    opened.wait_for_function("document.querySelector('.mx-tl > [aria-live]').textContent.startsWith('cudaGraphLaunch')")
    arrows = """(id) => { const v = inner.view(); const drawn = []; v.overlay.arrow = (...a) => drawn.push(a); v.draw();
      return drawn.length; }"""
    assert opened.evaluate(arrows, number) == 3, "to each of its kernels"
    opened.screenshot(path=screenshots / "timeline_details.png", full_page=True)
    opened.get_by_role("button", name="Close the details").click()
    assert opened.evaluate(STATE, "selected_slice") == -1 and not details.is_visible()


def test_an_empty_place_selects_nothing(open_page: OpenPage) -> None:
    trace = small_trace()
    timeline = Caught(trace)
    opened = shown(open_page, inner(timeline))
    x, y = point(opened, timeline, event_named(trace, "kernel_0", 0))
    opened.mouse.click(x, y)
    assert opened.evaluate(STATE, "selected_slice") >= 0
    gap = opened.evaluate("inner.view().axis.x(1200) + inner.view().canvas.getBoundingClientRect().left")
    opened.mouse.click(gap, y)
    assert opened.evaluate(STATE, "selected_slice") == -1


def test_wheel_conventions_and_dragging(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    axis = "[inner.view().axis.start, inner.view().axis.span]"
    box = opened.locator(".mx-tl-canvas").bounding_box()
    opened.mouse.move(box["x"] + 300, box["y"] + 60)
    start, span = opened.evaluate(axis)
    under = start + 300 * span / box["width"]
    opened.mouse.wheel(0, 100)
    settle(opened)
    assert opened.evaluate(axis) == [start, span], "without a key the page scrolls"
    opened.keyboard.down("Control")
    opened.mouse.wheel(0, -200)
    opened.keyboard.up("Control")
    opened.wait_for_function("(span) => inner.view().axis.span < span", arg=span)
    start, span = opened.evaluate(axis)
    assert abs(start + 300 * span / box["width"] - under) < 1, "what is under the pointer stays there"
    opened.keyboard.down("Shift")
    opened.mouse.wheel(0, 100)
    opened.keyboard.up("Shift")
    opened.wait_for_function("(start) => inner.view().axis.start > start", arg=start)
    start, _ = opened.evaluate(axis)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 400, box["y"] + 60, steps=4)
    opened.mouse.up()
    moved, again = opened.evaluate(axis)
    assert again == span and abs((start - moved) - 100 * span / box["width"]) < 1
    assert opened.evaluate(STATE, "selected_slice") == -1, "a drag is no click"


def test_shift_drag_selects_a_range_that_is_a_trace_in_python(open_page: OpenPage) -> None:
    trace = small_trace()
    timeline = Caught(trace)
    opened = shown(open_page, inner(timeline))
    box = opened.locator(".mx-tl-canvas").bounding_box()
    place = "(x) => Math.round(inner.view().axis.at(x))"
    opened.keyboard.down("Shift")
    opened.mouse.move(box["x"] + 500, box["y"] + 30)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    opened.mouse.up()
    opened.keyboard.up("Shift")
    selection = opened.evaluate(STATE, "selection_ns")
    assert selection == [opened.evaluate(place, 200), opened.evaluate(place, 500)]
    saved = "models[0].sent.filter((m) => m.type === 'save').at(-1)?.state.selection_ns"
    opened.wait_for_function(f"JSON.stringify({saved}) === '{str(selection).replace(' ', '')}'")
    timeline.selection_ns = tuple(selection)
    assert timeline.selection.to_frame().equals(trace.between(*selection).to_frame()) and len(timeline.selection) > 5
    opened.evaluate("(text) => models[0].emit('msg:custom', {type: 'selection', text}, [])", "5 events")
    assert opened.locator(".mx-tl-status").inner_text() == "5 events"


def test_the_length_of_a_range_stands_in_the_ruler_while_it_is_in_sight(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    tags = """() => { const v = inner.view(), o = v.overlay, seen = [], { tag } = o;
      o.tag = (ctx, text, x) => seen.push([ctx.canvas.className, text, Math.round(x / v.ratio)]); v.draw(); o.tag = tag;
      return seen; }"""
    opened.evaluate("models[0].set('selection_ns', [10000, 12500])")
    middle = round(opened.evaluate("inner.view().axis.x(11250)"))
    assert opened.evaluate(tags) == [["mx-tl-top", "2.5 µs", middle]], "not over the names"
    opened.evaluate("inner.view().axis.set(20000, 5000)")
    assert opened.evaluate(tags) == []


def test_a_search_takes_the_count_of_the_selection_away(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    opened.evaluate("models[0].set('selection_ns', [10000, 12500])")
    opened.evaluate("models[0].emit('msg:custom', {type: 'selection', text: '5 events'}, [])")
    opened.get_by_label("Search names").fill("kernel")
    opened.wait_for_function("document.querySelector('.mx-tl-note').textContent === '12 hits'")
    assert opened.locator(".mx-tl-status").text_content() == ""


def test_the_labels_can_be_made_wider(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    left = "document.querySelector('.mx-tl-canvas').getBoundingClientRect().left - "
    left += "document.querySelector('.mx-tl-frame').getBoundingClientRect().left"
    edge = opened.get_by_role("separator", name="Width of the labels")
    before, width = opened.evaluate(left), opened.evaluate("inner.view().axis.width")
    edge.press("ArrowRight")
    settle(opened)
    assert opened.evaluate(left) == before + 16 and opened.evaluate("inner.view().axis.width") == width - 16
    box = edge.bounding_box()
    opened.mouse.move(box["x"] + 3, box["y"] + 50)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 103, box["y"] + 50, steps=4)
    opened.mouse.up()
    settle(opened)
    assert abs(opened.evaluate(left) - before - 116) < 4
    assert edge.get_attribute("aria-valuenow") == str(round(opened.evaluate(left) - 1))
    assert opened.evaluate(STATE, "selected_slice") == -1


def test_the_view_to_begin_with(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace(), view=(10_000, 20_000))))
    assert opened.evaluate("[inner.view().axis.start, inner.view().axis.end]") == [10_000, 20_000]


def test_no_label_of_the_time_axis_is_cut(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    cut = """(span) => { const v = inner.view(), ctx = v.top.getContext("2d"), bad = [];
      let seen = 0; const own = ctx.fillText.bind(ctx);
      const fits = (text, x) => x >= 0 && x + ctx.measureText(text).width <= v.top.width;
      ctx.fillText = (text, x) => { seen++; if (!fits(text, x)) bad.push(text); };
      for (let i = 0; i < 40; i++) { v.axis.set(i * 300, span); v.overlay.time(ctx, 0); }
      ctx.fillText = own; return [seen > 100, bad]; }"""
    assert opened.evaluate(cut, 9_000) == [True, []] and opened.evaluate(cut, 30_000) == [True, []]


def test_the_number_of_a_name_survives(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    short = opened.evaluate("[14, 13, 10, 7, 3, 2, 1].map((room) => inner.shortened('mrv2lab.step#15', room + 1))")
    assert short == ["mrv2lab.step#15", "mrv2lab.st…#15", "mrv2lab…#15", "#15", "#15", "#15", "15"]
    assert opened.evaluate("[7, 4, 3].map((room) => inner.shortened('aten::linear', room))") == ["aten::…", "ate…", ""]


def test_the_minimap_moves_what_is_in_sight(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    opened.get_by_role("button", name="Zoom in").click()
    opened.get_by_role("button", name="Zoom in").click()
    box = opened.locator(".mx-tl-map").bounding_box()
    opened.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 10)
    settle(opened)
    middle = opened.evaluate("inner.view().axis.start + inner.view().axis.span / 2")
    home = opened.evaluate("inner.view().axis.home")
    assert abs(middle - (home[0] + 0.75 * (home[1] - home[0]))) < 0.01 * (home[1] - home[0])
    window = opened.locator(".mx-tl-window").bounding_box()
    assert abs(window["x"] + window["width"] / 2 - (box["x"] + 0.75 * box["width"])) < 3


def test_marks_and_slices_say_what_they_are_under_the_pointer(open_page: OpenPage) -> None:
    a, _, timeline = two_runs()
    opened = shown(open_page, inner(timeline))
    tip, status = opened.locator(".mx-tl-tip"), opened.locator(".mx-tl-status")
    opened.mouse.move(*point(opened, timeline, event_named(a, "aten::linear", 2)))
    assert tip.inner_text() == "aten::linear 3 µs"
    glyph = """() => { const v = inner.view(), c = v.canvas.getBoundingClientRect(), m = v.data.marks[0];
      return [c.left + v.axis.x(m[0]), c.top + v.layout.place(m[4]).top + 6 - v.scroll]; }"""
    x, y = opened.evaluate(glyph)
    opened.mouse.move(x, y)
    assert tip.inner_text() == "sync: barrier, 2 µs"
    opened.mouse.click(x, y)
    assert status.inner_text() == "sync: barrier, 2 µs" and opened.evaluate(STATE, "selected_slice") == -1
    opened.mouse.move(x, y + 500)
    assert not tip.is_visible()


# -- fingers


@pytest.fixture
def touched(browser: Any) -> Iterator[Any]:
    """A page on a touch screen, and the session that moves fingers on it."""
    context = browser.new_context(viewport={"width": 800, "height": 700}, has_touch=True, device_scale_factor=2)
    opened = context.new_page()
    opened.set_content(inner(Caught(small_trace())))
    opened.wait_for_function(PAINTED.format(1))
    yield opened
    context.close()


def fingers(opened: Any, kind: str, *points: tuple[float, float]) -> None:
    """One touch event of the browser itself."""
    session = opened.__dict__.setdefault("session", opened.context.new_cdp_session(opened))
    touches = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
    session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})


def test_pinch_drag_and_tap(touched: Any) -> None:
    box = touched.locator(".mx-tl-canvas").bounding_box()
    x, y = box["x"] + 200, box["y"] + 60
    axis = "[inner.view().axis.start, inner.view().axis.span]"
    start, span = touched.evaluate(axis)
    fingers(touched, "touchStart", (x, y), (x + 100, y))
    for step in range(1, 6):
        fingers(touched, "touchMove", (x - 10 * step, y), (x + 100 + 10 * step, y))
    fingers(touched, "touchEnd")
    zoomed, narrow = touched.evaluate(axis)
    assert narrow == pytest.approx(span / 2, rel=0.02)
    middle = 250 / box["width"]
    assert zoomed + middle * narrow == pytest.approx(start + middle * span, abs=0.02 * span)
    fingers(touched, "touchStart", (x, y))
    for step in range(1, 6):
        fingers(touched, "touchMove", (x - 20 * step, y))
    fingers(touched, "touchEnd")
    panned, same = touched.evaluate(axis)
    assert same == narrow and panned > zoomed
    assert touched.evaluate(STATE, "selected_slice") == -1
    first = "(() => { const v = inner.view(); v.axis.fit(); v.draw(); const b = v.boxOf(0), c = "
    first += "v.canvas.getBoundingClientRect(); return [c.left + (b.left + b.right) / 4, c.top + b.y / 2 + 4]; })()"
    touched.touchscreen.tap(*touched.evaluate(first))
    touched.wait_for_function("models[0].state.selected_slice === 0")


# -- search and filters


def test_search_counts_marks_and_walks_through_hits(open_page: OpenPage) -> None:
    trace = small_trace()
    opened = shown(open_page, inner(Caught(trace)))
    box = opened.get_by_label("Search names")
    box.fill("KERNEL_1")
    opened.wait_for_function("document.querySelector('.mx-tl-note').textContent === '4 hits'")
    seen = []
    for key in ["Enter", "Enter", "Enter", "Enter", "Enter", "Shift+Enter"]:
        box.press(key)
        seen.append(opened.locator(".mx-tl-note").first.inner_text())
    assert seen == ["1 of 4 hits", "2 of 4 hits", "3 of 4 hits", "4 of 4 hits", "1 of 4 hits", "4 of 4 hits"]
    number = opened.evaluate(STATE, "selected_slice")
    assert opened.evaluate("(id) => inner.view().data.nameOf(inner.view().data.posOf[id])", number) == "kernel_1"
    tones = "(() => { const v = inner.view(); return v.tone.filter((t) => t < v.palette.half).length; })()"
    assert opened.evaluate(tones) == 4, "everything else is dim"
    opened.get_by_role("button", name="Regular expression").click()
    box.fill("kernel_[02]$")
    opened.wait_for_function("document.querySelector('.mx-tl-note').textContent === '8 hits'")
    box.fill("kernel_[")
    opened.wait_for_function("document.querySelector('.mx-tl-note').textContent.startsWith('No regular expression')")


def test_kinds_can_be_hidden_and_lanes_follow(open_page: OpenPage) -> None:
    trace = small_trace()
    timeline = Caught(trace)
    opened = shown(open_page, inner(timeline))
    lanes = opened.locator(".mx-tl-lane")
    assert lanes.count() == 6
    opened.locator("[data-kind=op]").click()
    assert lanes.count() == 6, "its lane holds runtime calls too"
    opened.mouse.click(*point(opened, timeline, event_named(trace, "aten::linear", 2)))
    assert opened.evaluate(STATE, "selected_slice") == -1, "what is hidden cannot be hit"
    opened.locator("[data-kind=op]").click()
    opened.mouse.click(*point(opened, timeline, event_named(trace, "aten::linear", 2)))
    assert opened.evaluate(STATE, "selected_slice") >= 0
    opened.locator("[data-kind=memcpy]").click()
    assert lanes.count() == 5 and "memcpy" not in opened.evaluate(STATE, "kinds")
    assert opened.locator("[data-kind=memcpy]").get_attribute("aria-pressed") == "false"
    opened.evaluate("models[0].set('kinds', ['kernel'])")
    assert lanes.all_inner_texts() == ["▾ stream 7"]
    opened.evaluate("models[0].set('kinds', ['kernel', 'memcpy']); models[0].set('hidden_lanes', [4])")
    assert lanes.all_inner_texts() == ["▾ stream 20"]
    opened.get_by_role("button", name="Show all lanes").click()
    assert lanes.count() == 2 and opened.evaluate(STATE, "hidden_lanes") == []


def test_lanes_fold_to_a_strip(open_page: OpenPage) -> None:
    timeline = Caught(small_trace())
    opened = shown(open_page, inner(timeline))
    python = opened.locator(".mx-tl-lane").nth(2)
    assert python.get_attribute("aria-expanded") == "true"
    before = opened.evaluate("inner.view().layout.height")
    python.click()
    assert opened.evaluate("document.activeElement.getAttribute('role')") == "application", "keys go on working"
    assert opened.locator(".mx-tl-lane").nth(2).get_attribute("aria-expanded") == "false"
    assert opened.evaluate("inner.view().layout.height") < before
    settle(opened)
    x, y = point(opened, timeline, event_named(small_trace(), "engine.py(12): step", 2))
    pixel = "([x, y]) => { const v = inner.view(), c = v.canvas.getBoundingClientRect();"
    pixel += " return [...v.canvas.getContext('2d').getImageData(x - c.left, y - c.top, 1, 1).data.slice(0, 3)]; }"
    assert opened.evaluate(pixel, [x, y]) != [255, 255, 255]
