// -- the view of a model: messages, state, life ------------------------------------------------------------------------

// Row heights; and the rows from which a lane starts folded where not all fit.
const READABLE = 15, TOO_LOW = 8, DEEP = 12;
// ms until a page without data asks, where Python is about to send it.
const WAIT = 8000;

class View extends Guide {
  constructor(model, el) {
    super();
    this.model = model;
    this.store = storeOf(model);
    this.data = null;
    this.selected = this.cursorLane = -1;
    this.selection = this.range = null;
    this.cursor = this.anchor = this.scroll = 0;
    this.height = this.left = 0;
    this.ratio = 1;
    this.anchored = this.focused = this.sized = false;
    this.timers = {};
    this.painter = new Painter();
    this.mapPainter = new Painter();
    this.overlay = new Overlay(this);
    this.build(el);
    this.pointer = new Pointer(this);
    this.listeners = ["selection_ns", "kinds", "hidden_lanes", "selected_slice"].map((name) => ["change:" + name, () => this.pull()]);
    for (const [event, callback] of this.listeners) model.on(event, callback);
    this.observer = new ResizeObserver(() => { this.sized = false; this.schedule(); });
    this.observer.observe(this.frameBox);
    this.themes = ["(prefers-color-scheme: dark)", "(forced-colors: active)"].map((query) => matchMedia(query));
    this.restyle = () => { if (this.data) { this.palette.read(this.root); this.mapDirty ||= 1; this.moved(); } };
    for (const theme of this.themes) theme.addEventListener("change", this.restyle);
    this.watcher = new MutationObserver(this.restyle);
    for (const node of [document.documentElement, document.body]) this.watcher.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-jp-theme-light", "data-jp-theme-name", "data-theme"] });
    this.store.views.add(this);
    if (this.store.data) this.ready();
    else if (this.store.error) this.say(this.store.error);
    else {
      this.say("Waiting for the data of this timeline…");
      this.later("late", 3000, () => this.say("No answer from Python yet: a kernel that is busy answers when it is done. Without one, run the cell again."));
    }
  }

  destroy() {
    this.store.views.delete(this);
    for (const [event, callback] of this.listeners) this.model.off(event, callback);
    for (const theme of this.themes) theme.removeEventListener("change", this.restyle);
    for (const id of Object.values(this.timers)) clearTimeout(id);
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
    this.watcher.disconnect();
    this.root.remove();
    this.data = this.search = this.layout = this.painter = this.mapPainter = null;
  }

  // -- messages and state

  receive(content) {
    if (content.type === "data") this.store.error ? this.say(this.store.error) : this.ready();
    else if (content.type === "details" && content.id === this.selected) { drawDetails(this); this.schedule(); }
    else if (content.type === "selection") this.tell(content.text);
    else if (content.type === "show" && this.data) { this.axis.set(content.start, content.end - content.start); this.moved(); }
    else if (content.type === "status") this.say(content.text);
  }

  /** Data is there: everything anew. */
  ready() {
    clearTimeout(this.timers.late);
    const data = (this.data = this.store.data);
    this.palette = new Palette(this.root, data.kinds);
    this.axis = new Axis(data.domain);
    this.layout = new Layout(data);
    this.search = new Search(data);
    this.tone = this.search.tone;
    if (data.view) this.axis.set(data.view[0], data.view[1] - data.view[0]);
    this.cursor = (data.view || data.domain)[0];
    this.say(data.length ? data.note : data.lanes.map((lane) => lane.empty).filter(Boolean)[0] || "");
    this.mixButton.hidden = data.traces.length < 2;
    this.titles.replaceChildren(...data.traces.map((trace, i) => h("span", "mx-tl-title", ...(data.traces.length > 1 ? [h("b", "mx-tl-chip", "AB"[i])] : []), h("strong", {}, visible(trace.title)), ...(trace.modelled ? [h("span", "mx-tl-badge", "modelled")] : []))));
    const beside = (rulers) => rulers.map(([text, height]) => h("span", { title: text, style: `height:${height}px` }, text));
    this.sides.replaceChildren(...beside(this.overlay.rulers()));
    this.mapSides.replaceChildren(...beside(data.traces.map((_, i) => [data.chip(i) + "overview", MAP / data.traces.length])));
    this.takeState();
    this.layout.build();
    this.layout.fitRows(data.height);
    if (this.layout.rowHeight < TOO_LOW) {
      for (const lane of data.lanes) if (lane.rows > DEEP) this.layout.folded.add(lane.index);
      this.layout.fitRows(data.height);
      if (this.layout.rowHeight < TOO_LOW) { this.layout.rowHeight = READABLE; this.layout.build(); }
    }
    this.cursorLane = this.layout.places.length ? this.layout.places[0].lane.index : -1;
    this.first = true;
    this.relayout();
    this.pull();
  }

  takeState() {
    const kinds = new Set(this.model.get("kinds") || []);
    this.layout.kinds = new Set(this.data.kinds.map((_, k) => k).filter((k) => kinds.has(this.data.kinds[k][0])));
    this.layout.hidden = new Set(this.model.get("hidden_lanes") || []);
    const range = this.model.get("selection_ns");
    this.selection = range && range.length === 2 ? [range[0], range[1]] : null;
  }

  /** Take over the state of the model: Python or another view of it may have changed it. */
  pull() {
    if (!this.data) return;
    const before = [...this.layout.kinds, "|", ...this.layout.hidden].join();
    this.takeState();
    if (before !== [...this.layout.kinds, "|", ...this.layout.hidden].join()) this.relayout();
    const id = this.model.get("selected_slice") ?? -1;
    if (id !== this.selected && id < this.data.length) this.pick(id, { own: false });
    this.moved();
  }

  set(name, value) {
    this.model.set(name, value);
    this.later("save", 60, () => this.model.save_changes());
  }

  send(message) {
    try { this.model.send(message); } catch (error) { this.say("There is no kernel to ask: run the cell again. " + error); }
  }
}

/** Listen for data before there is a view: a page that had to ask would wait for every cell queued in the kernel. */
function listen(model) {
  const store = storeOf(model);
  if (store.listening) return store;
  store.listening = (content, buffers) => receive(store, content, buffers || []);
  model.on("msg:custom", store.listening);
  const ask = () => { if (!store.data && store.listening) try { model.send({ type: "ready" }); } catch { /* the view says that nobody answers */ } };
  // Where data was sent before this page was there (a reload), it has to ask; else it is on its way.
  if (model.get("pushed")) ask(); else store.asking = setTimeout(ask, WAIT);
  return store;
}

export default {
  initialize({ model }) {
    const store = listen(model);
    return () => {
      clearTimeout(store.asking);
      model.off("msg:custom", store.listening);
      store.listening = store.data = null;
      STORES.delete(model.get("channel"));
    };
  },
  /** @param {{model: any, el: HTMLElement}} context one view of one model; @returns its clean-up */
  render({ model, el }) {
    listen(model);
    const view = new View(model, el);
    return () => view.destroy();
  },
};
