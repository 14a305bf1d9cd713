// -- data: a message becomes a view; text becomes visible; values as they are at the phase cursor ---------------------

const ARRAYS = {
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, float32: Float32Array, float64: Float64Array,
};
const NOTHING = new Int32Array(0);

/** Bytes of a comm buffer, whatever the host hands over, copied so that every typed array is aligned.
 * @param {DataView | ArrayBuffer | Uint8Array} b @returns {Uint8Array} */
function bytesOf(b) {
  return b instanceof ArrayBuffer ? new Uint8Array(b) : new Uint8Array(b.buffer, b.byteOffset, b.byteLength);
}

/** One source's step, see mrv2lab/recording/view.py. `error` is a sentence where there is no such step. */
class View {
  /** @param {object} header @param {DataView[]} buffers meta JSON, then every column in one blob */
  constructor(header, buffers) {
    Object.assign(this, { error: "" }, header);
    this.columns = {};
    this.byRow = new Map();
    if (this.error) return;
    this.meta = JSON.parse(new TextDecoder().decode(bytesOf(buffers[0])));
    const blob = bytesOf(buffers[1]).slice().buffer;
    for (const [name, dtype, offset, length] of header.columns) {
      this.columns[name] = new ARRAYS[dtype](blob, offset, length);
    }
    this.names = this.meta.requests;
    this.rows = this.meta.max_num_reqs;
    this.stops = this.meta.phases;
    this.stopOf = new Map(this.stops.map((name, i) => [name, i]));
    for (const change of this.meta.changes) {
      const list = this.byRow.get(change.row);
      if (list) list.push(change); else this.byRow.set(change.row, [change]);
    }
    this.batchOf = new Map(this.meta.batch.map((entry, i) => [entry.row, i]));
  }

  /** @param {string} name @returns {Int32Array} empty where the view has no such column */
  col(name) { return this.columns[name] || NOTHING; }

  /** Number of the stop at which a change happens. */
  at(change) { return this.stopOf.get(change.phase) ?? 0; }

  /** Value and last change of a cell when the first `stop` stops have happened. @returns {[any, object | null]} */
  cell(column, row, stop) {
    const list = (this.byRow.get(row) || []).filter((change) => change.column === column);
    const values = this.columns["rows." + column];
    let value = values ? values[row] : list.length ? list[0].before : (column === "seed" ? this.meta.seeds : this.meta.tails)[row];
    let last = null;
    for (const change of list) {
      if (this.at(change) > stop) break;
      value = change.after;
      last = last ? { ...change, before: last.before } : change;
    }
    return [value, last];
  }

  /** The request that owns `row` at a stop: its index, or -1. */
  owner(row, stop) { return Number(this.cell("request", row, stop)[0] ?? -1); }

  /** Text of tokens, control characters made visible; "" where there is none. */
  text(...ids) { return visible(ids.map((id) => this.meta.texts[id] ?? "").join("")); }

  name(request) { return request >= 0 && request < this.names.length ? visible(this.names[request]) : ""; }
}

const SHOWN = { "\n": "⏎", "\r": "␍", "\t": "⇥", "\0": "␀" };
// Control, zero-width and bidirectional-override characters: none of them may hide or reorder what is shown.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** What would be invisible or would play tricks is shown by a sign or its number; outer spaces become ␣.
 * @param {string} text @returns {string} */
function visible(text) {
  return String(text)
    .replace(HIDDEN, (c) => SHOWN[c] || "⟨U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩")
    .replace(/^ +| +$/g, (run) => "␣".repeat(run.length));
}

/** The letter of a row: rows are handed out from the highest, which is A. Stable for a request's whole admission. C and G are left out: they say who wrote. */
const LETTERS = "ABDEFHIJKLMNOPQRSTUVWXYZ";
function letterOf(row, rows) {
  let n = rows - 1 - row;
  let text = "";
  do { text = LETTERS[n % 24] + text; n = Math.floor(n / 24) - 1; } while (n >= 0);
  return text;
}

/** Okabe-Ito, without black. The letter is the second cue. */
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
const hueOf = (row, rows) => HUES[(rows - 1 - row) % HUES.length];

/** @param {any} value @param {string} kind of the column */
function formatValue(value, kind) {
  if (value == null) return kind === "text" ? "" : "–";
  if (kind === "text") return visible(value);
  if (kind === "float") return String(Number(value.toPrecision(4)));
  return String(value);
}

/** @param {number} us microseconds @returns {string} */
function formatTime(us) {
  if (us == null) return "–";
  if (Math.abs(us) >= 999500) return (us / 1e6).toPrecision(3) + " s";
  if (Math.abs(us) >= 1000) return (us / 1000).toPrecision(3) + " ms";
  return (Math.abs(us) < 10 ? us.toFixed(1) : Math.round(us)) + " µs";
}

/** @param {number} n bytes */
function formatBytes(n) {
  if (n < 1024) return n + " B";
  return n < 1048576 ? (n / 1024).toFixed(1) + " KiB" : (n / 1048576).toFixed(1) + " MiB";
}

/** "1 token", "2 tokens" */
const plural = (n, noun) => n + " " + noun + (n === 1 ? "" : "s");

/** A sign that no cell shows by colour alone: C the CPU wrote it, G a GPU kernel did. */
const WRITER = { cpu: "C", gpu: "G" };

/** "total_len 4 → 5, GPU kernel post_update in postprocess" */
function describeChange(change, columns, view) {
  const kind = (columns.find((c) => c.name === change.column) || {}).kind;
  const shown = (value) => kind === "request" ? view.name(Number(value ?? -1)) || "free"
    : kind === "text" ? `“${formatValue(value, kind)}”` : formatValue(value, kind) + (kind === "token" && view.text(value) ? " “" + view.text(value) + "”" : "");
  const who = change.writer === "gpu" ? "GPU kernel" : "CPU";
  return `${change.column} ${shown(change.before)} → ${shown(change.after)}, ${who} ${change.by} in ${change.phase}`;
}
