// -- (a) request rows, (b) staged diffs --------------------------------------------------------------------------------

/** Chip of a row: its letter on its hue. */
const chipOf = (view, row) =>
  row < 0 ? null : [letterOf(row, view.rows), hueOf(row, view.rows)];

/** A cell that names a row: its number behind its chip. */
const rowCell = (view, row) => ({ t: row, chip: chipOf(view, row) });

/** Width in characters of a column with such a title, at least `least`. */
const widthOf = (title, least) => 2 + Math.max(least, ...title.split(/(?<=_)/).map((word) => word.length));

/** Live rows at a stop, and the row of each request's name; kept with the view until the stop changes. */
function liveRows(view, stop) {
  if (view.live_ && view.live_.stop === stop) return view.live_;
  const rows = [];
  const owners = new Map();
  const byName = new Map();
  for (let row = 0; row < view.rows; row++) {
    const owner = view.owner(row, stop);
    const before = view.col("rows.request")[row];
    if (owner < 0 && !(before >= 0) && !view.byRow.has(row)) continue;
    rows.push(row);
    owners.set(row, owner);
    if (owner >= 0) byName.set(view.names[owner], row);
  }
  return (view.live_ = { stop, rows, owners, byName });
}

class RowsPanel {
  constructor(app, side) {
    this.app = app;
    this.side = side;
    this.all = false;
    this.grid = new Grid("Request rows", {
      rows: 12, onactive: (i) => this.say(i),
      onpick: (i) => app.select({ kind: "row", row: this.list[i], request: this.nameAt(this.list[i]) }),
    });
    this.grid.el.classList.add("signed");
    this.detail = h("p", "mx-detail");
    const live = h("input", { type: "checkbox", checked: true, onchange: () => { this.all = !live.checked; app.draw(); } });
    this.el = h("div", {}, h("div", "mx-bar", h("label", {}, live, " live rows only"),
      h("span", "mx-key", h("i", "who C", "C"), " CPU staged it  ", h("i", "who G", "G"), " GPU kernel wrote it")),
    this.grid.el, this.detail);
  }

  nameAt(row) {
    const owner = this.live.owners.get(row) ?? -1;
    return owner < 0 ? "" : this.view.names[owner];
  }

  update(view, other) {
    const { app } = this;
    const stop = app.stop(view);
    this.view = view;
    this.live = liveRows(view, stop);
    const total = view.rows;
    let list = this.all ? Array.from({ length: total }, (_, i) => i) : this.live.rows;
    if (app.filter) list = list.filter((row) => app.matches(this.nameAt(row)));
    this.list = list;
    // Texts first: they say most. The request has its own column.
    const first = (c) => Number(c.name !== "all_token_ids");
    const columns = view.meta.row_columns.filter((c) => c.kind !== "request").sort((a, b) => first(a) - first(b));
    const theirs = other && liveRows(other, app.stop(other));
    const followed = app.follow ? list.findIndex((row) => this.nameAt(row) === app.follow) : -1;
    const picked = app.selection.kind === "row" ? list.indexOf(app.selection.row) : followed;
    this.grid.set({
      columns: [num("row", 10), col("request", 18, true),
        ...columns.map((c) => ({
          title: c.title || c.name, num: c.kind !== "text", width: widthOf(c.title || c.name, c.kind === "text" ? 27 : c.kind === "token" ? 12 : 6) + (c.kind === "text" ? 0 : 3),
          grow: c.kind === "text", tip: `${c.name}, ${c.place}`,
        }))],
      count: list.length,
      active: picked >= 0 ? picked : this.grid.active,
      rowClass: (i) => (app.follow && this.nameAt(list[i]) === app.follow ? "followed" : ""),
      row: (i) => {
        const row = list[i];
        const name = this.nameAt(row);
        const [, owned] = view.cell("request", row, stop);
        const twin = theirs && name ? theirs.byName.get(name) : undefined;
        const head = { t: name ? visible(name) : "free", c: name ? this.changed(owned, stop) : "mute", who: owned ? WRITER[owned.writer] : "" };
        if (theirs && name && twin === undefined) head.ne = true;
        return [{ t: row, chip: name ? chipOf(view, row) : null, ne: twin !== undefined && twin !== row }, head,
          ...columns.map((c) => this.value(view, c, row, stop, other, twin))];
      },
    });
    if (followed >= 0) this.grid.reveal(followed);
    this.say(this.grid.active);
    return list.length ? `${plural(this.live.byName.size, "live row")} of ${total}`
      : empty(app.filter ? "No row's request matches the filter." : "No row is live: no request was admitted yet.");
  }

  changed(change, stop) {
    return change ? (this.view.at(change) === stop ? "chg now" : "chg") : "";
  }

  value(view, column, row, stop, other, twin) {
    const [value, change] = view.cell(column.name, row, stop);
    const text = column.kind === "token" && value >= 0 ? view.text(value) : "";
    const full = formatValue(value, column.kind) + (text ? " " + text : "");
    // Of a long text the end is what is new.
    const cell = { t: column.kind === "text" && full.length > 24 ? "…" + full.slice(-23) : full, tip: full, c: this.changed(change, stop) };
    if (change) Object.assign(cell, { who: WRITER[change.writer], tip: describeChange(change, view.meta.row_columns, view) });
    if (twin !== undefined && String(other.cell(column.name, twin, this.app.stop(other))[0]) !== String(value)) cell.ne = true;
    return cell;
  }

  /** What the active row's changes were, in words: a title alone is out of reach for a keyboard. */
  say(i) {
    const row = this.list[i];
    let text = "";
    if (row !== undefined) {
      const stop = this.app.stop(this.view);
      const done = (this.view.byRow.get(row) || []).filter((c) => this.view.at(c) <= stop);
      const seed = this.view.meta.seeds[row];
      text = `row ${row}: ` + (done.map((c) => describeChange(c, this.view.meta.row_columns, this.view)).join("; ")
        || "nothing has changed up to this phase") + (seed ? `; seed ${seed}` : "");
    }
    this.detail.textContent = text;
  }
}

class StagedPanel {
  constructor(app) {
    this.app = app;
    this.grid = new Grid("Staged diffs", {
      rows: 12, onactive: (i) => this.say(i),
      onpick: (i) => app.select({ kind: "diff", table: this.list[i].table, row: this.list[i].row, request: this.name(this.list[i]) }),
    });
    this.detail = h("p", "mx-detail");
    this.el = h("div", {}, this.grid.el, this.detail);
  }

  name(diff) { return this.view.names[diff.request] ?? ""; }

  say(i) {
    const diff = this.list[i];
    this.detail.textContent = diff ? `${diff.table}[${diff.row}, ${diff.start}:${diff.start + diff.length}] = ${this.values(diff)}, by ${diff.by}` : "";
  }

  /** Ids of a token table with their text; at most the 64 values that travel. */
  values(diff) {
    const more = diff.length > diff.values.length ? ` … +${diff.length - diff.values.length}` : "";
    const text = /token/.test(diff.table) && !/^num_/.test(diff.table) ? this.view.text(...diff.values) : "";
    return diff.values.join(" ") + more + (text ? ` “${text}”` : "");
  }

  update(view) {
    const { app } = this;
    this.view = view;
    const list = (this.list = view.meta.diffs.filter((d) => app.matches(this.name(d))));
    this.grid.set({
      columns: [col("table", 24), num("row", 10), num("start", 7),
        num("length", 8), col("values", 26, true), col("by", 13)],
      count: list.length,
      rowClass: (i) => (app.follow && this.name(list[i]) === app.follow ? "followed" : ""),
      row: (i) => {
        const d = list[i];
        return [d.table, { ...rowCell(view, d.row), tip: visible(this.name(d)) }, d.start, d.length, this.values(d), d.by];
      },
    });
    this.say(this.grid.active);
    if (!list.length) return empty(view.meta.diffs.length ? "No diff is of a request that matches the filter." : "Nothing was staged: no request came and none got a block.");
    const applied = view.stopOf.get("apply_writes");
    const isApplied = applied !== undefined && app.stop(view) >= applied;
    return `${plural(list.length, "diff")}, ${isApplied ? "applied at this phase" : "not applied yet at this phase"}`;
  }
}
