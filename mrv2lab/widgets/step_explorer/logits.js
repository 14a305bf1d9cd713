// -- (e) logits -------------------------------------------------------------------------------------------------------

class LogitsPanel {
  constructor(app) {
    this.app = app;
    this.grid = new Grid("Sampled tokens", { rows: 8, onactive: (i) => this.bars(i), onpick: (i) => app.selectEntry(this.view, this.list[i]) });
    this.chart = h("div", "mx-bars");
    this.el = h("div", "mx-two", h("div", {}, h("h4", {}, "Sampled"), this.grid.el), h("div", {}, h("h4", {}, "Greatest logits"), this.chart));
  }

  update(view, other) {
    const { app } = this;
    this.view = view;
    const { batch, sampled, finish_reasons: reasons } = view.meta;
    const starts = view.col("batch.query_start_loc");
    const rows = new Map(Array.from(view.col("tokens.logits_indices"), (t, n) => [t, n]));
    const { kept, followed, twin, rowClass } = batchList(app, view, other);
    this.list = kept.map((i) => ({ ...batch[i], i, n: rows.get(starts[i + 1] - 1) }));
    this.grid.set({
      columns: [num("row", 10), col("request", 15, true), num("logits row", 8),
        num("sampled", 10), col("text", 14, true), col("ends", 9)],
      count: this.list.length,
      active: followed >= 0 ? followed : Math.max(this.grid.active, 0),
      rowClass,
      row: (j) => {
        const e = this.list[j];
        const ids = sampled ? sampled[e.i] : null;
        const theirs = other && other.meta.sampled ? other.meta.sampled[twin(e.i)] : undefined;
        const text = ids === null ? "not known yet" : ids.length ? view.text(...ids) : "prefill goes on";
        return [rowCell(view, e.row), view.name(e.request), e.n ?? "–",
          { t: ids && ids.length ? ids.join(" ") : "–", ne: Boolean(theirs) && String(theirs) !== String(ids) },
          { t: text, c: ids && ids.length ? "" : "mute" }, reasons[e.request] ?? ""];
      },
    });
    this.bars(this.grid.active);
    if (!batch.length) return empty("Nothing was sampled: the step has no tokens.");
    if (!sampled) return "not known yet: the output has not come back to the host";
    return `${plural(sampled.reduce((sum, ids) => sum + ids.length, 0), "token")} sampled`;
  }

  /** The top-k of one logits row as bars from its least to its greatest. */
  bars(i) {
    const { view } = this;
    const entry = this.list[i];
    const top = view.meta.top_k;
    const say = (why) => this.chart.replaceChildren(empty(why));
    if (!top) return say(view.meta.notes.find((n) => /top.?k|logits/i.test(n)) || "This source kept no logits: record with top_k greater than 0.");
    if (!entry) return say("No request is selected.");
    if (entry.n === undefined || !top.token_ids[entry.n]) return say("This request gets no logits in this step: its prefill goes on.");
    const ids = top.token_ids[entry.n];
    const logits = top.logits[entry.n];
    const chosen = new Set(view.meta.sampled ? view.meta.sampled[entry.i] : []);
    const least = logits[logits.length - 1];
    const span = logits[0] - least || 1;
    const row = (id, k) => h("tr", { class: chosen.has(id) ? "chosen" : "" }, h("th", { scope: "row" }, (chosen.has(id) ? "▶ " : "") + id),
      h("td", {}, view.text(id) || "–"), h("td", {}, h("span", { class: "bar", style: `width:${4 + (96 * (logits[k] - least)) / span}%` })), h("td", "num", logits[k] === null ? "–" : logits[k].toFixed(3)));
    const out = [...chosen].filter((id) => !ids.includes(id));
    this.chart.replaceChildren(h("table", {}, h("caption", {}, `${view.name(entry.request)}, logits row ${entry.n}${out.length ? `; sampled ${out.join(" ")} is not among them` : ""}`),
      h("thead", {}, h("tr", {}, ...["token", "text", "logit", ""].map((t, k) => (k === 3 ? h("td") : h("th", { scope: "col" }, t))))), h("tbody", {}, ...ids.map(row))));
  }
}
