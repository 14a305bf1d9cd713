"""One self-contained page: the explorer's module with a fake anywidget model that answers as Python does.

The messages are made by the widget itself: a ``StepExplorer`` whose ``send`` is caught.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from mrv2lab.recording.source import StepSource
from mrv2lab.widgets.step_explorer.assets import module_text, style_text
from mrv2lab.widgets.step_explorer.message import encode
from mrv2lab.widgets.step_explorer.widget import look_at

# Scripts and styles of this page only: whatever else tried to load is refused. Playwright's waits need eval.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; style-src 'unsafe-inline'; img-src data:"

MODEL = """
const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
window.makeModel = (messages, state) => {
  const listeners = new Map();
  const model = {
    sent: [], delay: 0,
    state: {index: 0, follow: "", filter: "", phase: "", playing: false, height: 0, selection: {}, ...state},
    get: (name) => model.state[name],
    set(name, value) { model.state[name] = value; model.emit("change:" + name); },
    save_changes() { model.sent.push({type: "save", state: structuredClone(model.state)}); },
    on(event, f) { listeners.set(event, [...(listeners.get(event) || []), f]); },
    off(event, f) { listeners.set(event, (listeners.get(event) || []).filter((g) => g !== f)); },
    emit(event, ...args) { for (const f of listeners.get(event) || []) f(...args); },
    count: () => [...listeners.values()].reduce((n, list) => n + list.length, 0),
    reply(index) {
      const message = messages[index];
      if (!message) return model.emit("msg:custom", {type: "status", text: `index ${index} is no step`}, []);
      model.state.index = index;
      if (!message.decoded) message.decoded = message.buffers.map(decode);
      model.emit("msg:custom", message.content, message.decoded);
    },
    send(content) {
      model.sent.push(content);
      if (content.type === "ready") setTimeout(() => model.reply(model.state.index), model.delay);
      const last = messages.length - 1;
      if (content.type === "goto") setTimeout(() => model.reply(Math.min(content.index, last)), model.delay);
      const status = {type: "status", text: "Nothing to do: no request is waiting or running."};
      if (content.type === "advance") setTimeout(() => model.emit("msg:custom", status, []), 0);
    },
  };
  return model;
};
"""


def messages(sources: Iterable[StepSource], indices: Iterable[int]) -> list[dict[str, Any]]:
    """The ``views`` message of each index, buffers as base64."""
    made = []
    for index in indices:
        content, buffers = encode(index, [look_at(source, index) for source in sources])
        made.append({"content": content, "buffers": [base64.b64encode(b).decode() for b in buffers]})
    return made


def page(
    *sources: StepSource,
    state: dict[str, Any] | None = None,
    views: int = 1,
    theme: str = "",
    module: str | None = None,
) -> str:
    """The page as HTML: ``views`` views of one model. ``theme`` "lab-dark" sets JupyterLab's variables.

    ``module`` is a deliberately broken module text, for tests that must fail on it.
    """
    count = max(len(source) for source in sources)
    data = json.dumps(messages(list(sources), range(max(count, 1)))).replace("<", "\\u003c")
    lab = ":root{--jp-layout-color1:#111;--jp-ui-font-color1:rgba(255,255,255,1);--jp-brand-color1:#64b5f6}"
    encoded = base64.b64encode((module or module_text()).encode()).decode()
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Step explorer</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">
<style>:root{{color-scheme:light dark}}body{{margin:8px}}{lab if theme == "lab-dark" else ""}</style>
<style>{style_text()}</style></head>
<body><main><h1 style="font-size:14px">Harness</h1><h2 style="font-size:12px;margin:0">Output</h2>
<div id="out"></div></main>
<script>{MODEL}
window.ready = (async () => {{
  const source = new TextDecoder().decode(Uint8Array.from(atob("{encoded}"), (c) => c.charCodeAt(0)));
  const widget = (await import(URL.createObjectURL(new Blob([source], {{type: "text/javascript"}})))).default;
  window.model = makeModel({data}, {json.dumps(state or {})});
  window.cleanups = [];
  window.show = () => {{
    const el = document.createElement("div");
    document.getElementById("out").append(el);
    cleanups.push(widget.render({{model, el}}));
  }};
  for (let i = 0; i < {views}; i++) show();
}})();
</script></body></html>"""
