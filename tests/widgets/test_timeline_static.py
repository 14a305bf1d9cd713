"""The static twin: valid, inert, bounded, and nothing of the trace lost that could be shown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import Lane, Trace, TraceInfo
from mrv2lab.widgets.timeline import coverage as coverage_module
from mrv2lab.widgets.timeline import static_timeline
from mrv2lab.widgets.timeline.coverage import coverage
from mrv2lab.widgets.timeline.slices import slices_of
from mrv2lab.widgets.timeline.static_timeline import MOST_BYTES
from mrv2lab.widgets.timeline.table import longest
from mrv2lab.widgets.timeline.text import escaped, time_text
from tests.widgets.timeline_page import ATTACK, COMPUTE, Caught, random_trace, small_trace, steps_frame

SVG = "{http://www.w3.org/2000/svg}"


def bundle(timeline: Caught) -> dict[str, str]:
    """What is saved with the output."""
    data: dict[str, str] = timeline._repr_mimebundle_()[0]
    return data


def picture(html: str) -> ElementTree.Element:
    """The SVG of a twin, parsed as XML."""
    found = re.search(r"<svg.*?</svg>", html, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def full(trace: Trace, other: Trace) -> Caught:
    """Two traces with everything that can lie over them."""
    marks = pd.DataFrame(
        {"start_ns": [6000, 16_000], "end_ns": [8000, 16_000], "kind": ["sync", "hazard"], "label": [ATTACK, "x" * 900]}
    )
    difference = pd.DataFrame({"start_ns": [0], "end_ns": [9000], "delta_ns": [-400], "label": [ATTACK]})
    steps = [steps_frame(trace), steps_frame(other)]
    return Caught(trace, other, steps=steps, marks=[marks, marks], difference=difference)


def test_words_and_picture() -> None:
    data = bundle(full(small_trace(), small_trace("run B", 300, modelled=True)))
    assert data["text/plain"] == (
        "Timeline of run A over run B (device times modelled): 90 events in 12 lanes, 39.9 µs"
    )
    root = picture(data["text/html"])
    texts = ["".join(node.itertext()) for node in root.iter(SVG + "text")]
    for text in (
        "A  run A",
        "B  run B (device times modelled)",
        "steps A",
        "step 3",
        "B minus A",
        "orange up: B slower",
        "-400 ns",
        "time (µs)",
    ):
        assert text in texts, text
    assert "A stream 7" in texts and "K kernels" in texts and "forward" in texts
    assert {"S", "!"} <= set(texts)
    assert "application/vnd.jupyter.widget-view+json" in data


def test_hostile_names_are_inert() -> None:
    html = bundle(full(small_trace(ATTACK), small_trace("<script>alert(1)</script>")))["text/html"]
    root = picture(html)
    allowed = {SVG + tag for tag in ("svg", "g", "title", "text", "rect", "path")}
    assert {node.tag for node in root.iter()} <= allowed
    outside = re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
    assert set(re.findall(r"<(\w+)", outside)) <= set("div details summary table caption thead tbody tr th td".split())
    assert "<img" not in html and "<script" not in html and "\u202e" not in html
    assert not re.search(r"\son\w+=", re.sub(r">[^<]*<", "><", html)), "no attribute is a handler"
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("character", ["\x00", "\x0b", "\ud800", "\uffff", "\ufffe", "\x85"])
def test_no_character_makes_the_picture_invalid(character: str) -> None:
    builder = TraceBuilder()
    builder.add(0, 500, f"bad{character}name", "kernel", COMPUTE)
    picture(bundle(Caught(builder.build(TraceInfo("t", f"title{character}"))))["text/html"])


def worst_trace(n: int = 20_000) -> Trace:
    """Long names that grow when escaped, many lanes, many kinds, nothing in one piece."""
    rng = np.random.default_rng(3)
    builder = TraceBuilder()
    kinds = ["kernel", "memcpy", "memset", "graph", "op", "python", "sync", "runtime"]
    for i in range(n):
        lane = Lane("<&>" * 30, f"'\"{i % 50}", "stream", 0, i % 50)
        length = int(rng.lognormal(5, 2)) + (10_000_000 if i % 700 == 0 else 0)
        builder.add(int(rng.integers(0, 10**7)), length, "<&'\">" * 40 + str(i), kinds[int(rng.integers(8))], lane)
    return builder.build(TraceInfo("t", "<&>" * 100))


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [len(bundle(Caught(one))["text/html"].encode()) for one in (random_trace(300), random_trace(200_000))]
    assert all(1000 < size <= MOST_BYTES for size in sizes), sizes
    timeline = Caught(worst_trace())
    assert len(bundle(timeline)["text/html"].encode()) <= MOST_BYTES
    picture(bundle(timeline)["text/html"])
    monkeypatch.setattr(static_timeline, "MOST_BYTES", 10**9)
    assert len(bundle(timeline)["text/html"].encode()) > MOST_BYTES, "the bound must have been needed"


def test_an_empty_trace_and_one_without_a_gpu_say_so() -> None:
    data = bundle(Caught(TraceBuilder().build(TraceInfo("t", "nothing"))))
    assert data["text/plain"] == "Timeline of nothing: no events recorded"
    assert "no events recorded" in "".join(picture(data["text/html"]).itertext())
    data = bundle(Caught(small_trace(device=False)))
    assert data["text/plain"].endswith("39 µs; run A: no GPU activity recorded")
    assert "no GPU activity recorded" in "".join(picture(data["text/html"]).itertext())


def test_a_lone_nanosecond_is_in_the_picture() -> None:
    builder = TraceBuilder()
    builder.add(0, 1, "first", "kernel", COMPUTE)
    builder.add(500_000_000_000, 1, "lone", "memcpy", COMPUTE)
    builder.add(10**12, 0, "last", "sync", COMPUTE)
    root = picture(bundle(Caught(builder.build(TraceInfo("t", "t"))))["text/html"])
    strokes = {
        node.get("stroke"): node.get("d") for node in root.iter(SVG + "path") if node.get("stroke-width") == "12"
    }
    assert strokes.keys() == {"#009e73", "#cc79a7", "#d55e00"}
    assert strokes["#cc79a7"].startswith("M468 "), "in the middle of 168..768"


def brute_coverage(trace: Trace, start: float, end: float, columns: int) -> Any:
    """The same by going through every slice and column."""
    slices = slices_of([trace], [0])
    edges = np.linspace(start, end, columns + 1)
    found = np.zeros((len(slices.lanes), 17, columns))
    for i in range(len(slices)):
        lane = int(np.searchsorted(slices.offsets, i, side="right")) - 1
        a, b = slices.start[i], slices.start[i] + float(slices.duration[i])
        share = np.clip(np.minimum(b, edges[1:]) - np.maximum(a, edges[:-1]), 0, None) / (edges[1] - edges[0])
        found[lane, slices.kind[i]] += share
    return found


def test_coverage_is_what_going_through_every_slice_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(400, lanes=3)
    start, end = float(trace.start.min()), float(trace.end.max())
    for columns in (1, 7, 100):
        found = coverage(slices_of([trace], [0]), start, end, columns)
        np.testing.assert_allclose(found, brute_coverage(trace, start, end, columns), atol=1e-6)
    slices, expected = slices_of([trace], [0]), brute_coverage(trace, start, end, 100)
    with monkeypatch.context() as patch:
        patch.setattr(coverage_module.np, "cumsum", lambda a, axis: a)  # whole columns between the ends forgotten
        assert not np.allclose(coverage(slices, start, end, 100), expected)


def test_the_longest_slices_in_order() -> None:
    trace = random_trace(500, lanes=4)
    slices = slices_of([trace], [0])
    expected = sorted(range(500), key=lambda i: (-int(slices.duration[i]), i))
    assert longest(slices, 12) == expected[:12] and longest(slices, 900) == expected
    assert longest(slices_of([], []), 5) == []
    html = bundle(Caught(trace))["text/html"]
    assert "The longest 12 of 500 events" in html and f"{int(trace.duration.max()):,}</td>" in html


def test_texts() -> None:
    texts = [time_text(ns) for ns in (0, 1, 999, 1000, 1234, 999_600, 2_500_000, 61e9)]
    assert texts == ["0 ns", "1 ns", "999 ns", "1 µs", "1.23 µs", "1,000 µs", "2.5 ms", "61 s"]
    assert escaped("<b>\u202e" + "x" * 100, 10) == "&lt;b&gt;⟨U+202E⟩xxxxx…"
