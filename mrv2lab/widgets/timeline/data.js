// -- data: the message becomes columns in the order of rows; all views of a model share them ----------------------------

const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float64: Float64Array };

/** A comm buffer as a typed array, whatever the host hands over; copied where it is not aligned. */
function arrayOf(buffer, dtype) {
  const Type = ARRAYS[dtype];
  const bytes = buffer instanceof ArrayBuffer ? new Uint8Array(buffer) : new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  const aligned = bytes.byteOffset % Type.BYTES_PER_ELEMENT ? bytes.slice() : bytes;
  return new Type(aligned.buffer, aligned.byteOffset, aligned.byteLength / Type.BYTES_PER_ELEMENT);
}

/** Slices in the order of rows. A *position* counts in that order, an *id* is the number by which Python knows a slice. */
class Data {
  constructor(header, buffers) {
    Object.assign(this, header);
    this.names = JSON.parse(new TextDecoder().decode(arrayOf(buffers[0], "uint8")));
    const start = arrayOf(buffers[1], "float64");
    const duration = arrayOf(buffers[2], header.dtypes[0]);
    const name = arrayOf(buffers[3], header.dtypes[1]);
    const kind = arrayOf(buffers[4], "uint8");
    Object.assign(this, packRows(start, duration, header.offsets));
    const n = (this.length = start.length);
    this.start = new Float64Array(n);
    this.end = new Float64Array(n);
    this.name = new name.constructor(n);
    this.kind = new Uint8Array(n);
    for (let p = 0; p < n; p++) {
      const i = this.idOf[p];
      this.start[p] = start[i];
      this.end[p] = start[i] + duration[i];
      this.name[p] = name[i];
      this.kind[p] = kind[i];
    }
    this.lanes = header.lanes.map(([trace, level, rank, label, empty, full], index) => ({ index, trace, level, rank, empty, label: this.chip(trace) + visible(label), full: this.chip(trace) + visible(full), rows: this.laneRow[index + 1] - this.laneRow[index] }));
    this.kindsPresent = header.kinds.map((_, k) => k).filter((k) => this.kind.includes(k));
    this.details = new Map();
  }

  /** Row of a position. */
  rowOf(p) { return upper(this.rowFirst, p, 0, this.rowFirst.length) - 1; }

  /** Lane of a slice id. */
  laneOf(id) { return this.lanes[upper(this.offsets, id, 0, this.offsets.length) - 1]; }

  /** First position of a row that ends after `moment`. */
  firstAfter(row, moment) { return upper(this.end, moment, this.rowFirst[row], this.rowFirst[row + 1]); }

  nameOf(p) { return visible(this.names[this.name[p]]); }

  /** "A " or "B " where there are two traces. */
  chip(trace) { return this.traces.length > 1 ? "AB"[trace] + " " : ""; }
}

/** First index in [low, high) with a value above `value`, of rising values. */
function upper(values, value, low, high) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

/**
 * Data and views of a model, by the channel that Python named: hosts evaluate a module once or once a model, and hand
 * `initialize` and `render` different objects for one model.
 */
const STORES = new Map();

function storeOf(model) {
  const channel = model.get("channel");
  let store = STORES.get(channel);
  if (!store) STORES.set(channel, (store = { data: null, error: "", views: new Set() }));
  return store;
}

/** Take in one message of Python's, before any view exists or while several do. */
function receive(store, content, buffers) {
  if (content.type === "data") {
    try {
      performance.mark("mrv2lab-timeline-data");
      store.data = new Data(content, buffers);
    } catch (error) {
      store.error = "This timeline's data could not be read: " + error;
    }
  } else if (content.type === "details" && store.data) store.data.details.set(content.id, content);
  for (const view of store.views) view.receive(content);
}
