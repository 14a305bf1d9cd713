// -- painter: slices into pixels --------------------------------------------------------------------------------------

// Device pixels from which a slice is drawn on its own; smaller ones add to their column
const WIDE = 2;

/**
 * One line of pixels a row, copied to the row's height, all of it put on the canvas at once: a fillRect a slice would
 * take 15 times as long (measured at 200 rows: 268 ms against 18). Everything here is in device pixels.
 */
class Painter {
  constructor() { this.width = this.height = 0; }

  /** `pen`: width of hatch lines. */
  resize(width, height, pen = 1) {
    this.pen = pen;
    if (width === this.width && height === this.height) return;
    Object.assign(this, { width, height });
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.line = new Uint32Array(width);
    this.edge = new Uint32Array(width);
    this.cover = new Float32Array(width);
    this.longest = new Float32Array(width).fill(-1);
    this.tint = new Uint8Array(width);
  }

  /**
   * @param {Data} data @param {Uint8Array} tone of each position @param {Palette} palette
   * @param {{lane: object, top: number, height: number, folded: boolean, until?: number}[]} places in device pixels, top may
   *   be negative; `until`: the lanes before this one too
   * @param {number} rowHeight @param {number} start ns at the left @param {number} scale pixels a ns @param {number} labels
   *   least row height for labels
   * @returns {number[]} x, right end, y, position of each slice with room for a label, flat
   */
  paint(data, tone, palette, places, rowHeight, start, scale, labels) {
    this.labels = [];
    const { width, height, pixels } = this;
    let done = 0;
    places.forEach((place, i) => {
      const top = max(place.top, 0), bottom = min(place.top + place.height, height);
      if (top >= bottom) return;
      pixels.fill(palette.bgBits, done * width, top * width);
      done = bottom;
      const first = data.laneRow[place.lane.index], last = data.laneRow[place.until ?? place.lane.index + 1];
      const stripe = i % 2 ? palette.stripeBits : palette.bgBits;
      if (bottom < height) pixels.fill(palette.lineBits, bottom * width, ++done * width);
      if (place.folded) {
        this.blank(stripe);
        for (let row = last - 1; row >= first; row--) this.row(data, tone, palette, row, start, scale, null);
        this.flush(palette, top, bottom, false);
      } else {
        const used = clamp(place.top + (last - first) * rowHeight, top, bottom);
        pixels.fill(stripe, used * width, bottom * width);
        for (let row = first; row < last; row++) {
          const y = place.top + (row - first) * rowHeight;
          if (y >= height) break;
          if (y + rowHeight <= 0) continue;
          this.blank(stripe);
          const bar = rowHeight - (rowHeight > 3 ? 1 : 0);
          if (bar < rowHeight && y + bar >= 0 && y + bar < height) pixels.fill(stripe, (y + bar) * width, (y + bar + 1) * width);
          const hatched = this.row(data, tone, palette, row, start, scale, rowHeight >= labels ? y : null);
          this.flush(palette, max(y, 0), min(y + bar, height), bar >= 8 && y >= 0, hatched, y);
        }
      }
    });
    pixels.fill(palette.bgBits, done * width);
    return this.labels;
  }

  blank(bits) {
    this.line.fill(bits);
    this.edge.fill(bits);
    this.low = this.width;
    this.high = -1;
  }

  /** One row into the line. `y` is where labels go; null: none. @returns {number[] | null} hatched slices: x, end, tone */
  row(data, tone, palette, row, start, scale, y) {
    const { width, line, edge, cover, longest, tint, labels } = this;
    const starts = data.start, ends = data.end, tones = palette.tones;
    const last = data.rowFirst[row + 1], until = start + width / scale;
    let hatched = null;
    for (let p = data.firstAfter(row, start - 1); p < last; p++) {
      if (starts[p] >= until) break;
      const kind = tone[p];
      if (kind === HIDE) continue;
      const a = (starts[p] - start) * scale, b = (ends[p] - start) * scale;
      if (b < 0) continue;
      const size = b - a;
      if (size < WIDE) {
        const x = a < 0 ? 0 : a | 0;
        if (longest[x] < 0) {
          cover[x] = size;
          longest[x] = size;
          tint[x] = kind;
          if (x < this.low) this.low = x;
          if (x > this.high) this.high = x;
        } else {
          cover[x] += size;
          if (size > longest[x]) { longest[x] = size; tint[x] = kind; }
        }
        continue;
      }
      const left = a < 0 ? 0 : a | 0, right = b > width ? width : max(b | 0, left + 1);
      const look = tones[kind];
      line.fill(look.bits, left, right);
      edge.fill(look.edge, left, right);
      if (a >= 0) line[left] = look.edge;
      if (b <= width && right - left > 3) line[right - 1] = look.edge;
      if (y === null || right - left < 12) continue;
      labels.push(left, right, y, p);
      if (look.hatch) (hatched ||= []).push(left, right, kind);
    }
    return hatched;
  }

  /** The line, with the columns of small slices on top, to the pixels from y to bottom. */
  flush(palette, y, bottom, framed, hatched, top) {
    const { width, line, edge, cover, longest, tint, pixels } = this;
    for (let x = this.low; x <= this.high; x++) {
      if (longest[x] < 0) continue;
      const level = cover[x] >= 1 ? 63 : (cover[x] * 63) | 0;
      line[x] = edge[x] = palette.levels[tint[x] * 64 + level];
      longest[x] = -1;
    }
    for (let at = y; at < bottom; at++) pixels.set(framed && (at === y || at === bottom - 1) ? edge : line, at * width);
    if (!hatched || bottom - y < 6) return;
    for (let i = 0; i < hatched.length; i += 3) this.hatch(palette.tones[hatched[i + 2]], hatched[i] + 1, hatched[i + 1] - 1, y + 1, bottom - 1, top);
  }

  hatch(look, left, right, y, bottom, top) {
    const { width, pixels, pen } = this;
    const step = 4 * pen + 1;
    for (; y < bottom; y++) {
      if (look.hatch === "level") {
        if ((y - top) % step < pen) pixels.fill(look.hatchBits, y * width + left, y * width + right);
        continue;
      }
      const shift = look.hatch === "diagonal" ? y - top : 0;
      for (let x = left - ((left + shift) % step); x < right; x += step) pixels.fill(look.hatchBits, y * width + max(x, left), y * width + max(min(x + pen, right), left));
    }
  }
}
