// -- panels: lane labels, details of a slice, the table twin, kinds ----------------------------------------------------

/** Labels at the left: a button a lane, which folds it. */
function drawLabels(view) {
  const { layout, data } = view;
  view.labels.replaceChildren(...layout.places.map(({ lane, top, height, folded }) => {
    const sign = lane.empty ? "" : folded ? "▸ " : "▾ ";
    return h("button", {
      type: "button", tabindex: -1, class: "mx-tl-lane" + (lane.index === view.cursorLane ? " now" : ""), "data-lane": lane.index, style: `top:${top}px;height:${height}px`,
      title: lane.full + (lane.empty ? ": " + lane.empty : ` (${plural(data.offsets[lane.index + 1] - data.offsets[lane.index], "slice")}, ${plural(lane.rows, "row")})`),
      "aria-expanded": lane.empty ? null : String(!folded), onclick: () => { view.moveLane(lane.index); if (!lane.empty) view.fold(lane.index); view.scroller.focus({ preventScroll: true }); },
    }, h("span", {}, sign + lane.label));
  }));
  view.inner.style.height = layout.height + "px";
}

/** What is known at once; Python's exact answer takes its place. */
function quickDetails(view, id) {
  const { data } = view;
  const p = data.posOf[id], lane = data.laneOf(id);
  const facts = [["start on the axis", group(data.start[p]) + " ns"], ["duration", group(data.end[p] - data.start[p]) + " ns"], ["kind", data.kinds[data.kind[p]][0]], ["lane", lane.full]];
  return { name: data.names[data.name[p]], kind: data.kinds[data.kind[p]][0], facts, args: [], stack: [], inside: [], works: 0, missing: [], quick: true };
}

function drawDetails(view) {
  const { data, selected } = view;
  view.details.hidden = selected < 0;
  if (selected < 0) return;
  const d = data.details.get(selected) || quickDetails(view, selected);
  const look = data.kinds.find(([name]) => name === d.kind);
  const pairs = (list, name) => (list.length ? [h("dl", { "data-list": name }, ...list.map(([key, value]) => h("div", {}, h("dt", {}, visible(key)), h("dd", {}, visible(value)))))] : []);
  const lines = (title, list) => (list.length ? [h("h4", {}, title), h("ol", {}, ...list.map(([a, b]) => h("li", {}, h("code", {}, visible(b)), " " + visible(a))))] : []);
  view.details.replaceChildren(
    h("header", {}, swatch(look), h("h3", {}, visible(d.name)), button("×", "Close the details", () => view.pick(-1))),
    ...pairs(d.facts, "facts"), ...(d.quick ? [h("p", "mx-tl-note", "Asking Python for the rest…")] : []),
    ...lines("Call site, innermost first", d.stack), ...lines("Inside", d.inside),
    ...(d.args.length ? [h("h4", {}, "Arguments")] : []), ...pairs(d.args, "args"), ...d.missing.map((text) => h("p", "mx-tl-note", visible(text))));
}

const swatch = ([, letter, hue, hatch]) => h("span", { class: "mx-tl-swatch " + hatch, style: "--hue:" + hue, "aria-hidden": "true" }, letter);

/** Kinds that are there: legend and filter in one. */
function drawKinds(view) {
  const { data, layout } = view;
  view.kindsBox.replaceChildren(...data.kindsPresent.map((k) => {
    const [name, letter, , , title] = data.kinds[k];
    return h("button", {
      type: "button", class: "mx-tl-kind", "aria-pressed": String(layout.kinds.has(k)), "data-kind": name, title: "Show or hide " + title, onclick: () => view.toggleKind(k),
    }, swatch(data.kinds[k]), letter === "X" ? "other" : title);
  }));
}

/** Slices of a row in sight, as first and last position. */
const inSight = (data, axis, row) => [data.firstAfter(row, axis.start), upper(data.start, axis.end, data.rowFirst[row], data.rowFirst[row + 1])];

const TABLE_ROWS = 20;

/** The table twin: what every visible lane holds in this stretch, and the slices of the lane the cursor is on. */
function drawTable(view) {
  const { data, layout, axis, search } = view;
  const bottom = view.scroll + view.height;
  const rows = [];
  for (const { lane, top, height } of layout.places) {
    if (top + height < view.scroll || top > bottom) continue;
    let count = 0, best = -1;
    for (let row = data.laneRow[lane.index]; row < data.laneRow[lane.index + 1]; row++) {
      const [first, last] = inSight(data, axis, row);
      for (let p = first; p < last; p++) {
        if (search.tone[p] === HIDE) continue;
        count++;
        if (best < 0 || data.end[p] - data.start[p] > data.end[best] - data.start[best]) best = p;
      }
    }
    rows.push([lane.label, lane.empty || group(count), best < 0 ? "" : data.nameOf(best), best < 0 ? "" : group(data.end[best] - data.start[best])]);
  }
  const place = layout.place(view.cursorLane);
  const slices = [];
  if (place) {
    for (let i = data.offsets[place.lane.index]; i < data.offsets[place.lane.index + 1] && slices.length < TABLE_ROWS; i++) {
      const p = data.posOf[i];
      if (data.start[p] > axis.end) break;
      if (data.end[p] >= axis.start && search.tone[p] !== HIDE) slices.push([data.nameOf(p), data.kinds[data.kind[p]][0], group(data.start[p]), group(data.end[p] - data.start[p])]);
    }
  }
  const marks = data.marks.filter((mark) => mark[1] >= axis.start && mark[0] <= axis.end).slice(0, TABLE_ROWS).map(([start, end, kind, label]) => [kind, visible(label), group(start), group(end - start)]);
  const difference = data.difference.filter((row) => row[1] >= axis.start && row[0] <= axis.end).slice(0, TABLE_ROWS).map(([start, , delta, label]) => [visible(label), group(start), signedText(delta)]);
  view.table.replaceChildren(
    table(`Lanes in sight, ${timeText(axis.span)} from ${group(axis.start)} ns`, ["lane", "slices", "longest", "its ns"], rows),
    ...(slices.length ? [table(`First ${slices.length} slices in sight on ${place.lane.label}`, ["name", "kind", "start (ns)", "duration (ns)"], slices)] : []),
    ...(marks.length ? [table("Marks in sight", ["kind", "label", "start (ns)", "duration (ns)"], marks)] : []),
    ...(difference.length ? [table("B minus A", ["step", "start (ns)", "difference"], difference)] : []));
}

const table = (caption, heads, rows) => h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((text) => h("td", {}, text))))));
