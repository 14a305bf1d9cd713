// -- keys -------------------------------------------------------------------------------------------------------------

const KEYS = [
  ["← →", "move the cursor"], ["Shift+← →", "select a range from the cursor"], ["↑ ↓", "lane above, below"], ["a d", "pan"], ["w s or + −", "zoom in, out at the cursor"],
  ["Home End", "cursor to the start, the end"], ["n p", "next, previous slice of the lane"], ["k K", "next, previous mark"], ["z", "zoom to the selection or slice"], ["f", "fit everything"], ["r", "all rows in view, or readable rows"], ["[ ]", "lower, higher rows"],
  ["c", "fold or open the lane"], ["x X", "hide the lane, show all"], ["m", "measure from here; again: select that"], ["/", "search; Enter next, Shift+Enter previous"], ["PageUp PageDown", "scroll lanes"],
  ["Ctrl+wheel, pinch", "zoom"], ["Shift+wheel, drag", "pan"], ["Shift+drag", "select a range"], ["A beside B", "a button: each lane of A above the same lane of B"], ["All rows", "a button: as r"], ["B minus A", "up, orange: B slower; down, blue: B faster"],
  ["Edge of the labels", "drag, or Tab to it and ← →: their width"], ["Escape", "drop measurement, range, slice; leave"], ["?", "this help"],
];

/** What a key does in the picture; each returns nothing. */
const ACTIONS = {
  ArrowLeft: (v, e) => v.moveCursor(-v.axis.span / 40, e.shiftKey), ArrowRight: (v, e) => v.moveCursor(v.axis.span / 40, e.shiftKey),
  ArrowUp: (v) => v.stepLane(-1), ArrowDown: (v) => v.stepLane(1),
  Home: (v, e) => v.moveCursor(v.data.domain[0] - v.cursor, e.shiftKey), End: (v, e) => v.moveCursor(v.data.domain[1] - v.cursor, e.shiftKey),
  PageUp: (v) => { v.scroller.scrollTop -= v.height * 0.8; }, PageDown: (v) => { v.scroller.scrollTop += v.height * 0.8; },
  a: (v) => v.axis.pan(-v.axis.width / 8), d: (v) => v.axis.pan(v.axis.width / 8),
  w: (v) => v.zoom(0.7), s: (v) => v.zoom(1 / 0.7), "+": (v) => v.zoom(0.7), "=": (v) => v.zoom(0.7), "-": (v) => v.zoom(1 / 0.7),
  n: (v) => v.stepSlice(1), p: (v) => v.stepSlice(-1), k: (v) => v.stepMark(1), K: (v) => v.stepMark(-1),
  z: (v) => v.zoomToSelection(), f: (v) => v.axis.fit(), r: (v) => v.toggleRows(), "[": (v) => v.setRows(-2), "]": (v) => v.setRows(2),
  c: (v) => v.fold(v.cursorLane), x: (v) => v.hideLane(v.cursorLane), X: (v) => v.showLanes(), m: (v) => v.measure(),
  "/": (v) => v.searchBox.focus(), "?": (v) => v.help(),
  Enter: (v) => v.pickAtCursor(), " ": (v) => v.pickAtCursor(),
};

/** A key press anywhere in the widget; those of the picture are not the notebook's. */
function onKey(view, event) {
  if (event.key === "Escape") {
    escape(view, event.target);
  } else if (event.target === view.searchBox) {
    event.stopPropagation();
    if (event.key !== "Enter") return;
    view.findNext(event.shiftKey ? -1 : 1);
  } else if (event.target !== view.scroller || event.ctrlKey || event.altKey || event.metaKey || !view.data || !ACTIONS[event.key]) {
    return;
  } else {
    ACTIONS[event.key](view, event);
    view.moved();
  }
  event.preventDefault();
  event.stopPropagation();
}

/** Escape goes one level out: help, field, measurement, range, slice, then the picture itself. */
function escape(view, target) {
  if (!view.helpBox.hidden) view.help();
  else if (target !== view.scroller) view.scroller.focus({ preventScroll: true });
  else if (view.anchored) view.anchored = false;
  else if (view.selection) view.setSelection(null);
  else if (view.selected >= 0) view.pick(-1);
  else view.scroller.blur();
  view.schedule();
}
