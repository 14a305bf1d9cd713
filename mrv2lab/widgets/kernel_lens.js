// The kernel lens: spec and kernel of one op side by side, and what each program of the launch loads and stores.
//
// State shared with Python: `call` (which op of the step) and `program` (which program of its launch). Everything else
// arrives in one custom message, see payload() in kernel_lens.py. Data goes into the page through textContent only.

const CONTEXT = 2; // cells shown on either side of a touched one
const MAX_CELLS = 96; // shown of one buffer
const MAX_ACCESSES = 200; // listed of one program
const SMALL = 64; // a buffer of at most so many cells is shown whole

const STYLE = `
.mrv2-lens { --load: #56b4e9; --store: #e69f00; box-sizing: border-box; padding: 8px; line-height: 1.45;
  font-family: var(--jp-ui-font-family, system-ui, sans-serif); font-size: var(--jp-ui-font-size1, 13px);
  color: var(--jp-ui-font-color1, #1f1f1f); background: var(--jp-layout-color1, #fff);
  border: 1px solid var(--jp-border-color2, #c8c8c8); border-radius: 4px; }
.mrv2-lens *, .mrv2-lens *::before { box-sizing: border-box; }
.mrv2-lens:focus-visible, .mrv2-lens :focus-visible { outline: 2px solid var(--jp-brand-color1, #0b63c4);
  outline-offset: 1px; }
.mrv2-lens [hidden] { display: none !important; }
.mrv2-lens .bar { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; }
.mrv2-lens label { display: inline-flex; gap: 6px; align-items: center; max-width: 100%; }
.mrv2-lens select, .mrv2-lens button { font: inherit; color: inherit; min-height: 26px; max-width: 100%;
  background: var(--jp-layout-color2, #f2f2f2); border: 1px solid var(--jp-border-color1, #767676);
  border-radius: 3px; padding: 1px 8px; }
.mrv2-lens button:not(:disabled) { cursor: pointer; }
.mrv2-lens button:disabled { opacity: 0.5; }
.mrv2-lens input[type="range"] { flex: 1 1 140px; max-width: 360px; min-width: 0; accent-color: #0072b2; }
.mrv2-lens .doc { margin: 6px 0 2px; }
.mrv2-lens .quiet { color: var(--jp-ui-font-color2, #555); }
.mrv2-lens .verdict { font-weight: 600; padding: 2px 8px; border-left: 4px solid #009e73; overflow-wrap: anywhere; }
.mrv2-lens .verdict.no { border-left: 4px double #d55e00; }
.mrv2-lens .verdict.none { border-left: 4px dotted #767676; }
.mrv2-lens .note { margin: 2px 0; }
.mrv2-lens .sources { display: grid; gap: 8px; margin: 8px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.mrv2-lens .sources > * { min-width: 0; }
.mrv2-lens h3 { font-size: inherit; font-weight: 600; margin: 0 0 3px; }
.mrv2-lens h3 small { font-weight: 400; font-size: 0.92em; }
.mrv2-lens pre { margin: 0; padding: 4px 0; max-height: 32rem; overflow: auto; position: relative;
  font-family: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace); font-size: 12px; line-height: 1.5;
  background: var(--jp-layout-color0, #fff); color: var(--jp-content-font-color1, #1f1f1f);
  border: 1px solid var(--jp-border-color2, #c8c8c8); border-radius: 3px; }
.mrv2-lens pre > code { display: block; width: max-content; min-width: 100%; font: inherit; color: inherit;
  background: none; padding: 0; }
.mrv2-lens .line { display: block; padding-right: 8px; border-left: 4px solid transparent; }
.mrv2-lens .line .no { display: inline-block; width: 3.2em; text-align: right; user-select: none;
  color: var(--jp-ui-font-color2, #555); }
.mrv2-lens .line .mark { display: inline-block; width: 2.2em; text-align: center; font-weight: 700; user-select: none; }
.mrv2-lens .line.l { border-left-color: var(--load); background: rgba(86, 180, 233, 0.16); }
.mrv2-lens .line.s { border-left: 4px double var(--store); background: rgba(230, 159, 0, 0.18); }
.mrv2-lens .line.sel { outline: 2px solid currentColor; outline-offset: -2px; }
.mrv2-lens .kw { font-weight: 600; color: var(--jp-mirror-editor-keyword-color, #0a6b2d); }
.mrv2-lens .cm { font-style: italic; color: var(--jp-ui-font-color2, #555); }
.mrv2-lens .memory { font-weight: 700; text-decoration: underline; text-decoration-thickness: 2px;
  text-underline-offset: 3px; }
.mrv2-lens .memory.l { text-decoration-color: var(--load); }
.mrv2-lens .memory.s { text-decoration-color: var(--store); }
.mrv2-lens .where { margin: 6px 0; min-height: 1.45em; }
.mrv2-lens .outside { border-left: 4px double #d55e00; padding-left: 8px; margin: 4px 0; font-weight: 600; }
.mrv2-lens .parts { display: grid; gap: 8px 16px; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
.mrv2-lens .parts > * { min-width: 0; }
.mrv2-lens .narrow { grid-template-columns: minmax(0, 1fr); }
.mrv2-lens .buffer { margin: 0 0 8px; }
.mrv2-lens .buffer h4 { margin: 0 0 2px; font-size: inherit; font-weight: 600; }
.mrv2-lens .buffer h4 small, .mrv2-lens .cell small { font-weight: 400; color: var(--jp-ui-font-color2, #555); }
.mrv2-lens ul.cells { list-style: none; display: flex; flex-wrap: wrap; gap: 2px; margin: 0 0 2px; padding: 0;
  align-items: stretch; }
.mrv2-lens .cell { margin: 0; padding: 2px 5px; min-width: 3.4em; text-align: center; font-size: 12px;
  line-height: 1.35; border: 1px solid var(--jp-border-color2, #c8c8c8); border-radius: 2px; white-space: nowrap;
  font-family: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace); }
.mrv2-lens .cell small { display: block; font-size: 10px; }
.mrv2-lens .cell.l { background: rgba(86, 180, 233, 0.25); border: 1px solid #0072b2; }
.mrv2-lens .cell.s { background: rgba(230, 159, 0, 0.25); border: 3px double #a35200; padding: 0 3px; }
.mrv2-lens .cell.sel { outline: 2px solid currentColor; outline-offset: 0; }
.mrv2-lens .cell b { margin-left: 4px; }
.mrv2-lens .cell s { opacity: 0.75; }
.mrv2-lens .row { font-size: 11px; align-self: center; min-width: 3em; padding-right: 4px; text-align: right;
  color: var(--jp-ui-font-color2, #555); }
.mrv2-lens .gap { align-self: center; padding: 0 2px; }
.mrv2-lens ol { list-style: none; margin: 0; padding: 0; max-height: 24rem; overflow: auto; }
.mrv2-lens ol button { width: 100%; text-align: left; display: flex; gap: 8px; border-color: transparent;
  border-left: 4px solid transparent; background: none; overflow-wrap: anywhere; font-size: 12px;
  font-family: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace); }
.mrv2-lens ol button.l { border-left-color: var(--load); }
.mrv2-lens ol button.s { border-left: 4px double var(--store); }
.mrv2-lens ol button:hover { background: var(--jp-layout-color2, #f2f2f2); }
.mrv2-lens ol button[aria-pressed="true"] { background: var(--jp-layout-color3, #e0e0e0); font-weight: 600; }
.mrv2-lens ol .at { color: var(--jp-ui-font-color2, #555); min-width: 4.6em; font-weight: 400; }
.mrv2-lens .key { display: inline-flex; gap: 4px; align-items: center; }
.mrv2-lens .sr { position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
@media (forced-colors: active) { .mrv2-lens .cell.s { border: 3px double; } .mrv2-lens .cell.l { border: 2px solid; } }
`;

const KEYWORDS = new Set(
  ("and as break continue def elif else for from if import in is lambda None not or pass return while with yield " +
    "True False").split(" "),
);
const TOKEN = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(\btl\.(?:load|store)\b)|([A-Za-z_]\w*)/g;

/** An element with a class, a text and children. */
function make(tag, { cls, text, ...props } = {}, ...children) {
  const el = document.createElement(tag);
  if (cls) el.className = cls;
  if (text !== undefined) el.textContent = text;
  for (const [name, value] of Object.entries(props)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/** 1 load, 2 loads. */
const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** Prose in which double backquotes mean code. */
function prose(el, text) {
  el.replaceChildren(...text.split("``").map((part, i) => make(i % 2 ? "code" : "span", { text: part })));
}

/** One line of Python, lightly coloured. */
function coloured(line) {
  const code = make("span");
  let from = 0;
  for (const match of line.matchAll(TOKEN)) {
    const [word, comment, , memory, name] = match;
    let cls = comment ? "cm" : KEYWORDS.has(name) ? "kw" : "";
    if (memory) cls = memory === "tl.load" ? "memory l" : "memory s";
    if (!cls) continue;
    code.append(line.slice(from, match.index), make("span", { cls, text: word }));
    from = match.index + word.length;
  }
  code.append(line.slice(from));
  return code;
}

/** Flat index -> index of each axis. */
function unravel(flat, shape) {
  const at = [];
  for (let axis = shape.length - 1; axis > 0; axis--) {
    at.unshift(flat % shape[axis]);
    flat = Math.floor(flat / shape[axis]);
  }
  at.unshift(flat);
  return at;
}

/** Columns of a message: Int32 indices, and 64-bit cells that are integers or doubles by their buffer's kind. */
function decode(views) {
  const [index, values, before, dense] = views.map((v) => v.buffer.slice(v.byteOffset, v.byteOffset + v.byteLength));
  const both = (raw) => ({ int: new BigInt64Array(raw), float: new Float64Array(raw) });
  return { index: new Int32Array(index), values: both(values), before: both(before), dense: both(dense) };
}

/** The text of one 64-bit cell. */
function shown(column, i, buffer) {
  if (buffer.kind === "pointer") return `&${buffer.targets[Number(column.int[i])]}`;
  if (buffer.kind === "int") return String(column.int[i]);
  return String(Number(column.float[i].toPrecision(6)));
}

class View {
  constructor(model, el) {
    this.model = model;
    this.payload = null;
    this.access = -1;
    this.id = `mrv2-lens-${Math.random().toString(36).slice(2)}`;
    this.abort = new AbortController();
    this.build(el);
    this.onMessage = (message, buffers) => this.receive(message, buffers);
    this.onProgram = () => this.drawProgram(true);
    model.on("msg:custom", this.onMessage);
    model.on("change:program", this.onProgram);
    this.resize = new ResizeObserver(() => this.parts.classList.toggle("narrow", this.root.clientWidth < 720));
    this.resize.observe(this.root);
    model.send({ type: "ready" });
  }

  close() {
    this.abort.abort();
    this.resize.disconnect();
    this.model.off("msg:custom", this.onMessage);
    this.model.off("change:program", this.onProgram);
    this.root.remove();
  }

  listen(target, type, call) {
    target.addEventListener(type, call, { signal: this.abort.signal });
  }

  build(el) {
    this.root = make("section", {
      cls: "mrv2-lens",
      tabindex: "0",
      "aria-label": "Kernel lens. Left and Right arrow: previous and next program, Home and End: first and last.",
      "data-lm-suppress-shortcuts": "true",
    });
    this.root.append(make("style", { text: STYLE }));
    this.select = make("select");
    this.facts = make("span", { cls: "quiet" });
    this.verdict = make("span", { cls: "verdict", hidden: "" });
    const chooser = make("label", {}, "Op", this.select);
    this.root.append(make("div", { cls: "bar" }, chooser, this.facts, this.verdict));
    this.message = make("p", { cls: "doc" });
    this.say("Waiting for Python. Without a running kernel, run this cell to open the lens.");
    this.notes = make("div");
    this.root.append(this.message, this.notes);

    this.spec = this.buildSource("Spec");
    this.kernel = this.buildSource("Kernel");
    this.sources = make("div", { cls: "sources", hidden: "" }, this.spec.box, this.kernel.box);
    this.launcher = this.buildSource("Launcher");
    const summary = make("summary", { text: "Launcher: how many programs, and with what" });
    this.more = make("details", { hidden: "" }, summary, this.launcher.box);
    this.root.append(this.sources, this.more);

    const button = (text, name, to) => {
      const b = make("button", { type: "button", text, "aria-label": name });
      this.listen(b, "click", () => this.go(to()));
      return b;
    };
    this.first = button("|◀", "First program", () => 0);
    this.prev = button("◀", "Previous program", () => this.program - 1);
    this.next = button("▶", "Next program", () => this.program + 1);
    this.last = button("▶|", "Last program", () => Infinity);
    this.slider = make("input", { type: "range", min: "0", "aria-label": "Program" });
    this.listen(this.slider, "input", () => this.go(Number(this.slider.value)));
    this.bar = make("div", { cls: "bar", hidden: "" }, this.first, this.prev, this.slider, this.next, this.last);
    for (const [cls, letter, word] of [["l", "L", "loaded"], ["s", "S", "stored: before → after"]]) {
      this.bar.append(make("span", { cls: "key" }, make("span", { cls: `cell ${cls}`, text: letter }), word));
    }
    this.where = make("p", { cls: "where" });
    this.live = make("div", { cls: "sr", role: "status", "aria-live": "polite" });
    this.buffers = make("div", { role: "group", "aria-label": "Elements that this program touches" });
    this.list = make("ol", { tabindex: "0", "aria-label": "Loads and stores in order" });
    const order = make("div", {}, make("h3", { text: "In order" }), this.list);
    this.parts = make("div", { cls: "parts", hidden: "" }, this.buffers, order);
    this.root.append(make("div", {}, this.bar, this.where), this.parts, this.live);

    this.listen(this.select, "change", () => this.choose(Number(this.select.value)));
    this.listen(this.root, "keydown", (event) => this.key(event));
    this.listen(this.list, "click", (event) => {
      const pressed = event.target.closest("button");
      if (pressed) this.pick(Number(pressed.dataset.access));
    });
    el.append(this.root);
  }

  buildSource(title) {
    const head = make("h3", { text: title, id: `${this.id}-${title}` });
    const code = make("code");
    const pre = make("pre", { tabindex: "0", role: "region", "aria-labelledby": head.id }, code);
    return { box: make("div", {}, head, pre), head, code, pre, title, lines: new Map() };
  }

  get program() {
    const count = this.payload?.run?.programs.length ?? 0;
    return Math.max(0, Math.min(this.model.get("program"), count - 1));
  }

  go(to) {
    const count = this.payload?.run?.programs.length ?? 0;
    const program = Math.max(0, Math.min(to, count - 1));
    if (program === this.program) return;
    this.model.set("program", program);
    this.model.save_changes();
  }

  choose(call) {
    this.say("Interpreting …");
    this.model.set("program", 0);
    this.model.set("call", call);
    this.model.save_changes();
  }

  key(event) {
    const inside = event.target.closest("select, input, pre, summary");
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    if (event.key === "Escape") {
      if (event.target === this.root) this.root.blur();
      else this.root.focus();
    } else if (step === undefined || inside) return;
    else this.go(this.program + step);
    event.preventDefault();
    event.stopPropagation();
  }

  say(text) {
    prose(this.message, text);
    this.message.hidden = !text;
  }

  receive(message, views) {
    if (message.type !== "lens") return;
    this.payload = message;
    this.columns = message.run ? decode(views) : null;
    this.select.replaceChildren(
      ...message.calls.map(([phase, op], i) => make("option", { value: i, text: phase ? `${phase} · ${op}` : op })),
    );
    this.select.disabled = message.calls.length < 2;
    this.select.value = message.call;
    this.drawRun();
  }

  drawRun() {
    const { run, sentence, title } = this.payload;
    for (const part of [this.verdict, this.sources, this.more]) part.hidden = !run;
    this.say(run ? run.doc : sentence);
    this.facts.textContent = title;
    this.notes.replaceChildren();
    this.live.textContent = run ? `${run.op}: ${run.verdict}` : sentence;
    if (run) {
      const size = run.grid ? [`grid (${run.grid.join(", ")})`, counted(run.launched, "program")] : [];
      this.facts.textContent = [title, ...size].filter(Boolean).join(" · ");
      const sign = run.missing ? "– " : run.agrees ? "✓ " : "≠ ";
      this.verdict.className = `verdict ${run.missing ? "none" : run.agrees ? "" : "no"}`;
      this.verdict.textContent = sign + run.verdict;
      for (const note of run.notes) this.notes.append(make("p", { cls: "note", text: note }));
      for (const [source, at] of [[this.spec, run.spec], [this.kernel, run.kernel], [this.launcher, run.launcher]]) {
        this.drawSource(source, at);
      }
      this.slider.max = Math.max(run.programs.length - 1, 0);
    }
    this.drawProgram(false);
  }

  drawSource(source, { file, line, text }) {
    source.head.replaceChildren(source.title, make("small", { cls: "quiet", text: ` ${file}` }));
    source.lines.clear();
    source.code.replaceChildren(
      ...text.split("\n").map((code, i) => {
        const mark = make("span", { cls: "mark" });
        const row = make("span", { cls: "line" }, make("span", { cls: "no", text: line + i }), mark, coloured(code));
        source.lines.set(line + i, { row, mark });
        return row;
      }),
    );
    source.pre.scrollTop = 0;
  }

  drawProgram(announce) {
    const run = this.payload?.run;
    const count = run?.programs.length ?? 0;
    this.access = -1;
    this.bar.hidden = this.parts.hidden = count === 0;
    this.where.replaceChildren();
    if (!count) return;
    const at = this.program;
    const { pid, accesses, outside } = run.programs[at];
    this.slider.value = at;
    const loads = accesses.filter((a) => !a.store).length;
    const made = `${counted(loads, "load")}, ${counted(accesses.length - loads, "store")}`;
    const words = `Program ${at + 1} of ${count}, id (${pid.join(", ")}): ${made}`;
    this.slider.setAttribute("aria-valuetext", words);
    this.first.disabled = this.prev.disabled = at === 0;
    this.slider.disabled = count === 1;
    this.next.disabled = this.last.disabled = at === count - 1;
    this.where.textContent = accesses.length ? `${words}.` : `${words}: it returned before it touched memory.`;
    for (const text of outside) this.where.append(make("span", { cls: "outside", text: `Dropped: ${text}.` }));
    if (announce) this.live.textContent = words;
    this.markLines(accesses);
    if (!announce) this.reveal(accesses[0]?.line, 3);
    this.drawBuffers(run, accesses);
    this.drawList(run, accesses);
  }

  markLines(accesses) {
    for (const { row, mark } of this.kernel.lines.values()) {
      row.className = "line";
      mark.textContent = "";
    }
    for (const { line, store } of accesses) {
      const there = this.kernel.lines.get(line);
      if (!there) continue;
      const letter = store ? "S" : "L";
      if (!there.mark.textContent.includes(letter)) there.mark.textContent += letter;
      there.row.classList.add(there.mark.textContent.includes("S") ? "s" : "l");
    }
  }

  /** What this program does to each element: buffer -> flat index -> {load, store, before, after, accesses}. */
  touched(accesses) {
    const cells = new Map();
    accesses.forEach((access, number) => {
      if (!cells.has(access.buffer)) cells.set(access.buffer, new Map());
      const of = cells.get(access.buffer);
      for (let i = access.at; i < access.at + access.count; i++) {
        const index = this.columns.index[i];
        if (!of.has(index)) of.set(index, { accesses: new Set() });
        const cell = of.get(index);
        cell.accesses.add(number);
        if (access.store) {
          cell.before ??= ["before", i];
          cell.after = ["values", i];
        } else cell.load ??= ["values", i];
      }
    });
    return cells;
  }

  /** What the programs before this one stored: buffer -> flat index -> position in `values`. */
  stored(run) {
    const state = new Map();
    for (const program of run.programs.slice(0, this.program)) {
      for (const { store, buffer, at, count } of program.accesses) {
        if (!store || !run.buffers[buffer].dense) continue;
        if (!state.has(buffer)) state.set(buffer, new Map());
        for (let i = at; i < at + count; i++) state.get(buffer).set(this.columns.index[i], i);
      }
    }
    return state;
  }

  drawBuffers(run, accesses) {
    const touched = this.touched(accesses);
    const state = this.stored(run);
    this.cells = [];
    this.buffers.replaceChildren(make("h3", { text: "Elements" }));
    run.buffers.forEach((buffer, b) => {
      const cells = touched.get(b);
      if (cells) this.buffers.append(this.drawBuffer(buffer, cells, state.get(b) ?? new Map()));
    });
    const idle = run.buffers.filter((_, b) => !touched.has(b)).map((buffer) => buffer.name);
    const scalars = run.scalars.map(([name, value]) => `${name} = ${value}`);
    if (scalars.length) this.buffers.append(make("p", { cls: "note quiet", text: `Scalars: ${scalars.join(", ")}` }));
    if (idle.length) this.buffers.append(make("p", { cls: "note quiet", text: `Not touched: ${idle.join(", ")}` }));
  }

  drawBuffer(buffer, cells, state) {
    const shape = buffer.shape.join(", ");
    const title = make("h4", { text: `${buffer.name} ` });
    title.append(make("small", { text: `[${shape}] ${buffer.dtype}${buffer.written ? ", written by this op" : ""}` }));
    const box = make("div", { cls: "buffer" }, title);
    const width = buffer.shape.length > 1 ? Math.max(buffer.shape.at(-1), 1) : Math.max(buffer.size, 1);
    let wanted = [...cells.keys()];
    if (buffer.dense) {
      if (buffer.size <= SMALL) wanted = Array.from({ length: buffer.size }, (_, i) => i);
      else {
        const around = wanted.flatMap((i) => {
          const start = i - (i % width);
          const from = Math.max(start, i - CONTEXT);
          const to = Math.min(start + width - 1, buffer.size - 1, i + CONTEXT);
          return Array.from({ length: to - from + 1 }, (_, j) => from + j);
        });
        wanted = [...new Set(around)];
      }
    }
    wanted.sort((a, b) => a - b);
    const visible = wanted.slice(0, MAX_CELLS);
    let row = -1, ul = null, previous = -1;
    for (const index of visible) {
      if (Math.floor(index / width) !== row) {
        row = Math.floor(index / width);
        const lead = unravel(index, buffer.shape).slice(0, -1).join(", ");
        ul = make("ul", { cls: "cells", "aria-label": lead ? `${buffer.name}, row ${lead}` : buffer.name });
        if (lead) ul.append(make("li", { cls: "row", text: `[${lead}]` }));
        box.append(ul);
        if (index % width > 0) ul.append(make("li", { cls: "gap", text: "…" }));
      } else if (index > previous + 1) ul.append(make("li", { cls: "gap", text: "…" }));
      ul.append(this.drawCell(buffer, index, index % width, cells.get(index), state));
      previous = index;
    }
    const hidden = wanted.slice(MAX_CELLS).filter((i) => cells.has(i)).length;
    if (hidden) box.append(make("p", { cls: "note quiet", text: `and ${hidden} more elements touched` }));
    return box;
  }

  drawCell(buffer, index, column, cell, state) {
    const li = make("li", { cls: "cell" }, make("small", { text: column }));
    const text = ([name, i]) => shown(this.columns[name], i, buffer);
    if (!cell) {
      const at = state.get(index);
      li.append(at === undefined ? shown(this.columns.dense, buffer.offset + index, buffer) : text(["values", at]));
      return li;
    }
    const mark = cell.after ? "s" : "l";
    li.classList.add(mark);
    if (cell.after) {
      const becomes = make("span", { cls: "sr", text: " becomes" });
      li.append(make("s", { text: text(cell.before) }), becomes, ` → ${text(cell.after)}`);
    } else li.append(text(cell.load));
    li.append(make("b", { text: (cell.load ? "L" : "") + (cell.after ? "S" : ""), "aria-hidden": "true" }));
    const words = [cell.load && "loaded", cell.after && "stored"].filter(Boolean).join(" and ");
    li.append(make("span", { cls: "sr", text: ` ${words}` }));
    this.cells.push({ li, accesses: cell.accesses });
    return li;
  }

  drawList(run, accesses) {
    this.list.scrollTop = 0;
    this.list.replaceChildren(
      ...accesses.slice(0, MAX_ACCESSES).map((access, i) => {
        const button = make("button", { type: "button", cls: access.store ? "s" : "l", "aria-pressed": "false" });
        button.dataset.access = i;
        const line = make("span", { cls: "at", text: access.line ? `line ${access.line}` : "" });
        button.append(line, make("span", { text: this.inWords(access, run.buffers[access.buffer]) }));
        return make("li", {}, button);
      }),
    );
    const more = accesses.length - MAX_ACCESSES;
    if (more > 0) this.list.append(make("li", { cls: "quiet", text: `and ${more} more` }));
  }

  inWords({ store, at, count }, buffer) {
    const name = (i) => `${buffer.name}[${unravel(this.columns.index[i], buffer.shape).join(", ")}]`;
    const value = (column, i) => shown(this.columns[column], i, buffer);
    const verb = store ? "S store" : "L load";
    if (count === 1) {
      return store
        ? `${verb} ${name(at)}: ${value("before", at)} → ${value("values", at)}`
        : `${verb} ${name(at)} = ${value("values", at)}`;
    }
    const few = Array.from({ length: Math.min(count, 4) }, (_, i) => value("values", at + i)).join(", ");
    const rest = count > 4 ? ", …" : "";
    return `${verb} ${count} of ${buffer.name}, from ${name(at)} to ${name(at + count - 1)}: ${few}${rest}`;
  }

  /** Show one access alone: its line and its elements. The same again: none. */
  pick(access) {
    this.access = this.access === access ? -1 : access;
    const line = this.payload.run.programs[this.program].accesses[this.access]?.line;
    for (const button of this.list.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.access) === this.access));
    }
    for (const { li, accesses } of this.cells) li.classList.toggle("sel", accesses.has(this.access));
    for (const [number, { row }] of this.kernel.lines) row.classList.toggle("sel", number === line);
    this.reveal(line, 8);
  }

  /** Scroll the kernel, not the page, so that a line is seen, with some lines above it. */
  reveal(line, above) {
    const { pre, lines } = this.kernel;
    const row = lines.get(line)?.row;
    if (!row) return;
    const { offsetTop: top, offsetHeight: height } = row;
    const seen = top >= pre.scrollTop && top <= pre.scrollTop + pre.clientHeight - 5 * height;
    if (!seen) pre.scrollTop = top - above * height;
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
