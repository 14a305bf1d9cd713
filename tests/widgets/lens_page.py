"""One self-contained page: the kernel lens's module with a fake anywidget model that answers as Python does."""

from __future__ import annotations

import base64
import json
from typing import Any

from mrv2lab.widgets.kernel_lens import KernelLens

# Scripts and styles of this page only: whatever else tried to load is refused.
POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'"
DARK = ":root{--jp-layout-color0:#111;--jp-layout-color1:#181818;--jp-layout-color2:#2a2a2a;--jp-layout-color3:#444;\
--jp-ui-font-color1:#eee;--jp-ui-font-color2:#bbb;--jp-content-font-color1:#eee;--jp-border-color1:#888;\
--jp-border-color2:#555;--jp-brand-color1:#64b5f6;--jp-mirror-editor-keyword-color:#7fd58c}body{background:#181818;color:#eee}"

SCRIPT = """
const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const listeners = new Map();
const model = {
  state: {call: 0, program: 0}, saved: 0,
  get: (name) => model.state[name],
  set(name, value) {
    if (model.state[name] === value) return;
    model.state[name] = value;
    model.emit("change:" + name);
    if (name === "call") model.answer();
  },
  save_changes: () => model.saved++,
  on: (event, f) => listeners.set(event, [...(listeners.get(event) || []), f]),
  off: (event, f) => listeners.set(event, (listeners.get(event) || []).filter((g) => g !== f)),
  emit(event, ...args) { for (const f of listeners.get(event) || []) f(...args); },
  count: () => [...listeners.values()].reduce((n, list) => n + list.length, 0),
  answer() {
    const [content, buffers] = MESSAGES[model.state.call] ?? [];
    if (content) model.emit("msg:custom", content, buffers.map(decode));
  },
  send: (content) => content.type === "ready" && setTimeout(model.answer),
};
window.model = model;
window.cleanups = [];
window.ready = (async () => {
  const widget = (await import(URL.createObjectURL(new Blob([MODULE], {type: "text/javascript"})))).default;
  window.show = () => {
    const el = document.createElement("div");
    document.getElementById("out").append(el);
    cleanups.push([widget.render({model, el}), el]);
  };
  for (let i = 0; i < VIEWS; i++) show();
})();
"""


def messages(widget: KernelLens) -> list[tuple[dict[str, Any], list[bytes]]]:
    """What the widget sends for each of its calls; one message if it has none."""
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))  # type: ignore[method-assign]
    widget._on_message(widget, {"type": "ready"}, [])
    for call in range(1, len(sent[0][0]["calls"])):
        widget.call = call
    return sent


def page(widget: KernelLens, views: int = 1, dark: bool = False, mutant: tuple[str, str] = ("", "")) -> str:
    """The page as HTML: ``views`` views of one model. ``mutant``: text of the module and what to put there instead."""
    coded = [
        (content, [base64.b64encode(buffer).decode() for buffer in buffers]) for content, buffers in messages(widget)
    ]
    data = {"MESSAGES": coded, "MODULE": str(widget._esm).replace(*mutant), "VIEWS": views}
    constants = "".join(
        f"const {name} = {json.dumps(value)};\n".replace("<", "\\u003c") for name, value in data.items()
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Kernel lens</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">
<style>body{{margin:8px}}{DARK if dark else ""}</style></head>
<body><main><h1 style="font-size:14px">Harness</h1><h2 style="font-size:12px">Output</h2><div id="out"></div></main>
<script>{constants}{SCRIPT}</script></body></html>"""
