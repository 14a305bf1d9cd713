"""What a frame of the timeline takes in headless Chromium: the interval between animation frames, not the draw time.

``python -m tests.widgets.timeline_frames --out FILE``   1 M slices in 30 lanes, every row in view, at 1x and while
zooming and panning, canvas 1200 x 800, pixel ratio 1 and 2. Figures are milliseconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from conftest import find_chromium
from mrv2lab.bench.result import summary, write_result
from mrv2lab.widgets.timeline.assets import module_text
from tests.widgets.conftest import FLAGS
from tests.widgets.timeline_page import Caught, page, random_trace

WIDTH, HEIGHT, LABELS = 1200, 800, 156 + 36
"""Of the canvas, and what stands beside it."""

ROWS = """["inner", "scroll"].map((name) => document.querySelector(".mx-tl-" + name).getBoundingClientRect().height)"""
# One input event a frame, as from a wheel that is turned all the time; what is kept is when frames came.
FRAMES = """async ({ count, how }) => {
  const canvas = document.querySelector(".mx-tl-canvas");
  const box = canvas.getBoundingClientRect();
  const times = [];
  for (let i = 0; i < count; i++) {
    await new Promise((resolve) => requestAnimationFrame((now) => { times.push(now); resolve(); }));
    const back = i % 20 < 10 ? 1 : -1;
    const at = { bubbles: true, cancelable: true, clientX: box.left + box.width / 2, clientY: box.top + 50 };
    if (how === "pan") canvas.dispatchEvent(new WheelEvent("wheel", { ...at, shiftKey: true, deltaY: 3 * back }));
    if (how === "zoom") canvas.dispatchEvent(new WheelEvent("wheel", { ...at, ctrlKey: true, deltaY: -2 * back }));
    if (how === "deep") canvas.dispatchEvent(new WheelEvent("wheel", { ...at, ctrlKey: true, deltaY: -120 * back }));
  }
  return times.slice(1).map((time, i) => time - times[i]);
}"""


def measure(browser: Any, html: str, ratio: int, frames: int) -> dict[str, Any]:
    """Frame intervals and time to the first paint of one page."""
    size = {"width": WIDTH + LABELS, "height": HEIGHT + 300}
    context = browser.new_context(viewport=size, device_scale_factor=ratio)
    opened = context.new_page()
    opened.set_default_timeout(120_000)
    opened.set_content(html)
    opened.wait_for_function("performance.getEntriesByName('mrv2lab-timeline-first-paint').length")
    first = opened.evaluate("performance.getEntriesByName('mrv2lab-timeline-first-paint')[0].duration")
    opened.get_by_role("button", name="All rows in view, or readable rows").click()
    opened.wait_for_timeout(1500)
    shape = opened.evaluate(
        "(() => { const c = document.querySelector('.mx-tl-canvas'); return [c.width, c.height]; })()"
    )
    rows = opened.evaluate(ROWS)
    figures: dict[str, Any] = {"canvas": shape, "data_to_first_paint_ms": first, "all_rows_in_view": rows[0] <= rows[1]}
    for how in ("pan", "zoom", "deep"):
        intervals = sorted(opened.evaluate(FRAMES, {"count": frames, "how": how}))
        figures[how] = summary(intervals) | {"p95": intervals[int(0.95 * len(intervals))]}
    context.close()
    return figures


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    slices: Annotated[int, typer.Option(help="Slices in 30 lanes.")] = 1_000_000,
    frames: Annotated[int, typer.Option(help="Frames of each kind of movement.")] = 120,
) -> None:
    """Measure and write."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        raise typer.BadParameter("no Chromium on this machine: apt-get install chromium")
    trace = random_trace(slices)
    start = time.perf_counter()
    timeline = Caught(trace, height=HEIGHT)
    constructed = time.perf_counter() - start
    start = time.perf_counter()
    static = timeline._repr_mimebundle_()[0]["text/html"]
    figures: dict[str, Any] = {
        "slices": slices,
        "lanes": len(timeline.lanes),
        "construct_ms": 1e3 * constructed,
        "static_twin_ms": 1e3 * (time.perf_counter() - start),
        "static_twin_bytes": len(static.encode()),
        "message_bytes": sum(map(len, timeline.messages[0][1])),
        "module_bytes": len(module_text().encode()),
    }
    html = page(timeline)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        for ratio in (1, 2):
            figures[f"pixel_ratio_{ratio}"] = measure(browser, html, ratio, frames)
        browser.close()
    write_result(out, "timeline_frames", figures)
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
