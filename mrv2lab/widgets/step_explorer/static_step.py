"""The static twin: a step in words, tables and inline SVG, for saved notebooks where no kernel and no script runs.

Pure functions from a view to text. Every string that came from data is escaped, there is no style sheet, no script and
no address, and long steps are cut, so that one step stays under 60 KB.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mrv2lab.recording.view import StepView
from mrv2lab.widgets.step_explorer.message import Shown

MAX_ROWS = 20
MAX_WORDS = 12
MAX_TEXT = 40
TAIL = 24
SIGNS = {"\n": "⏎", "\r": "␍", "\t": "⇥", "\0": "␀"}
HIDDEN = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]")
"""Control, zero-width and bidirectional-override characters: none may hide or reorder what is shown. As in data.js."""


def visible(text: object) -> str:
    """``text`` with control characters shown by a sign or their number, and outer spaces as ``␣``. Not escaped."""
    shown = HIDDEN.sub(lambda found: SIGNS.get(found[0]) or f"⟨U+{ord(found[0]):04X}⟩", str(text))
    return re.sub(r"^ +| +$", lambda found: "␣" * len(found[0]), shown)


LETTERS = "ABDEFHIJKLMNOPQRSTUVWXYZ"
"""Of rows; C and G say who wrote."""


def letter_of(row: int, rows: int) -> str:
    """The letter of a row: the highest, which is handed out first, is A."""
    n, text = rows - 1 - row, ""
    while n >= 0:
        text = LETTERS[n % 24] + text
        n = n // 24 - 1
    return text


def static_html(shown: Sequence[Shown]) -> str:
    """Every source's step as inert HTML; a sentence where a source has none."""
    parts = [
        step_html(one.view, one.title) if one.view is not None else f"<p>{_esc(one.title)}: {_esc(one.error, 200)}</p>"
        for one in shown
    ]
    return '<div style="overflow-x:auto;white-space:nowrap">' + "".join(parts) + "</div>"


def static_text(shown: Sequence[Shown]) -> str:
    """One line a source."""
    return "\n".join(
        f"{visible(one.title)}: {_headline(one.view) if one.view is not None else one.error}" for one in shown
    )


def step_html(view: StepView, title: str) -> str:
    """One step: headline, decisions, request rows after it, the batch, and the phases."""
    meta = view.meta
    words = [f"<li>{_esc(text, 160)}</li>" for text in meta["words"][:MAX_WORDS]]
    if len(meta["words"]) > MAX_WORDS:
        words.append(f"<li>and {len(meta['words']) - MAX_WORDS} more</li>")
    return "".join(
        (
            f"<p><b>{_esc(title, 80)}</b>: {_esc(_headline(view), 400)}</p>",
            f"<p><b>✗ {_esc(meta['diverged'], 300)}</b></p>" if meta["diverged"] else "",
            f"<ul>{''.join(words)}</ul>" if words else "",
            _rows_table(view),
            _batch_table(view),
            _phases(meta),
        )
    )


def _headline(view: StepView) -> str:
    meta = view.meta
    if meta["mode"] == "step":
        mode = f"step: paused after {meta['paused_after'] or 'the step'}, read from the device (synchronised)"
    else:
        mode = "record: asynchronous, nothing was added"
    tokens = len(view.columns.get("tokens.input_ids", ()))
    return (
        f"step {meta['index']} of {meta['count']}, {len(meta['batch'])} requests, {tokens} tokens; {mode}; "
        f"{visible(meta['runner'])} on {visible(meta['device'])}"
        + (", device times modelled" if meta["modelled"] else "")
    )


def _rows_table(view: StepView) -> str:
    """Live rows after the step; a changed cell says its old value and who wrote it."""
    meta, total = view.meta, view.meta["max_num_reqs"]
    columns = [column for column in meta["row_columns"] if column["kind"] not in ("request", "text")]
    changes: dict[tuple[int, str], dict[str, Any]] = {}
    for change in meta["changes"]:
        earlier = changes.get((change["row"], change["column"]))
        changes[change["row"], change["column"]] = {
            **change,
            "before": earlier["before"] if earlier else change["before"],
        }
    owners = {entry["row"]: entry["request"] for entry in meta["batch"]}
    for row, owner in enumerate(view.columns.get("rows.request", ())):
        if owner >= 0 and owner not in meta["removed"]:
            owners.setdefault(row, int(owner))

    def cells(row: int) -> Iterable[str]:
        yield f"{letter_of(row, total)} {row}"
        yield meta["requests"][owners[row]]
        for column in columns:
            change = changes.get((row, column["name"]))
            if change is None:
                yield str(view.columns[f"rows.{column['name']}"][row])
            else:
                yield f"{change['before']} → {change['after']} {'G' if change['writer'] == 'gpu' else 'C'}"
        tail = visible(meta["tails"].get(row, meta["tails"].get(str(row), "")))
        yield "…" + tail[-TAIL:] if len(tail) > TAIL else tail  # of a text the end is what is new

    heads = ["row", "request", *(column["title"] for column in columns), "text"]
    note = "Request rows after the step (C: the CPU staged it, G: a GPU kernel wrote it)"
    return _table(note, heads, (cells(row) for row in sorted(owners)), len(owners))


def _batch_table(view: StepView) -> str:
    meta, total = view.meta, view.meta["max_num_reqs"]
    names = ("num_scheduled", "num_computed", "query_start_loc", "seq_lens")

    def cells(i: int) -> Iterable[str]:
        entry = meta["batch"][i]
        yield str(i)
        yield f"{letter_of(entry['row'], total)} {entry['row']}"
        yield meta["requests"][entry["request"]]
        yield entry["kind"]
        for name in names:
            column = view.columns.get(f"batch.{name}", ())
            yield str(column[i]) if i < len(column) else "–"
        if meta["sampled"] is None:
            yield "not known yet"
        else:
            yield " ".join(f"{token} {visible(_text_of(meta, token))}" for token in meta["sampled"][i]) or "–"

    heads = ["pos", "row", "request", "kind", *names, "sampled"]
    count = len(meta["batch"])
    return _table("Batch, in batch order", heads, (cells(i) for i in range(count)), count)


def _text_of(meta: dict[str, Any], token: int) -> str:
    texts = meta["texts"]
    return texts.get(token, texts.get(str(token))) or ""


def _table(caption: str, heads: Sequence[str], rows: Iterable[Iterable[str]], count: int) -> str:
    """At most ``MAX_ROWS`` rows; says how many were left out, and why a table is empty."""
    if not count:
        return f"<p><i>{caption}: none.</i></p>"
    head = "".join(f'<th scope="col">{_esc(text)}</th>' for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_esc(cell)}</td>" for cell in row) + "</tr>"
        for _, row in zip(range(MAX_ROWS), rows, strict=False)
    )
    more = f" (the first {MAX_ROWS} of {count})" if count > MAX_ROWS else ""
    return (
        '<table cellpadding="4" rules="rows" style="font-size:12px">'
        f'<caption style="text-align:left">{caption}{more}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _phases(meta: dict[str, Any]) -> str:
    """The host's phases on a time axis, one line each: a bar, its name and its time."""
    spans = [span for span in meta["spans"] if not span["depth"]][:24]
    if not spans:
        return "<p><i>Phases: no times were kept.</i></p>"
    end = max(max(span["end"] for span in spans), 1e-9)
    lines = []
    for i, span in enumerate(spans):
        x, width = 150 + 400 * span["start"] / end, max(400 * (span["end"] - span["start"]) / end, 1)
        label = f"{span['end'] - span['start']:.1f} µs"
        lines.append(
            f'<text x="144" y="{16 * i + 12}" text-anchor="end">{_esc(span["name"])}</text>'
            f'<rect x="{x:.1f}" y="{16 * i + 3}" width="{width:.1f}" height="10" fill="#0072b2" fill-opacity="0.6"/>'
            f'<text x="{556}" y="{16 * i + 12}">{label}</text>'
        )
    return (
        f'<svg role="img" width="640" height="{16 * len(spans) + 4}" font-size="11" font-family="monospace" '
        f'fill="currentColor"><title>Phases of the step on the host</title>{"".join(lines)}</svg>'
    )


def _esc(text: object, limit: int = MAX_TEXT) -> str:
    """Visible, cut to ``limit`` characters, and escaped for element content and attributes."""
    shown = visible(text)
    return html.escape(shown if len(shown) <= limit else shown[: limit - 1] + "…")
