// -- (d) block tables and the KV pages ---------------------------------------------------------------------------------

const CELL = 34; // px, width of a page's cell as in style.css
const STRIP = 25; // px, height of a strip of them

class PagesPanel {
  constructor(app) {
    this.app = app;
    this.tables = new Grid("Block tables, in batch order", {
      rows: 8, onpick: (i) => app.selectEntry(this.view, this.view.meta.batch[this.kept[i]]),
    });
    this.across = 16;
    this.block = 0;
    this.strips = [];
    this.id = "mx" + nextId++;
    this.body = h("div", { class: "mx-tbody", role: "rowgroup" });
    this.pages = h("div", { class: "mx-grid mx-pages", role: "grid", tabindex: 0, "aria-label": "KV pages", "data-grid": "" }, this.body);
    this.detail = h("p", "mx-detail");
    this.pages.addEventListener("scroll", () => this.paint(), { passive: true });
    this.pages.addEventListener("keydown", (event) => this.key(event));
    this.pages.addEventListener("focus", () => this.go(this.block));
    for (const type of ["click", "pointerover"]) {
      this.pages.addEventListener(type, (event) => {
        const cell = event.target.closest("[data-block]");
        if (!cell) return;
        if (type === "click") this.go(Number(cell.dataset.block), true); else this.say(Number(cell.dataset.block));
      });
    }
    this.el = h("div", "mx-two", h("div", {}, h("h4", {}, "Block tables"), this.tables.el),
      h("div", {}, h("h4", {}, "KV pages after the step"), h("p", "mx-key", "letter: owner’s row, height: valid tokens, + written by this step, × shared, ∅ null block, · free"), this.pages, this.detail));
    this.observer = new ResizeObserver(([entry]) => {
      const across = Math.max(4, Math.floor((entry.contentRect.width - 16) / CELL));
      if (across !== this.across) { this.across = across; if (this.view) this.layout(); }
    });
    this.observer.observe(this.pages);
  }

  destroy() { this.observer.disconnect(); }

  update(view, other) {
    const { app } = this;
    this.view = view;
    const { batch, tables, block_size: size } = view.meta;
    const { kept, name, twin: twinOf, rowClass } = batchList(app, view, other);
    this.kept = kept;
    this.slots = new Map(); // block -> [token, ...] that this step writes into it
    view.col("tokens.slots").forEach((slot, t) => {
      if (slot < 0) return;
      const block = Math.floor(slot / size);
      if (this.slots.has(block)) this.slots.get(block).push(t); else this.slots.set(block, [t]);
    });
    this.tables.set({
      columns: [num("pos", 6), num("row", 10), col("request", 15), col("block ids", 26, true)],
      count: kept.length,
      rowClass,
      row: (j) => {
        const i = kept[j];
        const twin = twinOf(i);
        const ids = (tables[i] || []).join(" ");
        return [i, rowCell(view, batch[i].row), visible(name(i)),
          { t: ids || "none", tip: ids, ne: twin !== undefined && (other.meta.tables[twin] || []).join(" ") !== ids }];
      },
    });
    this.block = Math.min(this.block, Math.max(0, view.meta.num_blocks - 1));
    this.layout();
    const owner = view.col("pages.owner");
    if (!owner.length) return empty("This source keeps no pages.");
    const free = owner.reduce((sum, row) => sum + (row === -1), 0);
    return `${view.meta.num_blocks} blocks of ${plural(size, "token")}, ${free} free`;
  }

  layout() {
    const count = this.view.col("pages.owner").length;
    this.count = Math.ceil(count / this.across);
    this.body.style.height = this.count * STRIP + "px";
    this.pages.setAttribute("aria-rowcount", this.count);
    this.pages.setAttribute("aria-colcount", this.across);
    if (this.strips[0] && this.strips[0].children.length !== this.across) {
      this.strips = [];
      this.body.replaceChildren();
    }
    this.paint();
    this.say(this.block);
  }

  paint() {
    const first = Math.max(0, Math.floor(this.pages.scrollTop / STRIP) - 1);
    const shown = Math.max(0, Math.min(this.count - first, 10));
    while (this.strips.length < shown) {
      const strip = h("div", { class: "mx-strip", role: "row" }, ...Array.from({ length: this.across }, () => h("span", { role: "gridcell" })));
      this.strips.push(strip);
      this.body.append(strip);
    }
    this.pages.removeAttribute("aria-activedescendant");
    this.strips.forEach((strip, slot) => {
      strip.hidden = slot >= shown;
      if (strip.hidden) return;
      const i = first + slot;
      strip.style.top = i * STRIP + "px";
      strip.setAttribute("aria-rowindex", i + 1);
      for (let c = 0; c < this.across; c++) this.paintCell(strip.children[c], i * this.across + c);
    });
  }

  paintCell(cell, block) {
    const { view, app } = this;
    const owner = view.col("pages.owner")[block];
    cell.hidden = owner === undefined;
    if (cell.hidden) return;
    const rows = view.rows;
    const written = view.col("pages.written")[block];
    const shared = view.col("pages.shared")[block];
    const followed = owner >= 0 && app.follow && view.names[liveRows(view, app.stop(view)).owners.get(owner)] === app.follow;
    const now = this.block === block ? " active" : "";
    const key = [owner, view.col("pages.fill")[block], written, shared, followed, now, block, view.meta.block_size].join();
    if (cell.was === key && !now) return;
    cell.was = key;
    cell.dataset.block = block;
    cell.id = `${this.id}-${block}`;
    if (now) this.pages.setAttribute("aria-activedescendant", cell.id);
    cell.className = (owner === -2 ? "null" : owner < 0 ? "free" : "own") + (written ? " wrote" : "") + (followed ? " followed" : "") + now;
    cell.setAttribute("aria-label", this.describe(block));
    cell.style.setProperty("--hue", owner >= 0 ? hueOf(owner, rows) : "transparent");
    cell.style.setProperty("--fill", (100 * view.col("pages.fill")[block]) / view.meta.block_size + "%");
    cell.textContent = owner === -2 ? "∅" : owner < 0 ? "·" : letterOf(owner, rows) + (shared > 1 ? "×" : "") + (written ? "+" : "");
  }

  describe(block) {
    const { view } = this;
    const owner = view.col("pages.owner")[block];
    if (owner === undefined) return "";
    if (owner === -2) return `block ${block} is the null block: never owned`;
    const size = view.meta.block_size;
    const fill = `${view.col("pages.fill")[block]} of ${size} tokens valid`;
    if (owner < 0) return `block ${block} is free` + (view.col("pages.fill")[block] ? `, ${fill} (kept for prefix hits)` : "");
    const shared = view.col("pages.shared")[block];
    const tokens = this.slots.get(block) || [];
    const few = (name) => tokens.slice(0, 8).map((t) => view.col(name)[t]).join(" ") + (tokens.length > 8 ? " …" : "");
    const request = liveRows(view, this.app.stop(view)).owners.get(owner);
    return `block ${block}: row ${owner} (${letterOf(owner, view.rows)} ${view.name(request ?? -1)}), ${fill}`
      + (shared > 1 ? `, shared by ${shared} rows` : "")
      + (tokens.length ? `, this step writes slots ${few("tokens.slots")} from positions ${few("tokens.positions")}` : "");
  }

  say(block) { this.detail.textContent = this.describe(block); }

  go(block, pick = false) {
    this.block = Math.max(0, Math.min(block, this.view.col("pages.owner").length - 1));
    const strip = Math.floor(this.block / this.across);
    const room = Math.floor(this.pages.clientHeight / STRIP);
    const top = Math.floor(this.pages.scrollTop / STRIP);
    if (strip < top) this.pages.scrollTop = strip * STRIP;
    else if (strip >= top + room) this.pages.scrollTop = (strip - room + 1) * STRIP;
    this.paint();
    this.say(this.block);
    if (pick) this.app.select({ kind: "block", block: this.block, row: this.view.col("pages.owner")[this.block] });
  }

  key(event) {
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: -this.across, PageDown: this.across }[event.key];
    if (move !== undefined) this.go(this.block + move);
    else if (event.key === "Enter") this.go(this.block, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
