"""One self-contained page: the timeline's module with a fake anywidget model that answers as Python does.

The messages are made by the widget itself: a ``Timeline`` whose ``send`` is caught.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pandas as pd

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import KIND, Lane, Trace, TraceInfo
from mrv2lab.widgets.assets import tight
from mrv2lab.widgets.timeline import Timeline
from mrv2lab.widgets.timeline.assets import module_text, style_text
from tests.widgets.conftest import OpenPage

ATTACK = "<img src=x onerror=alert(1)> \u202e&amp;"
MAIN = Lane("python", "main", "thread")
COPY = Lane("gpu 0", "stream 20", "stream", 0, 20)
COMPUTE = Lane("gpu 0", "stream 7", "stream", 0, 7)

# Scripts and styles of this page only: whatever else tried to load is refused. Playwright's waits need eval.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; style-src 'unsafe-inline'; img-src data:"

MODEL = """
const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
window.makeModel = (data, details, state) => {
  const listeners = new Map();
  const model = {
    sent: [], answers: details, data, state,
    get: (name) => model.state[name],
    set(name, value) { model.state[name] = value; model.emit("change:" + name); },
    save_changes() { model.sent.push({type: "save", state: structuredClone(model.state)}); },
    on(event, f) { listeners.set(event, [...(listeners.get(event) || []), f]); },
    off(event, f) { listeners.set(event, (listeners.get(event) || []).filter((g) => g !== f)); },
    emit(event, ...args) { for (const f of listeners.get(event) || []) f(...args); },
    count: () => [...listeners.values()].reduce((n, list) => n + list.length, 0),
    push() {
      if (!model.decoded) model.decoded = model.data.buffers.map(decode);
      model.emit("msg:custom", model.data.content, model.decoded);
    },
    send(content) {
      model.sent.push(content);
      if (content.type === "ready") setTimeout(() => model.push(), 0);
      const answer = content.type === "details" && model.answers[content.id];
      if (answer) setTimeout(() => model.emit("msg:custom", answer, []), 0);
    },
  };
  return model;
};
// anywidget hands each call an object of its own for the model.
const proxy = (model) => Object.fromEntries(
  ["get", "set", "save_changes", "on", "off", "send"].map((name) => [name, (...args) => model[name](...args)]));
"""


class Caught(Timeline):
    """A Timeline whose messages are kept instead of sent."""

    def send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        """Keep a message."""
        self.__dict__.setdefault("messages", []).append((content, buffers or []))


def small_trace(title: str = "run A", shift: int = 0, *, device: bool = True, modelled: bool = False) -> Trace:
    """A host thread with frames, operators, a step and a sync, two streams, a launch that owns three kernels."""
    builder = TraceBuilder()
    for step in range(4):
        at = step * 10_000 + (step * shift)
        builder.add(at, 9_000, f"mrv2lab.step#{step}", "annotation", MAIN)
        builder.add(at, 9_000, "engine.py(12): step", "python", MAIN)
        builder.add(at + 500, 4_000, "runner.py(88): execute_model", "python", MAIN)
        builder.add(at + 500, 4_000, "forward", "phase", MAIN)
        builder.add(at + 600, 3_000, "aten::linear", "op", MAIN)
        builder.add(
            at + 700, 300, "cudaGraphLaunch", "runtime", MAIN, correlation=100 + step, arg=builder.arg(b'{"cbid": 7}')
        )
        builder.add(at + 6_000, 2_000 + shift, "cudaEventSynchronize", "sync", MAIN)
        if device:
            for k in range(3):
                builder.add(at + 2_000 + k * 1_500, 1_400, f"kernel_{k}", "kernel", COMPUTE, correlation=100 + step)
            builder.add(
                at + 1_000, 700, "Memcpy HtoD", "memcpy", COPY, nbytes=4096, arg=builder.arg(b'{"bytes": 4096}')
            )
    builder.add(5_000, 100, ATTACK, "op", MAIN)
    return builder.build(
        TraceInfo("kineto", title, clock="unix", origin_ns=1_700_000_000_000_000_000, modelled=modelled)
    )


def random_trace(n: int, lanes: int = 30, names: int = 200, seed: int = 0, title: str = "random") -> Trace:
    """Overlapping slices of lognormal length on streams and threads; starts as large as an hour in ns."""
    rng = np.random.default_rng(seed)
    builder = TraceBuilder()
    kinds = np.array([KIND[kind] for kind in ("kernel", "memcpy", "memset", "graph", "collective")], np.uint8)
    ids = np.array([builder.name(f"void kernel_{i}<float, {i % 7}>(int)") for i in range(names)])
    places = np.array([builder.lane(Lane("gpu 0", f"stream {i}", "stream", 0, i)) for i in range(lanes)])
    span = 3 * n * 1000 // lanes
    lane = rng.integers(0, lanes, n)
    name = rng.integers(0, names, n)
    builder.extend(
        start=rng.integers(0, span, n) + 3_600_000_000_000,
        duration=rng.lognormal(np.log(2000), 0.8, n).astype(np.int64),
        name=ids[name],
        kind=kinds[name % len(kinds)],
        lane=places[lane],
    )
    return builder.build(TraceInfo("synthetic", title))


def page(timeline: Caught, *, views: int = 1, theme: str = "", module: str | None = None, pushed: bool = False) -> str:
    """The page as HTML: ``views`` views of one model. ``theme`` "lab-dark" sets JupyterLab's variables; ``pushed``: as
    after a reload, where the page has to ask for the data. ``module`` is a deliberately broken module text."""
    return pages([timeline], views=views, theme=theme, module=module, pushed=pushed)


def pages(
    timelines: list[Caught],
    *,
    views: int = 1,
    theme: str = "",
    module: str | None = None,
    pushed: bool = False,
) -> str:
    """As ``page``, with several models, each with its own evaluation of the module, as anywidget does."""
    models = [_model(timeline, pushed) for timeline in timelines]
    lab = ":root{--jp-layout-color1:#111;--jp-ui-font-color1:rgba(255,255,255,1);--jp-brand-color1:#64b5f6}"
    encoded = base64.b64encode((module or module_text()).encode()).decode()
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Timeline</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">
<style>:root{{color-scheme:light dark}}body{{margin:8px}}{lab if theme == "lab-dark" else ""}</style>
<style>{style_text()}</style></head>
<body><main><h1 style="font-size:14px">Harness</h1><h2 style="font-size:12px;margin:0">Output</h2>
<div id="out" class="mx-root"></div></main>
<script>{MODEL}
window.models = [];
window.cleanups = [];
window.started = [];
window.ready = (async () => {{
  const source = new TextDecoder().decode(Uint8Array.from(atob("{encoded}"), (c) => c.charCodeAt(0)));
  for (const [data, details, state] of [{",".join(models)}]) {{
    const url = URL.createObjectURL(new Blob([source], {{type: "text/javascript"}}));
    const widget = (await import(url)).default;
    const model = makeModel(data, details, state);
    models.push(model);
    window.model = models[0];
    started.push(widget.initialize({{model: proxy(model)}}));
    if (!state.pushed) model.push();
    model.show = () => {{
      const el = document.createElement("div");
      // As in JupyterLab, a view is made before it is on the page.
      cleanups.push(widget.render({{model: proxy(model), el}}));
      setTimeout(() => document.getElementById("out").append(el));
    }};
    for (let i = 0; i < {views}; i++) model.show();
  }}
}})();
</script></body></html>"""


def _model(timeline: Caught, pushed: bool) -> str:
    content, buffers = timeline.__dict__["messages"][0]
    data = {"content": content, "buffers": [base64.b64encode(buffer).decode() for buffer in buffers]}
    details = {}
    if len(timeline._slices) < 1000:
        for number in range(len(timeline._slices)):
            timeline._receive(timeline, {"type": "details", "id": number}, [])
            details[number] = timeline.__dict__["messages"][-1][0]
    names = ("selection_ns", "kinds", "hidden_lanes", "selected_slice", "channel")
    state = {name: getattr(timeline, name) for name in names} | {"pushed": pushed}
    return ", ".join(
        [
            "[" + json.dumps(data).replace("<", "\\u003c"),
            json.dumps(details).replace("<", "\\u003c"),
            json.dumps(state) + "]",
        ]
    )


def event_named(trace: Trace, name: str, which: int = 0) -> int:
    """Position of the ``which``-th event of that name."""
    return [i for i in range(len(trace)) if trace.name_of(i) == name][which]


def steps_frame(trace: Trace, numbers: range = range(4)) -> pd.DataFrame:
    """What ``trace.steps`` says, as far as the timeline needs it."""
    ranges = trace.mask("annotation")
    return pd.DataFrame(
        {
            "step": [f"step {number}" for number in numbers],
            "host_start_ns": trace.start[ranges],
            "host_end_ns": trace.end[ranges],
        }
    )


def two_runs() -> tuple[Trace, Trace, Caught]:
    """A and B with all that can lie over them."""
    a, b = small_trace(), small_trace("run B", 300, modelled=True)
    marks = pd.DataFrame(
        {"start_ns": [6000, 16_000], "end_ns": [8000, 18_000], "kind": ["sync", "hazard"], "label": ["barrier", ATTACK]}
    )
    difference = pd.DataFrame(
        {"start_ns": [0, 10_000], "end_ns": [9000, 19_000], "delta_ns": [-300, 900], "label": [ATTACK, "step 1"]}
    )
    steps = [steps_frame(a), steps_frame(b)]
    return a, b, Caught(a, b, steps=steps, marks=[marks, marks], difference=difference)


# -- looking at it from outside and inside


def changed(good: str, bad: str) -> str:
    """The module with one piece of its source changed."""
    module, good = module_text(), tight(good)
    assert module.count(good) == 1, good
    return module.replace(good, tight(bad))


INNER = "\nwindow.inner = { storeOf, packRows, shortened, view: (i = 0, m = 0) => [...storeOf(models[m]).views][i] };"
"""What these tests look at inside the module, which exports nothing but its two functions."""
STATE = "(name) => models[0].state[name]"
PAINTED = "performance.getEntriesByName('mrv2lab-timeline-first-paint').length >= {}"


def shown(open_page: OpenPage, html: str, views: int = 1, **options: Any) -> Any:
    """The page once every view is painted."""
    opened = open_page(html, **options)
    opened.wait_for_function(PAINTED.format(views))
    return opened


def inner(*timelines: Caught, module: str | None = None, **options: Any) -> str:
    """A page that lets tests look inside."""
    return pages(list(timelines), module=(module or module_text()) + INNER, **options)


def settle(opened: Any) -> None:
    """Until the next frame is drawn."""
    opened.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


def point(opened: Any, timeline: Caught, event: int, trace: int = 0) -> tuple[float, float]:
    """Where on the screen the middle of an event is."""
    number = timeline._slices.find(trace, event)
    box: list[float] = opened.evaluate(
        "(id) => { const v = inner.view(), b = v.boxOf(id), c = v.canvas.getBoundingClientRect();"
        "return [c.left + (b.left + b.right) / 2 / v.ratio, c.top + (b.y + b.height / 2) / v.ratio]; }",
        number,
    )
    return box[0], box[1]
