// -- pointer: mouse, pen and fingers -----------------------------------------------------------------------------------

// Px of movement below which a press is a click
const CLICK = 4;

/** Wheel and pointer events of a view's picture and minimap. */
class Pointer {
  constructor(view) {
    this.view = view;
    this.downs = new Map();
    const { canvas, map, scroller, top } = view;
    scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    top.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    for (const target of [canvas, top]) {
      target.addEventListener("pointerdown", (event) => this.down(event));
      target.addEventListener("pointermove", (event) => this.move(event));
      for (const name of ["pointerup", "pointercancel"]) target.addEventListener(name, (event) => this.up(event, name === "pointerup"));
    }
    canvas.addEventListener("pointerleave", () => view.tip(""));
    canvas.addEventListener("dblclick", (event) => { const id = view.data ? view.hit(this.x(event), this.y(event)) : -1; if (id >= 0) view.zoomTo(id); });
    map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); this.jump(event); });
    map.addEventListener("pointermove", (event) => { if (event.buttons) this.jump(event); });
  }

  x(event) { return event.clientX - this.view.canvas.getBoundingClientRect().left; }

  y(event) { return event.clientY - this.view.canvas.getBoundingClientRect().top; }

  /** Ctrl zooms at the pointer, Shift and a sideways wheel pan; without either the lanes or the page scroll. */
  wheel(event) {
    const { view } = this;
    if (!view.data) return;
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.ctrlKey || event.metaKey) view.axis.zoom(Math.exp(clamp(event.deltaY * unit, -200, 200) * 0.004), this.x(event));
    else if (event.shiftKey || abs(event.deltaX) > abs(event.deltaY)) view.axis.pan((event.deltaX || event.deltaY) * unit);
    else return;
    event.preventDefault();
    view.moved();
  }

  down(event) {
    const { view } = this;
    if (event.button || !view.data) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    view.scroller.focus({ preventScroll: true });
    const x = this.x(event);
    this.downs.set(event.pointerId, { x, y: event.clientY });
    this.far = this.downs.size > 1;
    this.origin = { x, y: event.clientY, moment: view.axis.at(x), scroll: view.scroller.scrollTop, ranging: event.shiftKey };
    view.place(view.axis.at(x), event.currentTarget === view.canvas ? this.y(event) : null);
  }

  move(event) {
    const { view } = this;
    if (!view.data) return;
    const down = this.downs.get(event.pointerId);
    if (!down) return event.pointerType === "mouse" && event.currentTarget === view.canvas ? view.tip(view.describe(this.x(event), this.y(event)), event) : undefined;
    const x = this.x(event), y = event.clientY;
    if (Math.hypot(x - this.origin.x, y - this.origin.y) > CLICK) this.far = true;
    if (this.downs.size === 2) {
      const [other] = [...this.downs].find(([id]) => id !== event.pointerId).slice(1);
      const before = abs(down.x - other.x), after = abs(x - other.x);
      if (before > 8 && after > 8) view.axis.zoom(before / after, (x + other.x) / 2);
      view.axis.pan((down.x - x) / 2);
    } else if (this.origin.ranging) {
      if (this.far) view.setRange(this.origin.moment, view.axis.at(clamp(x, 0, view.axis.width)));
    } else if (this.far) {
      view.axis.pan(down.x - x);
      if (event.pointerType === "mouse") view.scroller.scrollTop = this.origin.scroll + this.origin.y - y;
    }
    Object.assign(down, { x, y });
    view.moved();
  }

  up(event, done) {
    const { view } = this;
    if (!this.downs.delete(event.pointerId) || !view.data) return;
    if (this.downs.size) return;
    if (this.origin.ranging && this.far) view.commitRange();
    else if (done && !this.far && event.currentTarget === view.canvas) {
      const mark = view.markAt(this.x(event), this.y(event));
      if (mark) view.say(markText(mark)); else view.pick(view.hit(this.x(event), this.y(event)));
    }
  }

  jump(event) {
    const { view } = this;
    if (!view.data) return;
    const box = view.map.getBoundingClientRect();
    const [start, end] = view.axis.home;
    view.axis.set(start + ((event.clientX - box.left) / box.width) * (end - start) - view.axis.span / 2, view.axis.span);
    view.moved();
  }
}
