// -- search: which slices are drawn, and which of them are found ---------------------------------------------------------

/** Tones of every position: hidden, plain, or dim because a search does not find it. Names are tested once each. */
class Search {
  constructor(data) {
    this.data = data;
    this.tone = new Uint8Array(data.length);
    this.hits = null;
    this.count = 0;
  }

  /** @param {string} text @param {boolean} regex @returns {string} a sentence if it cannot be searched for */
  set(text, regex) {
    let test = null;
    if (text && regex) {
      try { const pattern = new RegExp(text, "i"); test = (name) => pattern.test(name); } catch (error) { return "No regular expression: " + error.message; }
    } else if (text) {
      const low = text.toLowerCase();
      test = (name) => name.toLowerCase().includes(low);
    }
    this.hits = test ? Uint8Array.from(this.data.names, (name) => (test(name) ? 1 : 0)) : null;
    return "";
  }

  /** After a change of search, kinds or lanes. @param {Layout} layout */
  paint(layout) {
    const { data, tone, hits } = this;
    const { kind, name } = data;
    const half = data.kinds.length * SHADES;
    const shown = data.kinds.map((_, k) => layout.kinds.has(k));
    let count = 0;
    for (let p = 0; p < tone.length; p++) {
      const k = kind[p];
      if (!shown[k]) { tone[p] = HIDE; continue; }
      const plain = k * SHADES + (name[p] % SHADES);
      if (hits === null) tone[p] = plain;
      else if (hits[name[p]]) { tone[p] = plain; count++; } else tone[p] = plain + half;
    }
    this.count = count;
  }

  found(p) { return this.hits[this.data.name[p]] && this.tone[p] !== HIDE; }

  /** The next hit in order of start, around the end. @returns {{id: number, number: number}} its number counts from 1 */
  next(id, direction) {
    const { data } = this;
    const here = id >= 0 ? data.posOf[id] : -1;
    const moment = here >= 0 ? data.start[here] : direction > 0 ? -Infinity : Infinity;
    const after = (p, q) => (data.start[p] - data.start[q] || p - q) > 0;
    const beyond = (p) => (data.start[p] - moment || p - here) * direction > 0;
    let best = -1, wrapped = -1;
    for (let p = 0; p < data.length; p++) {
      if (!this.found(p)) continue;
      if (wrapped < 0 || after(wrapped, p) === direction > 0) wrapped = p;
      if (beyond(p) && (best < 0 || after(best, p) === direction > 0)) best = p;
    }
    const chosen = best >= 0 ? best : wrapped;
    let number = 0;
    for (let p = 0; p < data.length; p++) if (this.found(p) && !after(p, chosen)) number++;
    return { id: chosen >= 0 ? data.idOf[chosen] : -1, number };
  }
}
