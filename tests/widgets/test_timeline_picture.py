"""What the timeline draws, read back in Chromium: rows, pixels, frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import Trace, TraceInfo
from tests.slow import mostly_slow
from tests.widgets.conftest import OpenPage
from tests.widgets.timeline_page import (
    COMPUTE,
    PAINTED,
    Caught,
    changed,
    inner,
    random_trace,
    settle,
    shown,
    small_trace,
)

pytestmark = pytest.mark.browser


# -- packing

ROWS = """() => {
  const d = inner.view().data;
  const bad = { overlapping: 0, unsorted: 0, lost: d.length, foreign: 0 };
  const seen = new Uint8Array(d.length);
  for (const lane of d.lanes) {
    for (let row = d.laneRow[lane.index]; row < d.laneRow[lane.index + 1]; row++) {
      for (let p = d.rowFirst[row]; p < d.rowFirst[row + 1]; p++) {
        if (!seen[d.idOf[p]]++) bad.lost--;
        if (d.laneOf(d.idOf[p]) !== lane || d.posOf[d.idOf[p]] !== p) bad.foreign++;
        if (p === d.rowFirst[row]) continue;
        if (d.start[p] < Math.max(d.end[p - 1], d.start[p - 1] + 1)) bad.overlapping++;
        if (d.end[p] < d.end[p - 1]) bad.unsorted++;
      }
    }
  }
  return bad;
}"""
RIGHT = {"overlapping": 0, "unsorted": 0, "lost": 0, "foreign": 0}


def crowded_trace() -> Trace:
    """Random slices; equal starts, moments, touching ones and 40 that lie over each other."""
    rng = np.random.default_rng(5)
    builder = TraceBuilder()
    for _ in range(3000):
        builder.add(int(rng.integers(0, 5000)), int(rng.integers(0, 60)), f"k{rng.integers(9)}", "kernel", COMPUTE)
    for i in range(40):
        builder.add(6000 + i, 1000, "deep", "kernel", COMPUTE)
        builder.add(8000 + 10 * i, 10, "touching", "kernel", COMPUTE)
        builder.add(9000, 0, "moment", "kernel", COMPUTE)
    return builder.build(TraceInfo("t", "crowded"))


@pytest.mark.parametrize("which", mostly_slow(["random", "crowded"], 1))
def test_no_two_slices_of_a_row_overlap_and_none_is_lost(open_page: OpenPage, which: str) -> None:
    trace = crowded_trace() if which == "crowded" else random_trace(20_000, lanes=6)
    opened = shown(open_page, inner(Caught(trace)))
    assert opened.evaluate(ROWS) == RIGHT
    rows = opened.evaluate("inner.view().data.lanes[0].rows")
    # Greedy rows in order of start are as few as the deepest moment needs.
    starts, ends = trace.start, np.maximum(trace.end, trace.start + 1)
    lane = trace.lane == trace.lane[0] if which == "crowded" else trace.by_lane(lambda one: one.stream == 0)
    depth = [int(((starts[lane] <= s) & (ends[lane] > s)).sum()) for s in starts[lane]]
    assert rows == max(depth)


def test_the_packing_test_can_fail(open_page: OpenPage) -> None:
    mutant = changed("if (this.ends[1] > start) this.grow();", "")  # a cap of eight rows
    opened = shown(open_page, inner(Caught(crowded_trace()), module=mutant))
    assert opened.evaluate(ROWS)["overlapping"] > 0


# -- pixels

COLOURS = """([start, end]) => {
  const v = inner.view(), r = v.ratio;
  const place = v.layout.places.find((p) => !p.lane.empty);
  const x = Math.floor(v.axis.x(start) * r), right = Math.max(Math.ceil(v.axis.x(end) * r), x + 1);
  const y = Math.round((place.top + v.layout.rowHeight / 2) * r);
  const data = v.canvas.getContext("2d").getImageData(x - 2, y, right - x + 4, 1).data;
  const found = [];
  for (let i = 0; i < data.length; i += 4) found.push([data[i], data[i + 1], data[i + 2]].join());
  return found;
}"""


def lone_trace() -> Trace:
    """One nanosecond in the middle of a quarter of an hour."""
    builder = TraceBuilder()
    builder.add(0, 1, "k", "kernel", COMPUTE)
    builder.add(450_000_000_000, 1, "k", "kernel", COMPUTE)
    builder.add(900_000_000_000, 1, "k", "kernel", COMPUTE)
    return builder.build(TraceInfo("t", "lone"))


@pytest.mark.parametrize("module", [None, "mutant"])
def test_a_lone_nanosecond_is_visible(open_page: OpenPage, module: str | None) -> None:
    mutant = changed("0.25 + (0.75 * level) / 63", "level / 63") if module else None
    opened = shown(open_page, inner(Caught(lone_trace()), module=mutant))
    settle(opened)
    colours = set(opened.evaluate(COLOURS, [450_000_000_000] * 2))
    assert colours == ({"255,255,255"} if module else {"255,255,255", "191,231,220"}), "a quarter of the kernels' green"


@pytest.mark.parametrize("ratio", [1, 2])
def test_slices_have_their_kinds_colour_and_a_border(browser: Any, screenshots: Path, ratio: int) -> None:
    timeline = Caught(small_trace().where("kernel"))
    context = browser.new_context(viewport={"width": 1200, "height": 700}, device_scale_factor=ratio)
    opened = context.new_page()
    opened.set_content(inner(timeline))
    opened.wait_for_function(PAINTED.format(1))
    settle(opened)
    assert opened.evaluate("inner.view().canvas.width / inner.view().canvas.clientWidth") == ratio
    colours = opened.evaluate(COLOURS, [2000, 3400])
    assert "0,158,115" in colours and "255,255,255" in colours
    edge = colours[next(i for i, colour in enumerate(colours) if colour != "255,255,255")]
    assert sum(map(int, edge.split(","))) < 158 + 115, "darker than the body"
    opened.screenshot(path=screenshots / f"timeline_kernels_{ratio}.png")
    context.close()


def test_only_one_frame_is_on_its_way(open_page: OpenPage) -> None:
    opened = shown(open_page, inner(Caught(small_trace())))
    settle(opened)
    count = """async () => {
      const v = inner.view(), draw = v.draw.bind(v);
      let drawn = 0;
      v.draw = () => { drawn++; draw(); };
      for (let i = 0; i < 50; i++) { v.axis.pan(1); v.moved(); }
      await new Promise((done) => setTimeout(done, 200));
      return drawn;
    }"""
    assert opened.evaluate(count) == 1
