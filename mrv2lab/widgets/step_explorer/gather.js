// -- (c) the gather: rows become batch positions become tokens -------------------------------------------------------

const GATHER_WIDTH = 224;
const GATHER_LABELLED = 24; // with more requests than this, lines are drawn close together and only ends are labelled

/** Batch positions that pass the filter, each one's twin in the other source, and which of them is followed. */
function batchList(app, view, other) {
  const batch = view.meta.batch;
  const name = (i) => view.names[batch[i].request];
  const kept = batch.map((_, i) => i).filter((i) => app.matches(name(i)));
  const twins = other && new Map(other.meta.batch.map((e, i) => [other.names[e.request], i]));
  const followed = app.follow ? kept.findIndex((i) => name(i) === app.follow) : -1;
  return { kept, name, followed, twin: (i) => (twins ? twins.get(name(i)) : undefined), rowClass: (j) => (j === followed ? "followed" : "") };
}

class GatherPanel {
  constructor(app) {
    this.app = app;
    this.picture = h("div", "mx-lines");
    const pick = (i) => app.selectEntry(this.view, this.order[i]);
    this.batch = new Grid("Batch, in batch order", { rows: 10, onpick: pick, onactive: (i) => this.draw(this.view, i) });
    this.tokens = new Grid("Tokens of the step", {
      rows: 10, onpick: (i) => app.select({ kind: "token", token: this.list[i], request: this.view.names[this.view.meta.batch[this.at(this.list[i])].request] }),
    });
    this.el = h("div", "mx-gather", this.picture,
      h("div", {}, h("h4", {}, "Batch"), this.batch.el), h("div", {}, h("h4", {}, "Tokens"), this.tokens.el));
  }

  /** Batch position of token `t`: the last query_start_loc that is not greater. */
  at(t) {
    const starts = this.view.col("batch.query_start_loc");
    let low = 0;
    let high = starts.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= t) low = middle; else high = middle - 1;
    }
    return low;
  }

  update(view, other) {
    const { app } = this;
    this.view = view;
    const batch = view.meta.batch;
    const { kept, followed, twin: twinOf, rowClass } = batchList(app, view, other);
    this.order = kept.map((i) => batch[i]);
    const number = (name, i) => ({ t: view.col(name)[i], ne: twinOf(i) !== undefined && other.col(name)[twinOf(i)] !== view.col(name)[i] });
    this.batch.set({
      columns: [num("pos", 6), num("row", 10, "idx_mapping"),
        col("request", 15, true), col("kind", 9), num("num_scheduled", 11),
        num("num_computed", 10), num("query_start_loc", 9), num("seq_lens", 7)],
      count: kept.length,
      active: followed >= 0 ? followed : this.batch.active,
      rowClass,
      row: (j) => {
        const i = kept[j];
        const twin = twinOf(i);
        return [{ t: i, ne: twin !== undefined && twin !== i }, { ...rowCell(view, batch[i].row), ne: twin !== undefined && other.meta.batch[twin].row !== batch[i].row },
          { t: view.name(batch[i].request), ne: Boolean(other) && twin === undefined }, batch[i].kind, number("batch.num_scheduled", i),
          number("batch.num_computed", i), number("batch.query_start_loc", i), number("batch.seq_lens", i)];
      },
    });
    if (followed >= 0) this.batch.reveal(followed);
    this.updateTokens(view, other, followed >= 0 ? kept[followed] : -1);
    this.draw(view, this.batch.active);
    if (!batch.length) return empty("No request is in the batch: the step has no tokens.");
    if (!kept.length) return empty("No request of the batch matches the filter.");
    const n = view.col("tokens.logits_indices").length;
    return `${plural(batch.length, "request")}, ${plural(view.col("tokens.input_ids").length, "token")}, logits for ${n}`;
  }

  updateTokens(view, other, followed) {
    const { app } = this;
    const ids = view.col("tokens.input_ids");
    const slots = view.col("tokens.slots");
    const positions = view.col("tokens.positions");
    const logits = new Map(Array.from(view.col("tokens.logits_indices"), (t, n) => [t, n]));
    const list = (this.list = []);
    for (let t = 0; t < ids.length; t++) {
      if (!app.filter || app.matches(view.names[view.meta.batch[this.at(t)].request])) list.push(t);
    }
    const size = view.meta.block_size;
    this.tokens.set({
      columns: [num("t", 7), num("row", 9), num("input_ids", 9),
        col("text", 12, true), num("positions", 11),
        num("slot", 13, "block : offset in the block"), col("logits", 8, false, "row of the logits")],
      count: list.length,
      rowClass: (j) => (followed >= 0 && this.at(list[j]) === followed ? "followed" : ""),
      row: (j) => {
        const t = list[j];
        const row = view.meta.batch[this.at(t)].row;
        const ne = (name) => Boolean(other) && other.col(name)[t] !== view.col(name)[t];
        return [t, rowCell(view, row), { t: ids[t], ne: ne("tokens.input_ids") }, view.text(ids[t]), { t: positions[t], ne: ne("tokens.positions") },
          slots[t] < 0 ? "nowhere" : `${Math.floor(slots[t] / size)}:${slots[t] % size}`, logits.has(t) ? `→ ${logits.get(t)}` : ""];
      },
    });
    if (followed >= 0) this.tokens.reveal(list.indexOf(view.col("batch.query_start_loc")[followed]));
  }

  /** idx_mapping as lines: rows in row order at the left, batch positions at the right. */
  draw(view, active) {
    const { app } = this;
    const order = this.order;
    const n = order.length;
    const name = this.batch.id + "-lines";
    if (!n) return this.picture.replaceChildren();
    const rank = new Map(order.map((e) => e.row).sort((a, b) => a - b).map((row, i) => [row, i]));
    const few = n <= GATHER_LABELLED;
    const step = few ? 18 : 220 / n;
    const y = (i) => 12 + i * step;
    const line = (i) => `M70,${y(rank.get(order[i].row))} C110,${y(rank.get(order[i].row))} 110,${y(i)} 150,${y(i)}`;
    const svg = s("svg", { width: GATHER_WIDTH, height: y(n - 1) + 14, role: "img", "aria-labelledby": `${name}-t ${name}-d` },
      s("title", { id: name + "-t" }, "idx_mapping"),
      s("desc", { id: name + "-d" }, `Lines from ${plural(n, "row")} to batch positions; the table beside it says the same.`));
    const label = (x, i, text, anchor) => svg.append(s("text", { x, y: i + 4, "text-anchor": anchor }, text));
    if (!few) {
      svg.append(s("path", { d: order.map((_, i) => line(i)).join(""), class: "ln many", "stroke-opacity": Math.min(0.6, 60 / n) }));
      const rows = [...rank.keys()];
      label(64, y(0), "row " + rows[0], "end");
      label(64, y(n - 1), "row " + rows[n - 1], "end");
      label(156, y(0), "pos 0", "start");
      label(156, y(n - 1), "pos " + (n - 1), "start");
    }
    for (let i = 0; i < n; i++) {
      const strong = i === active || (app.follow && view.names[order[i].request] === app.follow);
      if (!few && !strong) continue;
      svg.append(s("path", { d: line(i), class: strong ? "ln strong" : "ln", hue: hueOf(order[i].row, view.rows) }));
      if (few) {
        label(64, y(rank.get(order[i].row)), `${letterOf(order[i].row, view.rows)} ${order[i].row}`, "end");
        label(156, y(i), `${i} ${letterOf(order[i].row, view.rows)}`, "start");
      }
    }
    this.picture.replaceChildren(h("h4", {}, "Row → batch position"), svg);
  }
}
