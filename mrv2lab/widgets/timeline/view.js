// -- view: what part of the axis is in sight, and where lanes lie ------------------------------------------------------

// So that a label fits
const LANE_LEAST = 15;
const ROW_LEAST = 1;
const ROW_MOST = 40;
// Ns
const SPAN_LEAST = 20;

/** Stretch of the axis, CSS pixels wide. */
class Axis {
  constructor([start, end]) {
    const margin = max((end - start) * 0.01, 10);
    this.home = [start - margin, end + margin];
    this.start = this.home[0];
    this.span = this.home[1] - this.home[0];
    this.width = 800;
  }

  x(moment) { return ((moment - this.start) / this.span) * this.width; }

  at(x) { return this.start + (x / this.width) * this.span; }

  get end() { return this.start + this.span; }

  set(start, span) {
    this.span = clamp(span, SPAN_LEAST, (this.home[1] - this.home[0]) * 1.5);
    const room = this.span * 0.5;
    this.start = clamp(start, this.home[0] - room, this.home[1] + room - this.span);
  }

  zoom(factor, x) {
    const moment = this.at(x);
    const span = clamp(this.span * factor, SPAN_LEAST, (this.home[1] - this.home[0]) * 1.5);
    this.set(moment - (x / this.width) * span, span);
  }

  pan(pixels) { this.set(this.start + (pixels / this.width) * this.span, this.span); }

  fit(start = this.home[0], end = this.home[1]) {
    const margin = (end - start) * 0.05;
    if (start === this.home[0] && end === this.home[1]) this.set(start, end - start);
    else this.set(start - margin, end - start + 2 * margin);
  }

  reveal(start, end) {
    if (end < this.start + this.span * 0.02 || start > this.end - this.span * 0.02) this.set((start + end) / 2 - this.span / 2, this.span);
  }
}

/** Lanes from top to bottom: which are shown, in which order, how high. Lengths are CSS pixels. */
class Layout {
  constructor(data) {
    this.data = data;
    this.rowHeight = 16;
    this.folded = new Set();
    this.hidden = new Set();
    this.interleaved = false;
    this.kinds = new Set(data.kinds.keys());
    this.places = [];
    this.height = 0;
  }

  /** Lanes with nothing but hidden kinds vanish. */
  build() {
    const { data } = this;
    const key = (lane) => (this.interleaved ? [lane.level, lane.rank, lane.trace] : [lane.trace, lane.level, lane.rank]);
    const before = (a, b) => { const x = key(a), y = key(b); return x[0] - y[0] || x[1] - y[1] || x[2] - y[2]; };
    const lanes = data.lanes.filter((lane) => !this.hidden.has(lane.index) && (lane.empty || this.shows(lane))).sort(before);
    let top = 2;
    this.places = lanes.map((lane) => {
      const folded = this.folded.has(lane.index);
      const height = lane.empty || folded ? LANE_LEAST : max(lane.rows * this.rowHeight, LANE_LEAST);
      const place = { lane, top, height, folded };
      top += height + this.gap;
      return place;
    });
    this.height = top;
  }

  /** Between lanes: less where rows are low. */
  get gap() { return gapOf(this.rowHeight); }

  shows(lane) {
    if (this.kinds.size === this.data.kinds.length) return true;
    lane.kinds ||= new Set(this.data.kind.subarray(this.data.rowFirst[this.data.laneRow[lane.index]], this.data.rowFirst[this.data.laneRow[lane.index + 1]]));
    for (const kind of lane.kinds) if (this.kinds.has(kind)) return true;
    return false;
  }

  /** The greatest row height at which every row is in sight, or the least there is. */
  fitRows(available) {
    const rows = this.places.map(({ lane, folded }) => (folded || lane.empty ? 0 : lane.rows));
    this.rowHeight = 16;
    while (this.rowHeight > ROW_LEAST && total(rows, this.rowHeight) > available) this.rowHeight--;
    this.build();
  }

  place(lane) { return this.places.find((place) => place.lane.index === lane); }

  /** The lane at a height, or the nearest. */
  at(y) { return this.places.find((place) => y < place.top + place.height + this.gap) || this.places[this.places.length - 1]; }
}

const gapOf = (rowHeight) => (rowHeight < 6 ? 2 : 5);
const total = (rows, height) => rows.reduce((sum, count) => sum + max(count * height, LANE_LEAST) + gapOf(height), 2);
