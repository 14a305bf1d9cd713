"""The table beside the static picture: the longest slices, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrv2lab.trace.trace import KINDS
from mrv2lab.widgets.timeline.slices import Slices
from mrv2lab.widgets.timeline.text import escaped

MOST_ROWS = 12


def longest(slices: Slices, count: int) -> list[int]:
    """The longest slices, longest first; of equal ones the earlier in the picture."""
    count = min(count, len(slices))
    if not count:
        return []
    duration = slices.duration.astype(np.float64)
    floor = np.partition(duration, len(slices) - count)[len(slices) - count]
    known = np.flatnonzero(duration > floor)
    ties = np.flatnonzero(duration == floor)[: count - len(known)]
    found = np.concatenate([known, ties])
    return [int(one) for one in found[np.lexsort((found, -duration[found]))]]


def table_html(slices: Slices, titles: Sequence[tuple[str, bool]]) -> str:
    """The longest slices as an inert table."""
    if not len(slices):
        return ""
    rows = []
    for index in longest(slices, MOST_ROWS):
        lane = slices.lane_of(index)
        cells = [f"{'AB'[lane.trace]}"] if len(titles) > 1 else []
        cells += [slices.names[int(slices.name[index])], KINDS[int(slices.kind[index])], lane.label]
        cells += [f"{int(slices.start[index]):,}", f"{int(slices.duration[index]):,}"]
        rows.append("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in cells) + "</tr>")
    heads = (["trace"] if len(titles) > 1 else []) + ["name", "kind", "lane", "start (ns)", "duration (ns)"]
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    caption = f"The longest {len(rows)} of {len(slices):,} events"
    return (
        f'<details><summary>{caption}</summary><table cellpadding="4" rules="rows" style="font-size:12px">'
        f'<caption style="text-align:left">{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></details>"
    )
