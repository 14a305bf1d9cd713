// -- the explorer: toolbar, panels, keys, messages -------------------------------------------------------------------

/** Every panel: its id, title, class, and the phases at which it changes. */
const PANELS = [
  ["words", "Scheduler's decision", WordsPanel, ["schedule"]],
  ["timeline", "Phases of the step", TimelinePanel, []],
  ["rows", "Request rows", RowsPanel, ["update_states", "apply_writes", "postprocess"]],
  ["staged", "Staged diffs", StagedPanel, ["update_states", "apply_writes"]],
  ["gather", "Gather", GatherPanel, ["prepare_inputs", "gather"]],
  ["pages", "Block tables and KV pages", PagesPanel, ["gather", "forward"]],
  ["logits", "Logits and sampled tokens", LogitsPanel, ["logits", "sample", "copy_output", "wait_output"]],
];

const KEYS = [
  ["← →", "one step back, forward"], ["Home End", "first, last step"], ["[ ] or Shift+← →", "one phase back, forward"], ["Space", "play, pause"],
  ["↑ ↓ PageUp PageDown", "move inside a table or the pages"], ["Enter", "select what the cursor is on"], ["F", "follow the selected request, or let it go"],
  ["/", "filter by request"], ["N Shift+N", "live: next step, next phase"], ["Tab", "next panel or control"], ["Escape", "leave the field, the panel, the explorer"], ["?", "this help"],
];

class Explorer {
  constructor(model, el) {
    this.model = model;
    this.host = el;
    this.views = [];
    this.selection = {};
    this.stops = [];
    this.pending = false;
    this.listeners = [];
    this.build();
    for (const name of ["phase", "filter", "follow", "playing", "selection", "height"]) this.listen("change:" + name, () => this.own || this.pull());
    this.listen("msg:custom", (content, buffers) => this.receive(content, buffers || []));
    this.pull();
    this.send({ type: "ready" });
    this.late = setTimeout(() => {
      if (!this.views.length) this.say("No answer from Python yet: is the kernel running? Running the cell again brings the steps back.");
    }, 3000);
  }

  listen(event, callback) {
    this.model.on(event, callback);
    this.listeners.push([event, callback]);
  }

  send(message) { this.model.send(message); }

  destroy() {
    for (const [event, callback] of this.listeners) this.model.off(event, callback);
    for (const id of [this.late, this.timer, this.speaking, this.saving, this.waiting]) clearTimeout(id);
    for (const panel of this.panels) for (const body of panel.bodies) body.destroy?.();
    this.observer.disconnect();
    this.root.remove();
    this.views = [];
  }

  // -- what is on the page

  build() {
    const go = (delta) => () => this.go(this.index + delta);
    this.jump = h("input", { type: "number", min: 0, value: 0, "aria-label": "Step number, counted from 0", onchange: () => this.go(Number(this.jump.value)) });
    this.total = h("span", {}, "");
    this.playButton = button("▶", "Play", () => this.play());
    this.filterBox = h("input", { type: "search", placeholder: "request…", "aria-label": "Filter by request", oninput: () => this.set("filter", this.filterBox.value) });
    this.followBox = h("select", { "aria-label": "Follow a request", onchange: () => this.set("follow", this.followBox.value) });
    this.liveBox = h("span", { class: "mx-group", hidden: true },
      button("Next step", "Next step of the live engine", () => this.advance("step"), { class: "word" }), button("Next phase", "Next phase of the live engine", () => this.advance("phase"), { class: "word" }));
    this.phaseBox = h("div", { class: "mx-phases", role: "group", "aria-label": "Phase cursor" });
    this.helpButton = button("?", "Keys", () => this.help(), { "aria-expanded": "false" });
    this.badges = h("div", "mx-sources");
    this.status = h("p", { class: "mx-status", role: "status" });
    this.live = h("p", { class: "mx-hidden", "aria-live": "polite" });
    this.helpBox = h("section", { class: "mx-help", hidden: true, tabindex: -1, "aria-label": "Keys" }, h("dl", {}, ...KEYS.map(([key, text]) => h("div", {}, h("dt", {}, key), h("dd", {}, text)))));
    this.panels = [];
    this.grid = h("div", "mx-panels");
    this.root = h("div", { class: "mx-root", tabindex: 0, role: "group", "aria-label": "Step explorer. Press ? for keys.", "data-lm-suppress-shortcuts": "true" },
      h("div", "mx-toolbar",
        h("span", "mx-group", button("⇤", "First step", () => this.go(0)), button("←", "Previous step", go(-1)), this.playButton, button("→", "Following step", go(1)), button("⇥", "Last step", () => this.go(1e9))),
        h("span", "mx-group", h("label", {}, "step ", this.jump), this.total), this.liveBox,
        h("span", "mx-group", this.filterBox, this.followBox), this.helpButton),
      h("div", "mx-toolbar mx-second", button("‹", "Show the phase before", () => this.phase(-1)), this.phaseBox, button("›", "Show the phase after", () => this.phase(1))),
      this.helpBox, this.status, this.badges, this.grid, this.live);
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.host.append(this.root);
    this.width = 800;
    this.observer = new ResizeObserver(([entry]) => {
      const before = this.width;
      this.width = entry.contentRect.width;
      if (Math.abs(this.width - before) > 30) this.draw(); // which names fit the timeline
    });
    this.observer.observe(this.root);
  }

  /** The sections, with one body a source. Made anew only when the number of sources changes. */
  buildPanels(count) {
    for (const panel of this.panels) for (const body of panel.bodies) body.destroy?.();
    this.panels = PANELS.map(([id, title, Body, phases]) => {
      const label = `mx${nextId++}`;
      const bodies = Array.from({ length: count }, (_, side) => new Body(this, side));
      const hints = bodies.map(() => h("span", "mx-hint"));
      const empties = bodies.map(() => h("div", {}));
      const chip = h("span", "mx-chip");
      const section = h("section", { class: "mx-panel", "data-panel": id, "aria-labelledby": label },
        h("header", {}, h("h3", { id: label }, title), chip, ...(count === 1 ? hints : [])),
        h("div", "mx-sides", ...bodies.map((body, i) => h("div", "mx-side", ...(count > 1 ? [h("p", "mx-sidehead", "AB"[i] + " ", hints[i])] : []), body.el, empties[i]))));
      const panel = { id, bodies, hints, empties, chip, section, phases: new Set(phases) };
      for (const [on, off] of [["pointerenter", "pointerleave"], ["focusin", "focusout"]]) {
        section.addEventListener(on, () => this.light(panel.phases));
        section.addEventListener(off, () => this.light(new Set()));
      }
      return panel;
    });
    this.grid.replaceChildren(...this.panels.map((p) => p.section));
    this.root.classList.toggle("two", count > 1);
  }

  // -- messages

  receive(content, buffers) {
    if (content.type === "status") { this.pending = false; this.wanted = undefined; this.say(content.text); return; }
    if (content.type !== "views") return;
    this.pending = false;
    const start = performance.now();
    let next = 0;
    try {
      this.views = content.views.map((header) => new View(header, header.error ? [] : [buffers[next++], buffers[next++]]));
    } catch (error) {
      this.say(`This step's data could not be read: ${error}`);
      return;
    }
    this.index = content.index;
    this.count = content.count;
    if (this.wanted === this.index) this.wanted = undefined;
    if (this.panels.length === 0 || this.panels[0].bodies.length !== this.views.length) this.buildPanels(this.views.length);
    this.say(content.status || "");
    this.draw();
    this.speak();
    // A task behind the next frame: by then it is painted, which is what a person waits for.
    requestAnimationFrame(() => setTimeout(() => performance.measure("mrv2lab-redraw", { start, end: performance.now() })));
    this.schedule();
  }

  /** Ask Python; a kernel that was restarted does not know this explorer, and says nothing. */
  ask(content) {
    this.pending = true;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => { if (this.pending) this.say("No answer from the kernel yet. If it was restarted, run this cell again."); }, 4000);
    this.send(content);
  }

  say(text) { if (this.status.textContent !== text) this.status.textContent = text; }

  /** One sentence for screen readers, once the stepping has come to rest. */
  speak() {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => {
      this.live.textContent = this.views.map((view, i) => (this.views.length > 1 ? "AB"[i] + ": " : "") + (view.error
        || `Step ${view.index} of ${view.count}, phase ${this.stopName(view)}. ${plural(view.meta.batch.length, "request")}, ${plural(view.col("tokens.input_ids").length, "token")}. ${view.meta.words.slice(0, 3).map(visible).join(" ")}`)).join(" ");
    }, 400);
  }

  /** Take over the small state of the model: Python or another view of it may have changed it. */
  pull() {
    this.selection = this.model.get("selection") || {};
    this.follow = this.model.get("follow") || "";
    this.filter = (this.model.get("filter") || "").toLowerCase();
    this.root.style.maxHeight = this.model.get("height") ? this.model.get("height") + "px" : "";
    this.schedule();
    this.draw();
  }

  /** Write one name of that state. Not every host announces a view's own change to it, so it is drawn here. */
  set(name, value) {
    this.own = true;
    this.model.set(name, value);
    this.own = false;
    this.pull();
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.model.save_changes(), 60);
  }

  selectEntry(view, entry) { this.select({ kind: "request", request: view.names[entry.request], row: entry.row }); }

  select(selection) {
    if (selection.kind !== "phase" && selection.phase) this.showPhase(selection.phase);
    this.set("selection", selection);
  }

  // -- drawing: a pure function of the views and the small state

  draw() {
    const { model } = this;
    if (this.filterBox.value !== model.get("filter")) this.filterBox.value = model.get("filter") || "";
    const playing = Boolean(model.get("playing"));
    this.playButton.textContent = playing ? "❚❚" : "▶";
    this.playButton.setAttribute("aria-label", (this.playButton.title = playing ? "Pause" : "Play"));
    if (!this.views.length) return;
    this.jump.value = this.index;
    this.jump.max = this.count - 1;
    this.total.textContent = this.count ? `of 0–${this.count - 1}` : "none yet";
    this.liveBox.hidden = !this.views.some((view) => view.live);
    this.drawFollow();
    this.drawPhases();
    this.badges.replaceChildren(...this.views.map((view, i) => this.sourceLine(view, i)));
    this.panels.forEach((panel) => this.drawPanel(panel));
  }

  drawPanel(panel) {
    const now = new Set(this.views.filter((v) => !v.error).map((v) => this.litPhase(v)));
    let changes = false;
    panel.bodies.forEach((body, i) => {
      const view = this.views[i];
      const other = this.views.length > 1 ? this.views[1 - i] : null;
      panel.empties[i].replaceChildren(...(view.error ? [empty(view.error)] : []));
      body.el.hidden = Boolean(view.error);
      if (view.error) { panel.hints[i].textContent = ""; return; }
      let said;
      try {
        said = body.update(view, other && !other.error ? other : null);
      } catch (error) {
        said = empty(`This panel could not be drawn: ${error}`); // the others can
      }
      if (said instanceof Node) panel.empties[i].append(said);
      panel.hints[i].textContent = said instanceof Node ? "" : said;
      changes ||= panel.id === "rows" && view.meta.changes.some((c) => c.phase === this.litPhase(view));
    });
    const lit = changes || [...now].some((name) => panel.phases.has(name));
    panel.section.classList.toggle("lit", lit);
    panel.chip.textContent = lit ? "◆ " + [...now].join(", ") : "";
    panel.chip.title = lit ? "This panel changes in the phase the cursor is on" : "";
  }

  sourceLine(view, i) {
    const m = view.meta;
    const badge = (text, kind = "") => h("span", { class: "mx-badge " + kind }, text);
    const mode = m && (m.mode === "step" ? `step: paused after ${m.paused_after || "the step"}, read from the device (synchronised)` : "record: asynchronous, nothing was added");
    const line = h("div", "mx-source", h("strong", {}, (this.views.length > 1 ? "AB"[i] + "  " : "") + visible(view.title)));
    line.append(badge(view.live ? "● live" : "recorded", view.live ? "live" : ""));
    if (!m) return line;
    line.append(badge(mode, m.mode === "step" ? "step" : ""), badge([m.runner, m.device, m.backend, m.transfer].filter(Boolean).map(visible).join(" · ")));
    if (m.modelled) line.append(badge("device times modelled", "modelled"));
    if (m.checked) line.append(badge(m.checked.ok ? `✓ ${plural(m.checked.tables, "table")} checked against the device` : "✗ device checksum differs", m.checked.ok ? "" : "bad"));
    if (m.diverged) line.append(h("p", { class: "mx-bad", role: "alert" }, "✗ " + visible(m.diverged)));
    if (m.notes.length) line.append(h("p", "mx-note", m.notes.map(visible).join(" ")));
    return line;
  }

  drawFollow() {
    const names = [...new Set(this.views.flatMap((v) => (v.error ? [] : v.names)))].sort();
    if (this.follow && !names.includes(this.follow)) names.push(this.follow);
    const key = names.join("\n");
    if (key !== this.followKey) {
      this.followKey = key;
      this.followBox.replaceChildren(h("option", { value: "" }, "follow…"), ...names.slice(0, 2000).map((name) => h("option", { value: name }, visible(name))));
    }
    this.followBox.value = this.follow;
  }

  /** The stops of every source in one order: a stop that one lacks comes behind its predecessor. */
  drawPhases() {
    const stops = [];
    for (const view of this.views) {
      if (view.error) continue;
      let at = -1;
      for (const name of view.stops) {
        if (stops.includes(name)) at = stops.indexOf(name); else stops.splice(++at, 0, name);
      }
    }
    this.stops = stops;
    const counts = new Map();
    for (const view of this.views) for (const c of view.error ? [] : view.meta.changes) counts.set(c.phase, (counts.get(c.phase) || 0) + 1);
    const now = this.phaseName();
    this.phaseBox.replaceChildren(...stops.map((name) => h("button", {
      type: "button", class: name === now ? "now" : "", "aria-pressed": String(name === now), "data-phase": name, onclick: () => this.goPhase(name),
      title: counts.get(name) ? plural(counts.get(name), "cell") + " changed" : "no row changed",
    }, visible(name), ...(counts.get(name) ? [h("span", "n", String(counts.get(name)))] : []))));
  }

  // -- the phase cursor

  /** Cursor stop, common to the sources: "" and unknown names mean the last. */
  phaseName() {
    const name = this.model.get("phase");
    return this.stops.includes(name) ? name : this.stops[this.stops.length - 1] || "";
  }

  /** Stop of one view: the cursor's, or the nearest before it in the common order. */
  stop(view) {
    for (let i = this.stops.indexOf(this.phaseName()); i >= 0; i--) {
      if (view.stopOf.has(this.stops[i])) return view.stopOf.get(this.stops[i]);
    }
    return Math.max(view.stops.length - 1, 0);
  }

  stopName(view) { return view.stops[this.stop(view)] || "before"; }

  litPhase(view) { return this.selection.kind === "phase" ? this.selection.phase : this.stopName(view); }

  phase(delta) {
    const at = Math.max(0, Math.min(this.stops.indexOf(this.phaseName()) + delta, this.stops.length - 1));
    if (this.stops[at]) this.goPhase(this.stops[at]);
  }

  /** Put the cursor on a phase; one at which nothing changes shows the state of the last stop before it. */
  goPhase(name) {
    this.showPhase(name);
    this.set("selection", { kind: "phase", phase: name });
    this.speak();
  }

  showPhase(name) {
    if (!this.stops.includes(name)) {
      const view = this.views.find((v) => !v.error);
      const order = view ? view.meta.spans.map((span) => phaseOf(span.name)) : [];
      const before = order.slice(0, Math.max(order.indexOf(name), 0)).filter((n) => this.stops.includes(n));
      name = before[before.length - 1] || this.stops[0] || "";
    }
    this.set("phase", name === this.stops[this.stops.length - 1] ? "" : name);
  }

  /** Outline what belongs to a hovered or focused panel, without a redraw. */
  light(phases) {
    for (const b of this.phaseBox.children) b.classList.toggle("lit", phases.has(b.dataset.phase));
    for (const panel of this.panels) if (panel.id === "timeline") panel.bodies.forEach((body) => body.light(phases));
  }

  matches(name) { return !this.filter || name.toLowerCase().includes(this.filter); }

  // -- steps

  /** Ask for a step. While an answer is on its way only the last wish is kept: a held key never queues up. */
  go(index) {
    if (!Number.isInteger(index) || !this.count) return;
    if (index >= this.count && this.views.some((v) => v.live)) {
      // The engine may have gone on without us: Python knows which step is the last.
      if (!this.pending) { this.wanted = undefined; this.ask({ type: "goto", index }); }
      return;
    }
    this.wanted = Math.max(0, Math.min(index, this.count - 1));
    if (!this.pending && this.wanted !== this.index) this.ask({ type: "goto", index: this.wanted });
  }

  advance(unit) {
    if (!this.views.some((v) => v.live) || this.pending) return;
    this.wanted = undefined;
    this.ask({ type: "advance", source: null, unit });
  }

  play() { this.set("playing", !this.model.get("playing")); }

  /** After an answer: fulfil the last wish, or set the clock for the next step of a play. */
  schedule() {
    clearTimeout(this.timer);
    if (!this.pending && this.wanted !== undefined && this.wanted !== this.index) return this.go(this.wanted);
    if (!this.model.get("playing") || !this.count) return;
    this.timer = setTimeout(() => {
      if (this.index + 1 < this.count) this.go(this.index + 1); else this.set("playing", false);
    }, 700);
  }

  // -- keys

  help() {
    this.helpBox.hidden = !this.helpBox.hidden;
    this.helpButton.setAttribute("aria-expanded", String(!this.helpBox.hidden));
    (this.helpBox.hidden ? this.helpButton : this.helpBox).focus();
  }

  followSelected() {
    const name = this.selection.request || "";
    if (!name && !this.follow) return this.say("Select a request first (Enter on its row), then F follows it.");
    this.set("follow", this.follow === name || !name ? "" : name);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const typing = event.target.matches("input, select");
    const onButton = event.target.matches("button, summary, input");
    const act = {
      ArrowLeft: () => (event.shiftKey ? this.phase(-1) : this.go((this.wanted ?? this.index) - 1)),
      ArrowRight: () => (event.shiftKey ? this.phase(1) : this.go((this.wanted ?? this.index) + 1)),
      "[": () => this.phase(-1), "]": () => this.phase(1), Home: () => this.go(0), End: () => this.go(1e9),
      f: () => this.followSelected(), F: () => this.followSelected(), "/": () => this.filterBox.focus(), "?": () => this.help(),
      n: () => this.advance("step"), N: () => this.advance("phase"), " ": onButton ? null : () => this.play(),
    }[event.key];
    if (event.key === "Escape") this.leave(event.target);
    else if (typing || !act) { if (typing) event.stopPropagation(); return; } else act();
    event.preventDefault();
    event.stopPropagation();
  }

  /** Escape goes one level out: help, field or panel, then the explorer itself. */
  leave(target) {
    if (!this.helpBox.hidden) this.help();
    else if (target !== this.root) this.root.focus({ preventScroll: true });
    else this.root.blur();
  }
}

export default {
  /** @param {{model: any, el: HTMLElement}} context one view of one model; @returns its clean-up */
  render({ model, el }) {
    const explorer = new Explorer(model, el);
    return () => explorer.destroy();
  },
};
