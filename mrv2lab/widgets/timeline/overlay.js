// -- overlay: what lies over the pixels: names, marks, arrows, cursor, selection; and the rulers above ----------------

const FONT = "ui-monospace, Menlo, Consolas, \"DejaVu Sans Mono\", monospace";
// Heights of the rulers, CSS pixels
const DIFFERENCE = 40, STEPS = 18, TIME = 20;
const MARKS = { sync: ["S", "#d55e00"], hazard: ["!", "#cc79a7"] };

/** "sync: barrier, 157 µs" */
const markText = ([start, end, kind, label]) => `${kind}: ${visible(label)}, ${timeText(end - start)}`;

/** Draws one view in device pixels; `r` is their number in a CSS pixel. */
class Overlay {
  constructor(view) { this.view = view; }

  font(ctx, size, weight = "") {
    ctx.font = `${weight} ${size * this.view.ratio}px ${FONT}`;
    ctx.textBaseline = "middle";
  }

  draw(ctx, labels, rowHeight) {
    const { view } = this;
    this.lines(ctx);
    this.names(ctx, labels, rowHeight);
    for (const place of view.layout.places) if (place.lane.empty) this.reason(ctx, place);
    this.marks(ctx);
    this.range(ctx);
    this.chosen(ctx);
    this.cursor(ctx);
  }

  /** Boundaries of steps, where they are not too dense. */
  lines(ctx) {
    const { view } = this;
    const r = view.ratio, axis = view.axis;
    ctx.fillStyle = view.palette.soft;
    ctx.globalAlpha = 0.4;
    view.data.steps.forEach((steps, trace) => {
      const inSight = this.inSight(steps);
      if (this.sparse(inSight)) for (const [, start] of inSight) this.line(ctx, round(axis.x(start) * r), 0, ctx.canvas.height, trace);
    });
    ctx.globalAlpha = 1;
  }

  inSight(steps) { return steps.filter(([, start, end]) => end >= this.view.axis.start && start <= this.view.axis.end); }

  sparse(steps) { return steps.length <= this.view.axis.width / 12; }

  /** Upright, whole for A and dashed for B. */
  line(ctx, x, top, bottom, trace) {
    const r = this.view.ratio, dash = trace ? 5 * r : bottom;
    for (let y = top; y < bottom; y += 2 * dash) ctx.fillRect(x, y, r, min(dash, bottom - y));
  }

  names(ctx, labels, rowHeight) {
    const { view } = this;
    const { data, tone, palette, ratio: r } = view;
    this.font(ctx, min(11, rowHeight / r - 3));
    const width = ctx.measureText("0").width;
    for (let i = 0; i < labels.length; i += 4) {
      const [left, right, y, p] = [labels[i], labels[i + 1], labels[i + 2], labels[i + 3]];
      const room = floor((right - left - 4 * r) / width);
      if (room < 1) continue;
      const look = palette.tones[tone[p]];
      const name = data.nameOf(p);
      ctx.fillStyle = look.ink;
      ctx.fillText(shortened(name, room) || look.letter, left + 3 * r, y + rowHeight / 2);
    }
  }

  reason(ctx, { lane, top, height }) {
    const r = this.view.ratio;
    this.font(ctx, 11, "italic");
    ctx.fillStyle = this.view.palette.soft;
    ctx.fillText(lane.empty, 8 * r, (top - this.view.scroll + height / 2) * r);
  }

  /** A mark is a bar under its lane and a glyph with a letter; glyphs that would cover each other are left out. */
  marks(ctx) {
    const { view } = this;
    const { axis, ratio: r } = view;
    const lastX = new Map();
    this.font(ctx, 9, "bold");
    ctx.textAlign = "center";
    for (const [start, end, kind, , lane] of view.data.marks) {
      const place = end >= axis.start && start <= axis.end && view.layout.place(lane);
      if (!place) continue;
      const [letter, hue] = MARKS[kind];
      const x = axis.x(start) * r, y = (place.top - view.scroll) * r;
      ctx.fillStyle = hue;
      ctx.fillRect(x, y + (place.height - 1) * r, max((axis.x(end) - axis.x(start)) * r, r), 3 * r);
      if (x - (lastX.get(lane) ?? -1e9) < 13 * r) continue;
      lastX.set(lane, x);
      ctx.beginPath();
      if (kind === "hazard") { ctx.moveTo(x - 7 * r, y + 12 * r); ctx.lineTo(x, y - r); ctx.lineTo(x + 7 * r, y + 12 * r); } else ctx.rect(x - 6 * r, y, 12 * r, 12 * r);
      ctx.closePath();
      ctx.fill();
      ctx.strokeStyle = view.palette.bg;
      ctx.lineWidth = r;
      ctx.stroke();
      ctx.fillStyle = "#000";
      ctx.fillText(letter, x, y + 7 * r);
    }
    ctx.textAlign = "left";
  }

  range(ctx) {
    const { view } = this;
    const { axis, ratio: r } = view;
    const range = view.range || view.selection;
    if (!range) return;
    const [a, b] = [axis.x(range[0]) * r, axis.x(range[1]) * r];
    ctx.fillStyle = view.palette.accent;
    ctx.globalAlpha = 0.16;
    ctx.fillRect(a, 0, max(b - a, r), ctx.canvas.height);
    ctx.globalAlpha = 1;
    for (const x of [a, b]) ctx.fillRect(round(x) - r / 2, 0, r, ctx.canvas.height);
  }

  /** Text in a box, within the picture. */
  tag(ctx, text, x, y) {
    const r = this.view.ratio;
    this.font(ctx, 11, "bold");
    const width = ctx.measureText(text).width + 8 * r;
    const left = clamp(x - width / 2, 0, ctx.canvas.width - width);
    ctx.fillStyle = this.view.palette.bg;
    ctx.strokeStyle = this.view.palette.accent;
    ctx.lineWidth = r;
    ctx.fillRect(left, y - 8 * r, width, 16 * r);
    ctx.strokeRect(left, y - 8 * r, width, 16 * r);
    ctx.fillStyle = this.view.palette.fg;
    ctx.fillText(text, left + 4 * r, y);
  }

  /** Outline of the selected slice, and arrows from a launch to its device work. */
  chosen(ctx) {
    const { view } = this;
    const r = view.ratio;
    const box = view.selected >= 0 && view.boxOf(view.selected);
    if (!box) return;
    const details = view.data.details.get(view.selected);
    if (details) {
      const from = details.launch >= 0 ? view.boxOf(details.launch) : box;
      const to = details.launch >= 0 ? [box] : details.work.map((id) => view.boxOf(id)).filter(Boolean);
      if (from) for (const one of to) this.arrow(ctx, from.left, from.y + from.height / 2, one.left, one.y + one.height / 2);
    }
    for (const [color, grow] of [[view.palette.bg, 2.5], [view.palette.fg, 1]]) {
      ctx.strokeStyle = color;
      ctx.lineWidth = 2 * r;
      ctx.strokeRect(box.left - grow * r, box.y - grow * r, max(box.right - box.left, r) + 2 * grow * r, box.height + 2 * grow * r);
    }
  }

  arrow(ctx, x0, y0, x1, y1) {
    const r = this.view.ratio;
    const bend = max(abs(x1 - x0) / 2, 24 * r);
    for (const [color, width] of [[this.view.palette.bg, 4], [this.view.palette.fg, 1.5]]) {
      ctx.strokeStyle = ctx.fillStyle = color;
      ctx.lineWidth = width * r;
      ctx.beginPath();
      ctx.moveTo(x0, y0);
      ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 6 * r, y1);
      ctx.stroke();
    }
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x1 - 8 * r, y1 - 4 * r);
    ctx.lineTo(x1 - 8 * r, y1 + 4 * r);
    ctx.fill();
  }

  cursor(ctx) {
    const { view } = this;
    const r = view.ratio;
    if (!view.focused && !view.anchored) return;
    const x = round(view.axis.x(view.cursor) * r);
    ctx.fillStyle = view.palette.fg;
    for (let y = 0; y < ctx.canvas.height; y += 8 * r) ctx.fillRect(x, y, r, 4 * r);
    const place = view.layout.place(view.cursorLane);
    if (place) {
      ctx.strokeStyle = view.palette.accent;
      ctx.lineWidth = 2 * r;
      ctx.strokeRect(r, (place.top - view.scroll - 1) * r, ctx.canvas.width - 2 * r, (place.height + 2) * r);
    }
    if (view.anchored) this.tag(ctx, "Δ " + signedText(view.cursor - view.anchor), x, ctx.canvas.height - 10 * r);
  }

  // -- rulers

  /** Heights of the rulers, and what stands beside them. */
  rulers() {
    const { data } = this.view;
    const list = data.difference.length ? [["B minus A\n▲ orange: B slower\n▼ blue: B faster", DIFFERENCE]] : [];
    data.steps.forEach((steps, trace) => { if (steps.length) list.push([data.chip(trace) + "steps", STEPS]); });
    return [...list, ["time", TIME]];
  }

  drawRulers(ctx) {
    const { view } = this;
    const r = view.ratio;
    ctx.fillStyle = view.palette.bg;
    ctx.fillRect(0, 0, ctx.canvas.width, ctx.canvas.height);
    let y = 0;
    if (view.data.difference.length) { this.difference(ctx, y); y += DIFFERENCE * r; }
    view.data.steps.forEach((steps, trace) => { if (steps.length) { this.steps(ctx, steps, trace, y); y += STEPS * r; } });
    this.time(ctx, y);
    const range = view.range || view.selection, { axis } = view;
    if (!range || range[1] < axis.start || range[0] > axis.end) return;
    const [a, b] = range.map((moment) => clamp(axis.x(moment), 0, axis.width) * r);
    this.tag(ctx, timeText(range[1] - range[0]), (a + b) / 2, y + 10 * r);
  }

  /** Bars up where B took longer, down where it took less; the sign says it too. */
  difference(ctx, y) {
    const { view } = this;
    const { axis, ratio: r } = view;
    const most = (this.most ||= max(...view.data.difference.map((row) => abs(row[2])), 1));
    const middle = y + (DIFFERENCE / 2) * r;
    ctx.fillStyle = view.palette.soft;
    ctx.fillRect(0, middle, ctx.canvas.width, r);
    this.font(ctx, 10);
    for (const [start, end, delta] of view.data.difference) {
      if (end < axis.start || start > axis.end) continue;
      const x = axis.x(start) * r, width = max((axis.x(end) - axis.x(start)) * r - r, r);
      const height = max((abs(delta) / most) * (DIFFERENCE / 2 - 2) * r, r);
      ctx.fillStyle = delta > 0 ? "#d55e00" : "#0072b2";
      ctx.fillRect(x, delta > 0 ? middle - height : middle, width, height);
      const text = signedText(delta);
      if (width < ctx.measureText(text).width + 6 * r) continue;
      ctx.fillStyle = view.palette.fg;
      ctx.fillText(text, max(x, 0) + 3 * r, delta > 0 ? middle + 9 * r : middle - 8 * r);
    }
  }

  steps(ctx, steps, trace, y) {
    const { view } = this;
    const { axis, ratio: r } = view;
    this.font(ctx, 10);
    const char = ctx.measureText("0").width;
    let last = -Infinity;
    const inSight = this.inSight(steps), bottom = this.sparse(inSight) ? ctx.canvas.height - TIME * r : y + 15 * r;
    for (const [label, start, end] of inSight) {
      const x = max(axis.x(start), -2) * r, right = min(axis.x(end), axis.width + 2) * r;
      // One bracket a pixel is enough
      if (x < last) continue;
      last = x + r;
      ctx.fillStyle = view.palette.soft;
      this.line(ctx, round(x), y + 3 * r, bottom, trace);
      ctx.fillRect(x, y + 3 * r, max(right - x - r, r), r);
      ctx.fillStyle = view.palette.fg;
      const chip = view.data.chip(trace), room = floor((right - x - 6 * r) / char);
      const name = visible(label), beside = shortened(name, room - chip.length);
      ctx.fillText(beside ? chip + beside : shortened(name, room), x + 4 * r, y + 10 * r);
    }
  }

  time(ctx, y) {
    const { view } = this;
    const { axis, ratio: r } = view;
    const rough = (axis.span * 120) / axis.width;
    const power = 10 ** floor(Math.log10(rough));
    const step = max(power * [1, 2, 5, 10].find((factor) => power * factor >= rough), 1);
    const [unit, word] = UNITS.find(([one]) => step >= one) || UNITS[3];
    this.font(ctx, 10);
    for (let tick = ceil(axis.start / step) * step; tick <= axis.end; tick += step) {
      const x = round(axis.x(tick) * r);
      ctx.fillStyle = view.palette.soft;
      ctx.fillRect(x, y + 12 * r, r, 8 * r);
      ctx.fillStyle = view.palette.fg;
      const text = (tick < 0 ? "−" : "") + group(abs(tick) / unit) + " " + word, size = ctx.measureText(text).width + 3 * r;
      // The last one stands before its tick, or not at all: half a number would be a wrong one.
      if (x + size < ctx.canvas.width) ctx.fillText(text, x + 3 * r, y + 8 * r);
      else if (2 * size < axis.x(axis.start + step) * r) ctx.fillText(text, x - size, y + 8 * r);
    }
  }
}
