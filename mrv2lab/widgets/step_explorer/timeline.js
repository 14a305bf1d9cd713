// -- (f) the phases of the step on a time axis -------------------------------------------------------------------------

const LANE = 20; // px
const WAITS = new Set(["synchronize", "implicit_sync", "queue_full"]);
const phaseOf = (name) => name.split("/")[0];

class TimelinePanel {
  constructor(app) {
    this.app = app;
    this.id = "mx" + nextId++;
    this.labels = h("div", { class: "mx-lane-labels", "aria-hidden": "true" });
    this.plot = h("div", "mx-plot");
    this.note = h("p", "mx-note");
    this.marks = new Grid("Marks: every pass through a chokepoint", { rows: 6, onactive: (i) => this.pick(i), onpick: (i) => this.pick(i, true) });
    this.spans = new Grid("Spans of the host", { rows: 6, onpick: (i) => app.goPhase(phaseOf(this.view.meta.spans[i].name)) });
    this.detail = h("p", "mx-detail");
    this.el = h("div", {}, h("div", "mx-time", this.labels, this.plot), this.note,
      h("details", {}, h("summary", {}, "Marks and spans as tables"), this.marks.el, this.spans.el), this.detail);
  }

  pick(i, chosen = false) {
    const mark = this.list[i];
    if (!mark) return;
    this.chosen = mark;
    this.detail.textContent = this.describe(mark);
    if (chosen) this.app.select({ kind: "mark", mark: this.view.meta.marks.indexOf(mark), name: mark.name, phase: mark.phase });
    else this.drawPlot();
  }

  describe(m) {
    const device = m.device_end == null ? ""
      : `; on the device ${formatTime(m.device_start)} to ${formatTime(m.device_end)}${this.view.meta.modelled ? " (modelled)" : ""}`;
    return visible(`${m.kind} ${m.name} in ${m.phase || "no phase"}${m.stream ? `, stream ${m.stream}` : ""}${m.added ? ", the recorder's own" : ""}: ${formatBytes(m.nbytes)}`
      + (m.reads.length ? `; reads ${m.reads.join(", ")}` : "") + (m.writes.length ? `; writes ${m.writes.join(", ")}` : "")
      + `; called at ${formatTime(m.time)}` + (m.wait ? `, the host waited ${formatTime(m.wait)}` : "") + device + (m.site ? `; at ${m.site}` : ""));
  }

  update(view) {
    this.view = view;
    const { marks, spans } = view.meta;
    this.list = marks;
    const picked = this.app.selection.kind === "mark" ? this.app.selection.mark : -1;
    this.marks.set({
      columns: [col("kind", 13), col("name", 22, true), col("phase", 17), num("called", 10),
        num("device", 10, "time on the device"), num("bytes", 11), num("wait", 10)],
      count: marks.length,
      active: picked >= 0 ? picked : this.marks.active,
      row: (i) => {
        const m = marks[i];
        return [m.kind, { t: visible(m.name) + (m.added ? " (recorder)" : ""), c: m.added ? "mute" : "" }, m.phase, formatTime(m.time), m.device_end != null ? formatTime(m.device_end - m.device_start) : "–",
          formatBytes(m.nbytes), WAITS.has(m.kind) || m.wait ? { t: formatTime(m.wait), c: "wait" } : ""];
      },
    });
    this.chosen = marks[this.marks.active];
    this.detail.textContent = this.chosen ? this.describe(this.chosen) : "";
    this.spans.set({
      columns: [col("span", 24, true), ...["starts", "takes", "device done"].map((title) => num(title, 14))],
      count: spans.length,
      row: (i) => [{ t: "  ".repeat(spans[i].depth) + spans[i].name, c: spans[i].added ? "mute" : "" }, formatTime(spans[i].start), formatTime(spans[i].end - spans[i].start), formatTime(spans[i].device_end)],
    });
    this.drawPlot();
    if (!spans.length && !marks.length) return empty("No times: this source kept no spans and no marks.");
    const waits = marks.filter((m) => WAITS.has(m.kind));
    return `${plural(spans.filter((x) => !x.depth).length, "phase")}, ${plural(marks.length, "mark")}, ${plural(waits.length, "wait")}`;
  }

  drawPlot() {
    const { view } = this;
    const { marks, spans, modelled, gap, device_phases: whole } = view.meta;
    const timed = whole.length ? whole : marks.filter((m) => m.device_end != null && m.device_end >= m.device_start);
    const streams = [...new Set(timed.map((m) => m.stream))].sort();
    const depth = Math.max(0, ...spans.map((x) => x.depth));
    const end = Math.max(1, ...spans.map((x) => x.end), ...marks.map((m) => m.time), ...timed.map((m) => m.device_end));
    const start = Math.min(0, ...spans.map((x) => x.start), ...marks.map((m) => m.time - m.wait));
    // The output is settled a turn later, and a reader's pause in between is no part of the step.
    const fold = (us) => (gap && us > gap.at ? Math.max(gap.at, us - gap.hidden) : us);
    const x = (us) => (100 * (fold(us) - start)) / (fold(end) - start);
    const lanes = [...Array.from({ length: depth + 1 }, (_, d) => (d ? "" : "host")), "calls", ...streams.map((name) => `${name || "device"}${modelled ? " *" : ""}`)];
    this.labels.replaceChildren(...lanes.map((name) => h("span", {}, name)));
    if (!spans.length && !marks.length) return this.plot.replaceChildren();
    const room = this.app.width / this.app.views.length - 150;
    const hatch = this.id + "-h";
    const svg = s("svg", { width: "100%", height: lanes.length * LANE + 16, role: "img", "aria-labelledby": `${this.id}-t ${this.id}-d` },
      s("title", { id: this.id + "-t" }, "Timeline of the step"),
      s("desc", { id: this.id + "-d" }, `${plural(spans.length, "span")} on the host, ${plural(timed.length, "piece")} of device work; the tables below say the same.`),
      s("defs", {}, s("pattern", { id: hatch, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("line", { x1: 0, y1: 0, x2: 0, y2: 5, class: "hatch" }))));
    const pct = (value) => value.toFixed(3) + "%";
    const last = gap ? gap.at : end;
    const tick = niceStep((last - start) / 5);
    if (gap) svg.append(s("text", { x: pct(x(gap.at)), y: lanes.length * LANE + 12, class: "axis" }, `… ${formatTime(gap.hidden)} later`));
    for (let us = Math.ceil(start / tick) * tick; us <= last - (gap ? tick / 2 : 0); us += tick) {
      svg.append(s("line", { x1: pct(x(us)), x2: pct(x(us)), y1: 0, y2: lanes.length * LANE, class: "tick" }),
        s("text", { x: pct(x(us)), y: lanes.length * LANE + 12, class: "axis", "text-anchor": x(us) > 92 ? "end" : x(us) < 3 ? "start" : "middle" }, us ? formatTime(us) : "0"));
    }
    const lit = this.app.litPhase(view);
    spans.forEach((span, i) => {
      const width = Math.max(x(span.end) - x(span.start), 0.15);
      const phase = phaseOf(span.name);
      const box = s("svg", { x: pct(x(span.start)), y: span.depth * LANE + 1, width: pct(width), height: LANE - 2, class: "span" + (phase === lit ? " now" : "") + (span.added ? " added" : ""), "data-phase": phase },
        s("title", {}, `${span.name}: ${formatTime(span.end - span.start)}${span.added ? ", the recorder's own" : ""}`), s("rect", { width: "100%", height: "100%", class: "d" + (i % 2) }));
      if ((width * room) / 100 > span.name.length * 6.7 + 8) box.append(s("text", { x: 4, y: 13 }, span.name));
      box.addEventListener("click", () => this.app.goPhase(phase));
      svg.append(box);
    });
    const top = (depth + 1) * LANE;
    // One path a kind of drawing, not an element a mark: a step may have hundreds.
    svg.append(...marks.filter((m) => WAITS.has(m.kind) || m.wait > 0).flatMap((m) => {
      const width = pct(Math.max(x(m.time) - x(m.time - m.wait), 0.6));
      const left = pct(x(m.time - m.wait));
      return [s("rect", { x: left, y: top + 2, width, height: LANE - 4, class: "waitbox" }), s("rect", { x: left, y: top + 2, width, height: LANE - 4, fill: `url(#${hatch})` }), s("text", { x: left, y: top + 14, dx: 2, class: "w" }, "W")];
    }));
    for (const m of marks) svg.append(s("line", { x1: pct(x(m.time)), x2: pct(x(m.time)), y1: top + 4, y2: top + LANE - 4, class: "mark" + (m === this.chosen ? " chosen" : "") + (m.added ? " added" : "") }));
    timed.forEach((m, i) => svg.append(s("rect", {
      x: pct(x(m.device_start)), width: pct(Math.max(x(m.device_end) - x(m.device_start), 0.1)), y: top + LANE * (1 + streams.indexOf(m.stream)) + 2, height: LANE - 4,
      class: "dev" + (m === this.chosen ? " chosen" : "") + (m.added ? " added" : "") + (phaseOf(m.phase) === lit ? " now" : "") + (i % 2 ? " odd" : ""),
    })));
    svg.addEventListener("click", (event) => this.hit(event, svg, top, streams, timed, (us) => x(us) / 100));
    this.plot.replaceChildren(svg);
    this.note.textContent = whole.length ? "Device times were stamped at the ends of phases." : timed.length ? (modelled ? "* modelled: device times come from a cost model, not from a device." : "")
      : view.meta.notes.find((n) => /device time/i.test(n)) || "Device times are not known for this step.";
    this.note.hidden = !this.note.textContent;
  }

  /** A click below the spans selects the nearest mark of that lane. */
  hit(event, svg, top, streams, timed, x) {
    const box = svg.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top - top) / LANE);
    if (lane < 0 || lane > streams.length) return;
    const at = (event.clientX - box.left) / box.width;
    const far = (m) => (lane ? Math.max(x(m.device_start) - at, at - x(m.device_end), 0) : Math.abs(x(m.time) - at));
    const near = (lane ? timed.filter((m) => m.stream === streams[lane - 1]) : this.list).reduce((best, m) => (!best || far(m) < far(best) ? m : best), null);
    if (near && near.kind === "phase") this.app.goPhase(near.phase);
    else if (near) this.marks.activate(this.list.indexOf(near), true);
  }

  light(phases) {
    for (const box of this.plot.querySelectorAll("[data-phase]")) box.classList.toggle("lit", phases.has(box.dataset.phase));
  }
}

/** 1, 2 or 5 times a power of ten, not below `raw`. */
function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * ([1, 2, 5].find((k) => k * power >= raw) || 10);
}
