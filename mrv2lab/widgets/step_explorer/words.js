// -- (g) the scheduler's decisions --------------------------------------------------------------------------------------

class WordsPanel {
  constructor() { this.el = h("div", {}); }

  update(view, other) {
    const { meta } = view;
    const words = new Set(other ? other.meta.words : meta.words);
    const list = (title, key) => meta[key] && meta[key].length ? [`${title} ${meta[key].map((r) => view.name(r)).join(", ")}`] : [];
    const facts = [...list("new:", "new"), ...list("resumed:", "resumed"), ...list("preempted:", "preempted"), ...list("finished:", "finished"), ...list("not scheduled:", "unscheduled")];
    const gauges = Object.entries(meta.gauges).map(([name, value]) => `${name} ${formatValue(value, "")}`);
    this.el.replaceChildren(
      meta.words.length ? h("ul", { class: "mx-words", tabindex: 0, "aria-label": "Decisions" }, ...meta.words.map((w) => h("li", { class: words.has(w) ? "" : "ne" }, (words.has(w) ? "" : "≠ ") + visible(w)))) : empty("The scheduler decided nothing out of the ordinary."),
      ...(facts.length ? [h("p", "mx-facts", facts.join(" · "))] : []), ...(gauges.length ? [h("p", "mx-facts", visible(gauges.join(" · ")))] : []));
    return `scheduler's step ${meta.step}`;
  }
}
