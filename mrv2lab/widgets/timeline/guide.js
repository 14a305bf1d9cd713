// -- guide: moving through lanes, time and slices ------------------------------------------------------------------------

/** Lanes, cursor, range, selected slice and search of a view. */
class Guide extends Stage {
  // -- lanes and rows

  setRows(change) {
    this.layout.rowHeight = clamp(this.layout.rowHeight + change, ROW_LEAST, ROW_MOST);
    this.relayout();
  }

  /** Every row in view, or rows that can be read. */
  toggleRows() {
    if (this.press(this.rowsButton)) this.layout.fitRows(this.data.height); else this.layout.rowHeight = READABLE;
    this.relayout();
  }

  fold(lane) {
    const { folded } = this.layout;
    if (!folded.delete(lane)) folded.add(lane);
    this.relayout();
  }

  hideLane(lane) {
    const at = this.layout.places.findIndex((place) => place.lane.index === lane);
    const next = this.layout.places[at + 1] || this.layout.places[at - 1];
    if (at < 0 || !next) return;
    this.layout.hidden.add(lane);
    this.set("hidden_lanes", [...this.layout.hidden]);
    this.relayout();
    this.moveLane(next.lane.index);
  }

  showLanes() {
    this.layout.hidden.clear();
    this.set("hidden_lanes", []);
    this.relayout();
  }

  toggleKind(k) {
    const { kinds } = this.layout;
    if (!kinds.delete(k)) kinds.add(k);
    this.set("kinds", this.data.kinds.filter((_, i) => kinds.has(i)).map(([name]) => name));
    this.relayout();
    this.kindsBox.querySelector(`[data-kind="${this.data.kinds[k][0]}"]`)?.focus();
    this.showCount();
  }

  moveLane(lane) {
    this.cursorLane = lane;
    for (const label of this.labels.children) label.classList.toggle("now", Number(label.dataset.lane) === lane);
    const place = this.layout.place(lane);
    if (!place) return;
    if (place.top < this.scroller.scrollTop) this.scroller.scrollTop = place.top - 4;
    else if (place.top + place.height > this.scroller.scrollTop + this.height) this.scroller.scrollTop = min(place.top - 4, place.top + place.height - this.height + 8);
    const { data } = this;
    this.speak(`Lane ${place.lane.label}: ${place.lane.empty || plural(data.offsets[lane + 1] - data.offsets[lane], "slice")}${place.folded ? ", folded" : ""}`);
    this.schedule();
  }

  stepLane(direction) {
    const { places } = this.layout;
    const at = places.findIndex((place) => place.lane.index === this.cursorLane);
    if (places.length) this.moveLane(places[clamp(at + direction, 0, places.length - 1)].lane.index);
  }

  // -- cursor, range, measurement

  place(moment, y) {
    this.cursor = round(moment);
    const place = y === null ? null : this.layout.at(y + this.scroll);
    if (place && place.lane.index !== this.cursorLane) this.moveLane(place.lane.index);
    this.schedule();
  }

  moveCursor(delta, extend) {
    const from = this.cursor;
    this.cursor = round(clamp(from + delta, ...this.axis.home));
    this.axis.reveal(this.cursor, this.cursor);
    if (this.cursor < this.axis.start || this.cursor > this.axis.end) this.axis.set(this.cursor - this.axis.span / 2, this.axis.span);
    if (extend) {
      if (this.selection && (this.selection[0] === from || this.selection[1] === from)) this.anchor = this.selection[0] === from ? this.selection[1] : this.selection[0];
      else this.anchor = from;
      this.setSelection([min(this.anchor, this.cursor), max(this.anchor, this.cursor)]);
    } else this.speak("Cursor at " + group(this.cursor) + " ns" + (this.anchored ? ", " + signedText(this.cursor - this.anchor) + " from the mark" : ""));
  }

  zoom(factor) {
    const x = this.axis.x(this.cursor);
    this.axis.zoom(factor, this.focused && x >= 0 && x <= this.axis.width ? x : this.axis.width / 2);
    this.speak(timeText(this.axis.span) + " in view");
  }

  measure() {
    if (this.anchored) this.setSelection([min(this.anchor, this.cursor), max(this.anchor, this.cursor)]);
    this.anchored = !this.anchored;
    this.anchor = this.cursor;
  }

  setRange(a, b) { this.range = [round(min(a, b)), round(max(a, b))]; }

  commitRange() {
    const range = this.range;
    this.range = null;
    if (range) this.setSelection(range);
  }

  setSelection(range) {
    this.selection = range;
    this.set("selection_ns", range);
    if (!range) { this.say(""); this.speak("No range selected"); }
    this.schedule();
  }

  // -- slices

  /** Select a slice and ask Python what the file says about it. */
  pick(id, { own = true } = {}) {
    const { data } = this;
    if (!this.data) return;
    this.selected = id;
    if (own) this.set("selected_slice", id);
    if (id >= 0) {
      const p = data.posOf[id], lane = data.laneOf(id);
      if (!data.details.has(id)) this.later("ask", 60, () => this.send({ type: "details", id }));
      this.cursor = round(data.start[p]);
      if (lane.index !== this.cursorLane) this.moveLane(lane.index);
      this.axis.reveal(data.start[p], data.end[p]);
      this.speak(`${data.nameOf(p)}, ${data.kinds[data.kind[p]][0]}, ${timeText(data.end[p] - data.start[p])}, ${lane.label}`);
    }
    drawDetails(this);
    this.moved();
  }

  /** The shown slice at a point of the picture, or the nearest within 3 px; -1: none. */
  hit(x, y) {
    const { data, layout, axis } = this;
    const at = y + this.scroll;
    const place = layout.places.find(({ top, height }) => at >= top && at < top + height);
    if (!place || place.lane.empty) return -1;
    const [first, last] = [data.laneRow[place.lane.index], data.laneRow[place.lane.index + 1]];
    const row = first + floor(((at - place.top) * this.ratio) / this.rowPixels);
    const moment = axis.at(x), reach = (3 * axis.span) / axis.width;
    let best = -1, far = Infinity;
    for (let one = place.folded ? first : row; one < (place.folded ? last : min(row + 1, last)); one++) {
      for (let p = data.firstAfter(one, moment - reach - 1); p < data.rowFirst[one + 1] && data.start[p] <= moment + reach; p++) {
        const distance = max(data.start[p] - moment, moment - data.end[p], 0);
        if (this.tone[p] !== HIDE && distance <= reach && distance < far) [best, far] = [p, distance];
      }
    }
    return best < 0 ? -1 : data.idOf[best];
  }

  /** Where a slice is drawn, in device pixels; null if its lane is hidden. */
  boxOf(id) {
    const { data, axis, ratio: r } = this;
    const p = data.posOf[id];
    const place = this.layout.place(data.laneOf(id).index);
    if (!place) return null;
    const top = round((place.top - this.scroll) * r);
    const row = place.folded ? 0 : data.rowOf(p) - data.laneRow[place.lane.index];
    const x = (moment) => clamp(axis.x(moment) * r, -1e4, 1e5);
    return { left: x(data.start[p]), right: x(data.end[p]), y: top + row * this.rowPixels, height: place.folded ? place.height * r : this.rowPixels };
  }

  zoomTo(id) {
    const p = this.data.posOf[id];
    this.axis.fit(this.data.start[p] - 1, this.data.end[p] + 1);
    this.moved();
  }

  zoomToSelection() {
    if (this.selection) this.axis.fit(...this.selection); else if (this.selected >= 0) this.zoomTo(this.selected);
  }

  pickAtCursor() {
    const { data } = this;
    const place = this.layout.place(this.cursorLane);
    if (!place || place.lane.empty) return;
    let best = -1;
    for (let row = data.laneRow[place.lane.index]; row < data.laneRow[place.lane.index + 1]; row++) {
      const p = data.firstAfter(row, this.cursor - 1);
      // The lowest row is the innermost
      if (p < data.rowFirst[row + 1] && data.start[p] <= this.cursor && this.tone[p] !== HIDE) best = p;
    }
    if (best >= 0) this.pick(data.idOf[best]); else this.speak("No slice at the cursor on this lane");
  }

  /** The next or previous shown slice of the cursor's lane. */
  stepSlice(direction) {
    const { data, selected, cursorLane: lane } = this;
    if (lane < 0) return;
    const [first, last] = [data.offsets[lane], data.offsets[lane + 1]];
    let id = selected;
    if (id < first || id >= last) {
      const start = (i) => data.start[data.posOf[i]];
      let low = first, high = last;
      while (low < high) { const middle = (low + high) >>> 1; if (start(middle) < this.cursor) low = middle + 1; else high = middle; }
      id = direction > 0 ? low - 1 : low;
    }
    do id += direction; while (id >= first && id < last && this.tone[data.posOf[id]] === HIDE);
    if (id >= first && id < last) this.pick(id); else this.speak(direction > 0 ? "Last slice of the lane" : "First slice of the lane");
  }

  stepMark(direction) {
    const marks = this.data.marks.filter((mark) => (mark[0] - this.cursor) * direction > 0);
    if (!marks.length) return this.tell(this.data.marks.length ? "No more marks" : "There are no marks: none were given as marks=");
    const mark = marks.reduce((best, one) => ((one[0] - best[0]) * direction < 0 ? one : best));
    this.cursor = mark[0];
    this.axis.reveal(mark[0], mark[1]);
    this.moveLane(mark[4]);
    this.tell(markText(mark));
  }

  /** The mark whose glyph is at a point of the picture. */
  markAt(x, y) {
    return this.data.marks.find(([start, , , , lane]) => {
      const top = abs(this.axis.x(start) - x) < 8 && this.layout.place(lane)?.top;
      return Number.isFinite(top) && y + this.scroll >= top && y + this.scroll < top + 13;
    });
  }

  tip(text, event) {
    this.tipBox.hidden = !text;
    if (!text) return;
    const box = this.frameBox.getBoundingClientRect();
    this.tipBox.textContent = text;
    const left = clamp(event.clientX - box.left + 12, 0, max(box.width - this.tipBox.offsetWidth, 0));
    this.tipBox.style.transform = `translate(${left}px, ${event.clientY - box.top + 16}px)`;
  }

  /** What is at a point, in a few words. */
  describe(x, y) {
    const { data } = this;
    const mark = this.markAt(x, y);
    if (mark) return markText(mark);
    const id = this.hit(x, y), p = data.posOf[id];
    return id < 0 ? "" : `${data.nameOf(p)}  ${timeText(data.end[p] - data.start[p])}`;
  }

  // -- search

  find() {
    if (!this.data) return;
    const wrong = this.search.set(this.searchBox.value, this.regexButton.getAttribute("aria-pressed") === "true");
    this.search.paint(this.layout);
    this.showCount(wrong);
    // How much is selected is no answer to a search.
    if (this.searchBox.value && this.selection) this.say("");
    this.moved();
  }

  showCount(wrong = "") { this.hitBox.textContent = wrong || (this.search.hits ? plural(this.search.count, "hit") : ""); }

  findNext(direction) {
    if (!this.data) return;
    clearTimeout(this.timers.search);
    this.find();
    if (!this.search.hits || !this.search.count) return;
    const { id, number } = this.search.next(this.selected, direction);
    this.pick(id);
    this.hitBox.textContent = `${group(number)} of ${plural(this.search.count, "hit")}`;
  }

  help() {
    this.helpBox.hidden = !this.helpBox.hidden;
    this.helpButton.setAttribute("aria-expanded", String(!this.helpBox.hidden));
    (this.helpBox.hidden ? this.scroller : this.helpBox).focus();
  }
}
