// -- stage: the elements of a view, their sizes, and one frame ---------------------------------------------------------

// Height of the minimap, CSS pixels.
const MAP = 36;
// Width of the labels: a character, least, most, least on a narrow page; who drags may go beyond
const CHAR = 6.7, LEFT = 156, WIDE_LEFT = 250, NARROW_LEFT = 96;

/** What a view is made of and how it is drawn; what is in sight is set by its heirs. */
class Stage {
  later(name, ms, what) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(what, ms);
  }

  build(el) {
    const act = (what) => () => { if (this.data) { what(); this.moved(); } };
    this.searchBox = h("input", { type: "search", placeholder: "search names…", "aria-label": "Search names", oninput: () => this.later("search", 120, () => this.find()) });
    this.regexButton = button(".*", "Regular expression", () => { this.press(this.regexButton); this.find(); }, { "aria-pressed": "false" });
    this.hitBox = h("span", { class: "mx-tl-note", role: "status" });
    this.rowsButton = button("All rows", "All rows in view, or readable rows", act(() => this.toggleRows()), { class: "word", "aria-pressed": "false" });
    this.mixButton = button("A beside B", "A beside B: each lane of A above the same lane of B", act(() => { this.layout.interleaved = this.press(this.mixButton); this.relayout(); }), { class: "word", "aria-pressed": "false", hidden: true });
    this.tableButton = button("Table", "Show the table of what is in sight", () => { this.table.classList.toggle("mx-tl-hidden", !this.press(this.tableButton)); }, { class: "word", "aria-pressed": "false" });
    this.allButton = button("", "Show all lanes", () => this.showLanes(), { class: "word", hidden: true });
    this.helpButton = button("?", "Keys", () => this.help(), { "aria-expanded": "false", class: "mx-tl-last" });
    this.kindsBox = h("div", { class: "mx-tl-bar", role: "group", "aria-label": "Kinds of events shown" });
    this.titles = h("div", "mx-tl-bar");
    this.helpBox = h("section", { class: "mx-tl-help", hidden: true, tabindex: -1, "aria-label": "Keys" }, h("dl", {}, ...KEYS.map(([key, text]) => h("div", {}, h("dt", {}, key), h("dd", {}, text)))));
    this.status = h("p", { class: "mx-tl-status", role: "status" });
    this.live = h("p", { class: "mx-tl-hidden", "aria-live": "polite" });
    this.map = h("canvas", { class: "mx-tl-map", "aria-hidden": "true" });
    this.mapBox = h("div", { class: "mx-tl-window", "aria-hidden": "true" });
    this.sides = h("div", "mx-tl-sides");
    this.mapSides = h("div", "mx-tl-sides");
    this.top = h("canvas", { class: "mx-tl-top", "aria-hidden": "true" });
    this.canvas = h("canvas", { class: "mx-tl-canvas", "aria-hidden": "true" });
    this.labels = h("div", "mx-tl-labels");
    this.inner = h("div", "mx-tl-inner", this.canvas, this.labels);
    this.scroller = h("div", {
      class: "mx-tl-scroll", role: "application", tabindex: 0, "aria-label": "Timeline. Press ? for keys.",
      onscroll: () => this.moved(), onfocus: () => { this.focused = true; this.schedule(); }, onblur: () => { this.focused = false; this.schedule(); },
    }, this.inner);
    this.edge = h("div", {
      class: "mx-tl-edge", role: "separator", tabindex: 0, "aria-orientation": "vertical", "aria-label": "Width of the labels", title: "Width of the labels: drag, or ← →",
      onpointerdown: (event) => this.edge.setPointerCapture(event.pointerId),
      onpointermove: (event) => { if (event.buttons) this.setLeft(event.clientX - this.frameBox.getBoundingClientRect().left); },
      onkeydown: (event) => {
        const by = { ArrowLeft: -16, ArrowRight: 16 }[event.key];
        if (!by) return;
        this.setLeft(Number(this.edge.getAttribute("aria-valuenow")) + by);
        event.preventDefault();
        event.stopPropagation();
      },
    });
    this.tipBox = h("div", { class: "mx-tl-tip", hidden: true, "aria-hidden": "true" });
    this.frameBox = h("section", { class: "mx-tl-frame", "data-panel": "timeline", "aria-label": "Timeline" }, h("div", "mx-tl-toprow", this.mapSides, h("div", "mx-tl-maprow", this.map, this.mapBox)), h("div", "mx-tl-toprow", this.sides, this.top), this.scroller, this.edge, this.tipBox);
    this.details = h("section", { class: "mx-tl-details", hidden: true, tabindex: 0, "aria-label": "Selected slice" });
    this.table = h("section", { class: "mx-tl-table mx-tl-hidden", tabindex: -1, "aria-label": "What is in sight, as tables" });
    this.root = h("div", { class: "mx-tl", role: "group", "aria-label": "Timeline", "data-lm-suppress-shortcuts": "true" },
      h("div", "mx-tl-bar", button("−", "Zoom out", act(() => this.zoom(1 / 0.6))), button("+", "Zoom in", act(() => this.zoom(0.6))), button("Fit", "Show everything", act(() => this.axis.fit()), { class: "word" }),
        this.rowsButton, this.mixButton, h("span", "mx-tl-group", this.searchBox, this.regexButton, button("↑", "Previous hit", () => this.findNext(-1)), button("↓", "Next hit", () => this.findNext(1)), this.hitBox), this.allButton, this.tableButton, this.helpButton),
      this.titles, this.kindsBox, this.helpBox, this.status, this.frameBox, this.details, this.table, this.live);
    this.root.addEventListener("keydown", (event) => onKey(this, event));
    el.append(this.root);
  }

  /** Turn a toggle button. @returns {boolean} its new state */
  press(toggle) {
    const on = toggle.getAttribute("aria-pressed") !== "true";
    toggle.setAttribute("aria-pressed", String(on));
    return on;
  }

  say(text) { if (this.status.textContent !== text) this.status.textContent = text; }

  /** In the status line and aloud. */
  tell(text) { this.say(text); this.speak(text); }

  /** One sentence for screen readers, once things have come to rest. */
  speak(text) { this.later("speak", 250, () => { this.live.textContent = text; }); }

  // -- frames

  schedule() { this.frame ||= requestAnimationFrame(() => this.draw()); }

  /** The picture changed: draw, and once it rests bring the tables up to date. */
  moved() {
    this.schedule();
    this.later("rest", 350, () => { if (this.data) drawTable(this); });
  }

  relayout() {
    this.search.paint(this.layout);
    this.layout.build();
    const hidden = this.layout.hidden.size;
    this.allButton.hidden = !hidden;
    this.allButton.textContent = plural(hidden, "lane") + " hidden: show";
    this.mapDirty ||= 1;
    this.sized = false;
    drawKinds(this);
    drawLabels(this);
    this.moved();
  }

  setLeft(pixels) {
    this.left = max(pixels, 1);
    this.sized = false;
    this.moved();
  }

  /** Room for the labels: what was asked for, else what the longest takes, but not much of a narrow page. */
  fitLabels() {
    const room = this.frameBox.clientWidth;
    const longest = max(0, ...this.layout.places.map(({ lane }) => lane.label.length));
    const left = round(clamp(this.left || min(clamp(CHAR * longest + 24, LEFT, WIDE_LEFT), max(0.27 * room, NARROW_LEFT)), 48, 0.7 * room));
    this.frameBox.style.setProperty("--left", left + "px");
    for (const [name, value] of [["now", left], ["min", 48], ["max", round(0.7 * room)]]) this.edge.setAttribute("aria-value" + name, value);
  }

  resize() {
    const { data, overlay } = this;
    this.sized = true;
    this.palette.read(this.root);
    this.ratio = window.devicePixelRatio || 1;
    // It grows with its lanes and never shrinks under the reader's hand.
    this.height = clamp(max(this.layout.height, this.height), 60, data.height);
    this.scroller.style.height = this.height + "px";
    this.fitLabels();
    const width = (this.axis.width = max(this.canvas.clientWidth, 40));
    const size = (canvas, height) => {
      canvas.style.height = height + "px";
      const pixels = [round(width * this.ratio), round(height * this.ratio)];
      if (canvas.width !== pixels[0]) { canvas.width = pixels[0]; if (canvas === this.map) this.mapDirty = 2; }
      if (canvas.height !== pixels[1]) canvas.height = pixels[1];
    };
    size(this.canvas, this.height);
    for (const canvas of [this.top, this.map]) canvas.style.width = width + "px";
    size(this.top, overlay.rulers().reduce((sum, [, height]) => sum + height, 0));
    size(this.map, MAP);
    this.rowPixels = max(1, floor(this.layout.rowHeight * this.ratio));
  }

  draw() {
    this.frame = 0;
    // A view that is not on the page yet has neither size nor colours; it is told when it has.
    if (!this.data || !this.canvas.clientWidth) return;
    if (!this.sized || this.ratio !== (window.devicePixelRatio || 1)) this.resize();
    this.scroll = this.scroller.scrollTop;
    const { canvas, painter, axis, ratio: r, data } = this;
    const ctx = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    painter.resize(canvas.width, canvas.height, round(r));
    const places = this.layout.places.map((place) => ({ lane: place.lane, folded: place.folded, top: round((place.top - this.scroll) * r), height: round(place.height * r) }));
    const labels = painter.paint(data, this.tone, this.palette, places, this.rowPixels, axis.start, canvas.width / axis.span, 11 * r);
    ctx.putImageData(painter.image, 0, 0);
    this.overlay.draw(ctx, labels, this.rowPixels);
    this.overlay.drawRulers(this.top.getContext("2d", { alpha: false }));
    this.drawWindow();
    if (this.mapDirty > 1) this.drawMap(); else if (this.mapDirty) this.timers.map ||= setTimeout(() => { this.timers.map = 0; this.drawMap(); }, 150);
    if (this.first) {
      this.first = false;
      // A task behind the next frame: by then it is painted, which is what a person waits for.
      requestAnimationFrame(() => setTimeout(() => performance.measure("mrv2lab-timeline-first-paint", "mrv2lab-timeline-data")));
    }
  }

  /** The part in sight, over the minimap. */
  drawWindow() {
    const { home, start, span, width } = this.axis;
    const scale = width / (home[1] - home[0]);
    const left = clamp((start - home[0]) * scale, 0, width - 3), right = clamp((start + span - home[0]) * scale, left + 3, width);
    this.mapBox.style.transform = `translateX(${left}px)`;
    this.mapBox.style.width = right - left + "px";
  }

  drawMap() {
    this.mapDirty = 0;
    const { map, mapPainter, axis, data } = this;
    mapPainter.resize(map.width, map.height);
    // A band a level; of two runs, A above B, one for the host and one for the device.
    const bands = [];
    for (const lane of data.lanes) {
      const key = data.traces.length > 1 ? 2 * lane.trace + (lane.level > 4) : lane.level;
      if (bands.at(-1)?.key !== key) bands.push({ key, lane });
      bands.at(-1).until = lane.index + 1;
    }
    const each = map.height / bands.length;
    const places = bands.map((band, i) => ({ ...band, folded: true, top: floor(i * each), height: floor((i + 1) * each) - floor(i * each) - 1 }));
    mapPainter.paint(data, this.tone, this.palette, places, 1, axis.home[0], map.width / (axis.home[1] - axis.home[0]), Infinity);
    map.getContext("2d", { alpha: false }).putImageData(mapPainter.image, 0, 0);
  }
}
