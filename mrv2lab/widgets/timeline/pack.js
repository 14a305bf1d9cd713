// -- pack: the slices of a lane into rows of disjoint stretches -------------------------------------------------------

/** Rows of one lane: the lowest row that is free at a moment, by a tree of the least end below each node. */
class FreeRows {
  constructor() {
    this.size = 8;
    this.ends = new Float64Array(2 * this.size).fill(-Infinity);
    this.count = 0;
  }

  /** Take the lowest row that is free at `start` until `end`. @returns {number} its number */
  take(start, end) {
    if (this.ends[1] > start) this.grow();
    const ends = this.ends;
    let node = 1;
    while (node < this.size) {
      node *= 2;
      if (ends[node] > start) node++;
    }
    const row = node - this.size;
    ends[node] = end;
    for (node >>= 1; node; node >>= 1) ends[node] = min(ends[2 * node], ends[2 * node + 1]);
    if (row >= this.count) this.count = row + 1;
    return row;
  }

  grow() {
    const old = this.ends.subarray(this.size);
    const taken = old.slice();
    this.size *= 2;
    this.ends = new Float64Array(2 * this.size).fill(-Infinity);
    this.ends.set(taken, this.size);
    for (let node = this.size - 1; node; node--) this.ends[node] = min(this.ends[2 * node], this.ends[2 * node + 1]);
  }
}

/**
 * Greedy rows: each slice goes to the lowest row of its lane that is free when it starts. Without a cap on rows, each
 * row's slices are disjoint, so that starts and ends both rise and binary search is right. A moment takes 1 ns.
 * @param {Float64Array} start @param {Uint32Array | Float64Array} duration sorted by lane, start, falling duration
 * @param {number[]} offsets [lanes + 1]
 * @returns {{laneRow: Uint32Array, rowFirst: Uint32Array, idOf: Uint32Array, posOf: Uint32Array}} first row of each lane
 *   [lanes + 1], first position of each row [rows + 1], slice of a position, position of a slice
 */
function packRows(start, duration, offsets) {
  const n = start.length;
  const lanes = offsets.length - 1;
  const rowOf = new Uint32Array(n);
  const laneRow = new Uint32Array(lanes + 1);
  for (let lane = 0; lane < lanes; lane++) {
    const free = new FreeRows();
    const base = laneRow[lane];
    for (let i = offsets[lane]; i < offsets[lane + 1]; i++) rowOf[i] = base + free.take(start[i], start[i] + max(duration[i], 1));
    laneRow[lane + 1] = base + max(free.count, 1);
  }
  const rowFirst = new Uint32Array(laneRow[lanes] + 1);
  for (let i = 0; i < n; i++) rowFirst[rowOf[i] + 1]++;
  for (let row = 0; row < laneRow[lanes]; row++) rowFirst[row + 1] += rowFirst[row];
  const next = rowFirst.slice();
  const idOf = new Uint32Array(n);
  const posOf = new Uint32Array(n);
  for (let i = 0; i < n; i++) {
    const position = next[rowOf[i]]++;
    idOf[position] = i;
    posOf[i] = position;
  }
  return { laneRow, rowFirst, idOf, posOf };
}
