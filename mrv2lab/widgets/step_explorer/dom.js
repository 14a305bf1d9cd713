// -- dom: elements, and a grid of which only the visible rows exist ----------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
let nextId = 0; // only makes element ids unique in the page; nothing else is shared between views

/** An element. Data reaches the page through here only: attributes and text nodes, never markup.
 * @param {string} tag @param {object | string} [attrs] a string is a class @param {...(Node | string)} children */
function h(tag, attrs = {}, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

/** An SVG element, as `h`. */
function s(tag, attrs = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

function fill(node, attrs, children) {
  if (typeof attrs === "string") attrs = { class: attrs };
  for (const key in attrs) {
    const value = attrs[key];
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "hue") node.style.setProperty("--hue", value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** A button with a name; `sign` is what it shows. */
const button = (sign, name, onclick, attrs = {}) =>
  h("button", { type: "button", title: name, "aria-label": name, onclick, ...attrs }, sign);

/** A column of a Grid: text, or numbers at the right. */
const col = (title, width, grow = false, tip = title) => ({ title, width, grow, tip });
const num = (title, width, tip = title) => ({ title, width, num: true, tip });

/** An empty panel says why. */
const empty = (why) => h("p", "mx-empty", why);

const ROW = 22; // px, as in style.css

/**
 * A table of any length. Row elements are a pool that slides with the scroll position; a cell is a string or
 * {t text, c class, tip, chip [letter, hue], who "C" | "G", ne differs from the other source}.
 */
class Grid {
  /** @param {string} label @param {{rows?: number, onactive?: (i: number) => void, onpick?: (i: number) => void}} opts */
  constructor(label, { rows = 10, onactive = null, onpick = null } = {}) {
    this.id = "mx" + nextId++;
    this.rows = rows;
    this.count = 0;
    this.active = -1;
    this.columns = [];
    this.pool = [];
    this.onactive = onactive;
    this.onpick = onpick;
    this.head = h("div", { class: "mx-tr", role: "row", "aria-rowindex": 1 });
    this.body = h("div", { class: "mx-tbody", role: "rowgroup" });
    this.el = h("div", { class: "mx-grid", role: "grid", tabindex: 0, "aria-label": label, "data-grid": "" },
      h("div", { class: "mx-thead", role: "rowgroup" }, this.head), this.body);
    this.el.addEventListener("scroll", () => this.paint(), { passive: true });
    this.el.addEventListener("keydown", (event) => this.key(event));
    this.el.addEventListener("click", (event) => {
      const row = event.target.closest("[data-i]");
      if (row) this.activate(Number(row.dataset.i), true);
    });
  }

  /** @param {{columns: {title: string, width: number, num?: boolean, tip?: string, grow?: boolean}[], count: number,
   * row: (i: number) => any[], rowClass?: (i: number) => string, active?: number}} spec */
  set(spec) {
    const signature = spec.columns.map((c) => c.title + c.width).join("|");
    if (signature !== this.signature) this.setColumns(spec.columns, signature);
    this.spec = spec;
    this.count = spec.count;
    if (spec.active !== undefined) this.active = spec.active;
    if (this.active >= this.count) this.active = this.count - 1;
    this.el.hidden = !this.count;
    this.el.setAttribute("aria-rowcount", this.count + 1);
    this.body.style.height = this.count * ROW + "px";
    this.paint();
  }

  setColumns(columns, signature) {
    this.signature = signature;
    this.columns = columns;
    this.el.style.setProperty("--cols", columns.map((c) => c.grow ? `minmax(${c.width}ch, 1fr)` : c.width + "ch").join(" "));
    this.el.style.setProperty("--w", columns.reduce((sum, c) => sum + c.width, 0) + "ch");
    this.el.style.setProperty("--rows", this.rows);
    this.el.setAttribute("aria-colcount", columns.length);
    this.head.replaceChildren(...columns.map((c) => {
      const words = c.title.split(/(?<=_)/); // long names may break behind an underscore
      return h("span", { role: "columnheader", class: c.num ? "num" : "", title: c.tip },
        ...words.flatMap((word, i) => (i ? [h("wbr"), word] : [word])));
    }));
    this.pool = [];
    this.body.replaceChildren();
  }

  newRow(slot) {
    const row = h("div", { class: "mx-tr", role: "row", id: this.id + "-" + slot });
    row.cells = this.columns.map((c) => {
      const cell = h("span", { role: "gridcell", class: c.num ? "num" : "" });
      cell.parts = [h("b", "chip"), h("span", "t"), h("i", "who")];
      cell.append(...cell.parts);
      cell.was = {};
      row.append(cell);
      return cell;
    });
    this.body.append(row);
    return row;
  }

  /** Write the rows in sight. Only what differs from what an element shows already is touched. */
  paint() {
    const first = Math.max(0, Math.min(Math.floor(this.el.scrollTop / ROW) - 1, this.count - this.rows - 2));
    const shown = Math.min(this.count - first, this.rows + 3);
    while (this.pool.length < shown) this.pool.push(this.newRow(this.pool.length));
    for (let slot = 0; slot < this.pool.length; slot++) {
      const row = this.pool[slot];
      row.hidden = slot >= shown;
      if (row.hidden) continue;
      const i = first + slot;
      row.style.top = i * ROW + "px";
      row.dataset.i = i;
      row.setAttribute("aria-rowindex", i + 2);
      const name = "mx-tr " + (i % 2 ? "odd " : "") + (i === this.active ? "active " : "") + (this.spec.rowClass?.(i) || "");
      if (row.className !== name) row.className = name;
      row.setAttribute("aria-selected", i === this.active);
      const cells = this.spec.row(i);
      for (let c = 0; c < cells.length; c++) this.paintCell(row.cells[c], cells[c], this.columns[c]);
    }
    const slot = this.active - first;
    if (this.active >= 0 && slot >= 0 && slot < shown) this.el.setAttribute("aria-activedescendant", this.pool[slot].id);
    else this.el.removeAttribute("aria-activedescendant");
  }

  paintCell(cell, content, column) {
    const now = typeof content === "object" && content !== null ? content : { t: content };
    const was = cell.was;
    const name = (column.num ? "num " : "") + (now.c || "") + (now.ne ? " ne" : "");
    if (cell.className !== name) cell.className = name;
    const text = (now.ne ? "≠ " : "") + now.t;
    if (was.text !== text) cell.parts[1].textContent = was.text = text;
    const tip = now.tip || (text.length > column.width - 2 ? text : "");
    if (was.tip !== tip) { was.tip = tip; if (tip) cell.title = tip; else cell.removeAttribute("title"); }
    const chip = now.chip ? now.chip[0] : "";
    if (was.chip !== chip) {
      cell.parts[0].textContent = was.chip = chip;
      if (now.chip) cell.parts[0].style.setProperty("--hue", now.chip[1]);
    }
    const who = now.who || "";
    if (was.who !== who) { cell.parts[2].textContent = was.who = who; cell.parts[2].className = "who " + who; }
  }

  /** Put the cursor on row `i`. @param {boolean} pick Enter or a click, not just an arrow */
  activate(i, pick = false) {
    if (!this.count) return;
    this.active = Math.max(0, Math.min(i, this.count - 1));
    this.reveal(this.active);
    this.paint();
    this.onactive?.(this.active);
    if (pick) this.onpick?.(this.active);
  }

  /** Scroll row `i` into the grid's own view; the page does not move. */
  reveal(i) {
    const top = this.el.scrollTop;
    const height = this.rows * ROW;
    if (i * ROW < top) this.el.scrollTop = i * ROW;
    else if ((i + 1) * ROW > top + height) this.el.scrollTop = (i + 1) * ROW - height;
  }

  key(event) {
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: 1 - this.rows, PageDown: this.rows - 1 }[event.key];
    if (move !== undefined && !event.ctrlKey && !event.altKey && !event.metaKey) this.activate(this.active + move);
    else if (event.key === "Enter") this.activate(Math.max(this.active, 0), true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
