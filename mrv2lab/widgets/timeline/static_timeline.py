"""The static twin: the whole timeline as inline SVG and a table, for saved notebooks where no script runs.

At most 60 KB whatever the size of the trace: columns of coverage instead of slices, fewer of them where they would take
too much, and labels for the longest slices only. Every string that came from data is escaped; no style sheet, no script
and no address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrv2lab.trace.trace import KINDS
from mrv2lab.widgets.timeline.coverage import coverage
from mrv2lab.widgets.timeline.message import Overlays, domain_of
from mrv2lab.widgets.timeline.palette import LOOKS
from mrv2lab.widgets.timeline.slices import Slices
from mrv2lab.widgets.timeline.table import longest, table_html
from mrv2lab.widgets.timeline.text import UNITS, escaped, signed, time_text

MOST_BYTES = 60_000
LEFT, WIDTH, ROW = 168, 600, 18
MOST_LANES, MOST_LABELS, MOST_STEPS, MOST_MARKS = 28, 60, 40, 60
COLUMNS = (400, 300, 200, 100, 50)
SHADES = (0.35, 0.6, 0.85, 1.0)
"""Opacity of a quarter of coverage; the first is the floor that keeps a lone slice visible."""

Titles = Sequence[tuple[str, bool]]


def static_text(slices: Slices, titles: Titles, domain: Sequence[float]) -> str:
    """One line: what is shown, how much, and why nothing where there is nothing."""
    names = " over ".join(title + (" (device times modelled)" if modelled else "") for title, modelled in titles)
    if not len(slices):
        return f"Timeline of {names}: no events recorded"
    reasons = "".join(f"; {titles[lane.trace][0]}: {lane.empty}" for lane in slices.lanes if lane.empty)
    count = f"{len(slices):,} event{'s' * (len(slices) != 1)} in {sum(not lane.empty for lane in slices.lanes)} lanes"
    return f"Timeline of {names}: {count}, {time_text(domain[1] - domain[0])}{reasons}"


def static_html(slices: Slices, titles: Titles, overlays: Overlays) -> str:
    """The picture and the table, at most ``MOST_BYTES``."""
    table = table_html(slices, titles)
    for columns in COLUMNS:
        picture = svg(slices, titles, overlays, columns)
        text = f'<div style="overflow-x:auto">{picture}{table}</div>'
        if len(text.encode()) <= MOST_BYTES:
            return text
    return f"<p>{escaped(static_text(slices, titles, domain_of(slices)), 400)}</p>{table}"


def svg(slices: Slices, titles: Titles, overlays: Overlays, columns: int) -> str:
    """The picture as an XML element."""
    start, end = domain_of(slices)
    picture = _Picture(start, max(end - start, 1.0))
    sentence = static_text(slices, titles, (start, end))
    y = 14
    for index, (title, modelled) in enumerate(titles):
        chip = f"{'AB'[index]}  " if len(titles) > 1 else ""
        suffix = " (device times modelled)" if modelled else ""
        picture.text(4, y, chip + title + suffix, 100, 'font-weight="bold"')
        y += 16
    if overlays["difference"]:
        y = _difference(picture, overlays["difference"], y)
    for index, steps in enumerate(overlays["steps"]):
        if steps:
            y = _steps(picture, steps, f"steps {'AB'[index]}" if len(titles) > 1 else "steps", y)
    y = _ruler(picture, y)
    lanes = _chosen_lanes(slices)
    place = {lane: y + ROW * row for row, lane in enumerate(lanes)}
    _lanes(picture, slices, place, columns, len(titles) > 1)
    _labels(picture, slices, place)
    _marks(picture, overlays["marks"], place)
    y += ROW * len(lanes) + 4
    if len(lanes) < len(slices.lanes):
        picture.text(LEFT, y + 10, f"{len(slices.lanes) - len(lanes)} more lanes are not in this picture", 80)
        y += 16
    y = _legend(picture, slices, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{LEFT + WIDTH + 12}" height="{y}" '
        f'viewBox="0 0 {LEFT + WIDTH + 12} {y}" font-size="11" font-family="monospace" fill="currentColor">'
        f"<title>{escaped(sentence, 300)}</title>{''.join(picture.parts)}</svg>"
    )


class _Picture:
    """Pieces of SVG, and where a moment lies."""

    def __init__(self, start: float, span: float) -> None:
        self.parts: list[str] = []
        self._start, self._span = start, span

    def x(self, moment: float) -> float:
        return LEFT + WIDTH * min(max((moment - self._start) / self._span, 0.0), 1.0)

    def text(self, x: float, y: float, text: str, limit: int, attributes: str = "") -> None:
        self.parts.append(f'<text x="{x:.4g}" y="{y}" {attributes}>{escaped(text, limit)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, attributes: str) -> None:
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {attributes}/>')


def _chosen_lanes(slices: Slices) -> list[int]:
    """Lanes in order; of more than ``MOST_LANES`` those with the most slices, and the empty ones that say why."""
    counts = np.diff(slices.offsets)
    weight = [(not lane.empty, -int(count)) for lane, count in zip(slices.lanes, counts, strict=True)]
    return sorted(sorted(range(len(weight)), key=weight.__getitem__)[:MOST_LANES])


def _lanes(picture: _Picture, slices: Slices, place: dict[int, int], columns: int, two: bool) -> None:
    start, end = domain_of(slices)
    covered = (
        coverage(slices, start, end, columns) if len(slices) else np.zeros((len(slices.lanes), len(KINDS), columns))
    )
    width = WIDTH / columns
    for lane, y in place.items():
        one = slices.lanes[lane]
        picture.text(4, y + 12, (f"{'AB'[one.trace]} " if two else "") + one.label, 24)
        picture.parts.append(f'<path d="M{LEFT} {y + ROW - 1}h{WIDTH}" stroke="currentColor" stroke-opacity=".15"/>')
        if one.empty:
            picture.text(LEFT + 6, y + 12, one.empty, 60, 'font-style="italic"')
            continue
        kind = covered[lane].argmax(axis=0)
        total = np.minimum(covered[lane].sum(axis=0), 1.0)
        shade = np.where(total > 0, np.minimum((total * len(SHADES)).astype(np.int64), len(SHADES) - 1), -1)
        code = np.where(shade >= 0, kind * len(SHADES) + shade, -1)
        edges = np.flatnonzero(np.diff(code, prepend=-2, append=-2))
        runs: dict[int, list[str]] = defaultdict(list)
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if code[first] >= 0:
                runs[int(code[first])].append(f"M{LEFT + first * width:.5g} {y + 8}h{(last - first) * width:.4g}")
        for number, run in sorted(runs.items()):
            kind_number, level = divmod(number, len(SHADES))
            picture.parts.append(
                f'<path stroke="{LOOKS[KINDS[kind_number]].hue}" stroke-opacity="{SHADES[level]}" stroke-width="12" '
                f'd="{"".join(run)}"/>'
            )


def _labels(picture: _Picture, slices: Slices, place: dict[int, int]) -> None:
    """Frames and names of the longest slices, as far as there is room on their lane."""
    taken: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for index in longest(slices, 6 * MOST_LABELS):
        lane = int(np.searchsorted(slices.offsets, index, side="right")) - 1
        left = picture.x(float(slices.start[index]))
        right = picture.x(float(slices.start[index]) + float(slices.duration[index]))
        if lane not in place or right - left < 20 or any(left < b and right > a for a, b in taken[lane]):
            continue
        taken[lane].append((left, right))
        y, kind = place[lane], KINDS[int(slices.kind[index])]
        picture.rect(left, y + 2, right - left, 12, 'fill="none" stroke="currentColor" stroke-opacity=".6"')
        if room := int((right - left - 6) / 6.7):
            name = slices.names[int(slices.name[index])] if room >= 4 else LOOKS[kind].letter
            # White under black: readable on every hue and on either theme.
            look = 'fill="#000" stroke="#fff" stroke-width="2" paint-order="stroke" font-size="10"'
            picture.text(left + 3, y + 11, name, min(room, 48), look)
        if sum(map(len, taken.values())) >= MOST_LABELS:
            break


def _marks(picture: _Picture, marks: list[Any], place: dict[int, int]) -> None:
    for start, end, kind, label, lane in marks[:MOST_MARKS]:
        if lane not in place:
            continue
        x, y = picture.x(start), place[lane]
        width = max(picture.x(end) - x, 1)
        hue, letter = ("#d55e00", "S") if kind == "sync" else ("#cc79a7", "!")
        picture.parts.append(
            f"<g><title>{escaped(f'{kind}: {label}', 120)}</title>"
            f'<path d="M{x:.1f} {y + 16}h{width:.1f}" stroke="{hue}" stroke-width="3"/>'
            f'<text x="{x:.1f}" y="{y + 9}" font-weight="bold" fill="{hue}" stroke="#fff" stroke-width="2" '
            f'paint-order="stroke">{letter}</text></g>'
        )
    if len(marks) > MOST_MARKS:
        picture.text(LEFT + WIDTH - 200, 12, f"{MOST_MARKS} of {len(marks):,} marks drawn", 40)


def _steps(picture: _Picture, steps: list[Any], title: str, y: int) -> int:
    picture.text(4, y + 11, title, 24)
    last = -1.0
    for label, start, end in steps[:: max(1, -(-len(steps) // MOST_STEPS))]:
        x = picture.x(start)
        picture.parts.append(
            f'<path d="M{x:.1f} {y + 14}v-10h{picture.x(end) - x:.1f}v10" fill="none" stroke="currentColor"/>'
        )
        room = int((picture.x(end) - x - 4) / 6.7)
        if room >= 3 and x > last:
            picture.text(x + 3, y + 13, label, min(room, 40), 'font-size="10"')
            last = picture.x(end)
    return y + 18


def _difference(picture: _Picture, rows: list[Any], y: int) -> int:
    """Bars up where B took longer, down where it took less; the sign says it too."""
    picture.text(4, y + 9, "B minus A", 24)
    picture.text(4, y + 20, "orange up: B slower", 24, 'font-size="10"')
    picture.text(4, y + 30, "blue down: B faster", 24, 'font-size="10"')
    most = max((abs(row[2]) for row in rows), default=0) or 1
    middle = y + 15
    picture.parts.append(f'<path d="M{LEFT} {middle}h{WIDTH}" stroke="currentColor" stroke-opacity=".4"/>')
    for start, end, delta, label in rows[:: max(1, -(-len(rows) // 100))]:
        height = 13 * abs(delta) / most
        x, top = picture.x(start), middle - height if delta > 0 else middle
        hue = "#d55e00" if delta > 0 else "#0072b2"
        width = max(picture.x(end) - x, 1)
        picture.parts.append(f"<g><title>{escaped(f'{label}: {delta:+,} ns', 80)}</title>")
        picture.rect(x, top, width, max(height, 1), f'fill="{hue}" fill-opacity=".7"')
        picture.parts.append("</g>")
        if width > 60:
            picture.text(x + 2, middle - 2 if delta > 0 else middle + 10, signed(delta), 20, 'font-size="10"')
    return y + 34


def _ruler(picture: _Picture, y: int) -> int:
    span = picture._span
    step = 10.0 ** np.floor(np.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    unit, word = next((unit, word) for unit, word in UNITS if step >= unit or unit == 1.0)
    first = np.ceil(picture._start / step) * step
    picture.text(4, y + 11, f"time ({word})", 24)
    for tick in np.arange(first, picture._start + span + step / 1e6, step):
        x = picture.x(tick)
        picture.parts.append(f'<path d="M{x:.1f} {y + 14}v-4" stroke="currentColor"/>')
        picture.text(min(x, LEFT + WIDTH - 30), y + 9, f"{tick / unit:,.10g}", 20, 'font-size="10"')
    return y + 18


def _legend(picture: _Picture, slices: Slices, y: int) -> int:
    x = float(LEFT)
    for kind in np.flatnonzero(np.bincount(slices.kind, minlength=len(KINDS))).tolist():
        look = LOOKS[KINDS[kind]]
        width = 34 + 6.7 * len(look.title)
        if x + width > LEFT + WIDTH:
            x, y = float(LEFT), y + 16
        picture.rect(x, y + 3, 10, 10, f'fill="{look.hue}"')
        picture.text(x + 14, y + 12, f"{look.letter} {look.title}", 30)
        x += width
    return y + 20
