"""The timeline in Chromium: two runs, two timelines, two views, reloads, clean-up, hostile and missing data."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import TraceInfo
from tests.widgets.conftest import OpenPage
from tests.widgets.timeline_page import (
    ATTACK,
    INNER,
    Caught,
    changed,
    event_named,
    inner,
    page,
    pages,
    random_trace,
    shown,
    small_trace,
    steps_frame,
    two_runs,
)

pytestmark = pytest.mark.browser


# -- two runs


def test_two_runs_on_one_axis(open_page: OpenPage, screenshots: Path) -> None:
    *_, timeline = two_runs()
    opened = shown(open_page, inner(timeline))
    labels = opened.locator(".mx-tl-lane").all_inner_texts()
    assert [label[2] for label in labels] == ["A"] * 6 + ["B"] * 6
    assert labels[10] == "▾ B stream 7 (modelled)"
    assert opened.locator(".mx-tl-sides span").all_inner_texts() == [
        *["A overview", "B overview", "B minus A\n▲ orange: B slower\n▼ blue: B faster", "A steps", "B steps", "time"]
    ]
    assert opened.locator(".mx-tl-badge").all_inner_texts() == ["modelled"]
    bands = """() => {
      const v = inner.view(), m = v.map, ctx = m.getContext('2d');
      m.width = 1;  // as a browser leaves it when its size changes
      v.sized = false;
      v.draw();
      const colours = (y) => [...new Set(new Uint32Array(ctx.getImageData(0, y, m.width, 1).data.buffer))];
      return [0.1, 0.35, 0.6, 0.85].map((at) => colours(Math.floor(at * m.height))); }"""
    a_host, a_device, b_host, b_device = map(set, opened.evaluate(bands))
    assert min(map(len, (a_host, a_device, b_host, b_device))) > 2, "drawn at once"
    assert len(a_host & b_host) > 2 < len(a_device & b_device) and len(a_host & a_device) <= 1
    opened.screenshot(path=screenshots / "timeline_two_runs.png", full_page=True)
    lines = """() => { const v = inner.view(), ctx = v.canvas.getContext('2d'), seen = [[], []], own = v.overlay.line;
      v.overlay.line = (c, x, top, bottom, trace) => seen[trace].push(x); v.overlay.lines(ctx); v.overlay.line = own;
      const rects = (trace) => { let n = 0; v.overlay.line({ fillRect: () => n++ }, 0, 0, 100, trace); return n; };
      return [seen.map((xs) => xs.length), rects(0), rects(1) > 5]; }"""
    assert opened.evaluate(lines) == [[4, 4], 1, True], "whole for A, dashed for B"
    opened.get_by_role("button", name="A beside B").click()
    labels = opened.locator(".mx-tl-lane").all_inner_texts()
    assert [label[2] for label in labels] == ["A", "B"] * 6
    opened.get_by_role("button", name="Show the table").click()
    opened.wait_for_function("document.querySelectorAll('.mx-tl-table table').length === 4")
    table = opened.locator(".mx-tl-table").inner_text()
    assert "+900 ns" in table and "hazard" in table and "barrier" in table


def test_two_timelines_and_two_views_share_nothing_on_the_page(open_page: OpenPage) -> None:
    first, second = Caught(small_trace()), Caught(random_trace(500, lanes=3))
    opened = shown(open_page, inner(first, second, views=2), views=4)
    roots = opened.locator(".mx-tl")
    assert roots.count() == 4
    ids = opened.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    roots.nth(0).get_by_role("button", name="Zoom in").click()
    spans = opened.evaluate("inner.storeOf ? [0, 1].map((i) => inner.view(i, 1).axis.span) : []")
    assert spans[0] == spans[1], "the other timeline did not move"
    roots.nth(2).locator(".mx-tl-lane").first.click()
    folded = [roots.nth(i).locator(".mx-tl-lane").first.get_attribute("aria-expanded") for i in range(4)]
    assert folded == ["true", "true", "false", "true"]
    opened.evaluate("models[0].set('selected_slice', 3)")
    shown_details = [roots.nth(i).locator(".mx-tl-details").is_visible() for i in range(4)]
    assert shown_details == [True, True, False, False], "both views of one model, no view of the other"


def test_a_reloaded_page_asks_and_gets_the_data(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace()), pushed=True))
    assert opened.evaluate("models[0].sent.map((m) => m.type)") == ["ready"]
    fresh = shown(open_page, inner(Caught(small_trace())))
    assert fresh.evaluate("models[0].sent") == [], "data that is on its way is not asked for"


def test_silence_from_python_is_explained(open_page: OpenPage) -> None:
    module = changed("3000, () => this.say", "200, () => this.say") + INNER
    html = pages([Caught(small_trace())], module=module)
    opened = open_page(html.replace("if (!state.pushed) model.push();", ""))
    opened.wait_for_function("document.querySelector('.mx-tl-status').textContent.startsWith('No answer from Python')")


def test_clean_up_leaves_nothing(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace()), views=2), views=2)
    one = opened.evaluate("cleanups[0](), models[0].count()")
    assert one == 5 and opened.locator(".mx-tl").count() == 1
    opened.locator(".mx-tl-scroll").focus()
    opened.keyboard.press("n")
    assert opened.evaluate("models[0].state.selected_slice") == 0
    assert opened.evaluate("cleanups[1](), started[0](), models[0].count()") == 0
    assert opened.evaluate("document.getElementById('out').textContent") == ""
    opened.evaluate("models[0].emit('msg:custom', {type: 'status', text: 'x'}, [])")
    opened.wait_for_timeout(500)  # whatever timer was left would now raise


def test_hostile_names_stay_text(open_page: OpenPage) -> None:
    trace = small_trace(ATTACK)
    timeline = Caught(trace, steps=steps_frame(trace).assign(step=ATTACK), titles=[ATTACK])
    opened = shown(open_page, inner(timeline))
    opened.evaluate("(id) => models[0].set('selected_slice', id)", timeline._slices.find(0, event_named(trace, ATTACK)))
    opened.get_by_role("button", name="Show the table").click()
    opened.wait_for_timeout(500)
    assert opened.locator(".mx-tl-details h3").inner_text() == "<img src=x onerror=alert(1)> ⟨U+202E⟩&amp;"
    assert opened.locator(".mx-tl img").count() == 0
    assert "onerror" in opened.locator(".mx-tl-title").inner_text()


def test_nothing_to_show_says_why(open_page: OpenPage, screenshots: Path) -> None:
    nothing = Caught(TraceBuilder().build(TraceInfo("t", "nothing")))
    opened = shown(open_page, inner(nothing))
    assert opened.locator(".mx-tl-status").inner_text() == "no events recorded"
    for key in ["n", "ArrowRight", "ArrowDown", "z", "m", "f", "r", "c", "x", "k", "Enter", "Home"]:
        opened.locator(".mx-tl-scroll").press(key)
    opened = shown(open_page, inner(Caught(small_trace(device=False))))
    assert "no GPU activity recorded" in opened.locator(".mx-tl-lane").last.get_attribute("title")
    opened.screenshot(path=screenshots / "timeline_no_gpu.png", full_page=True)


def test_a_message_that_cannot_be_read_is_a_sentence(open_page: OpenPage) -> None:
    opened = shown(open_page, page(Caught(small_trace())))
    opened.evaluate("models[0].emit('msg:custom', {type: 'data', dtypes: ['uint32', 'uint16'], offsets: [0]}, [])")
    assert "could not be read" in opened.locator(".mx-tl-status").inner_text()
