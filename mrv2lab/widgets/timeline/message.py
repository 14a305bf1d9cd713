"""A timeline as the page's module reads it: a small JSON header and five buffers.

``{"type": "data", "traces": [{"title", "modelled"}], "lanes": [[trace, group, rank, label, why it is empty,
full label]], "offsets": [lanes + 1], "groups", "kinds": [[name, letter, hue, hatch, title]],
"steps": [[label, start, end]] a trace,
"marks": [[start, end, kind, label, lane]], "difference": [[start, end, delta, label]], "dtypes": [duration, name],
"domain": [start, end], "view": [start, end] to begin with or null, "height", "note": a sentence for the status
line}``; buffers: names as UTF-8 JSON, start, duration, name, kind. Little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from mrv2lab.widgets.timeline.palette import LOOKS
from mrv2lab.widgets.timeline.slices import GROUPS, Slices
from mrv2lab.widgets.timeline.text import plain

MOST_NAME = 100_000
"""Characters of a name; nobody reads on, and one name must not stop the rest."""
Overlays = dict[str, list[Any]]


def encode(
    slices: Slices,
    titles: Sequence[tuple[str, bool]],
    overlays: Overlays,
    height: int,
    note: str = "",
    view: tuple[int, int] | None = None,
) -> tuple[dict[str, Any], list[bytes]]:
    """The message that shows slices; ``titles``: title and whether device times are modelled, for each trace;
    ``overlays``: ``steps``, ``marks`` and ``difference``."""
    header = {
        "type": "data",
        "traces": [{"title": plain(title), "modelled": modelled} for title, modelled in titles],
        "lanes": [
            [lane.trace, lane.group, lane.rank, plain(lane.label), lane.empty, plain(lane.full)]
            for lane in slices.lanes
        ],
        "offsets": slices.offsets.tolist(),
        "groups": GROUPS,
        "kinds": [[name, look.letter, look.hue, look.hatch, look.title] for name, look in LOOKS.items()],
        **overlays,
        "dtypes": [slices.duration.dtype.name, slices.name.dtype.name],
        "domain": domain_of(slices),
        "view": view,
        "height": height,
        "note": note,
    }
    columns = (slices.start, slices.duration, slices.name, slices.kind)
    return header, [
        orjson.dumps([plain(name, MOST_NAME) for name in slices.names]),
        *(_bytes(column) for column in columns),
    ]


def domain_of(slices: Slices) -> list[float]:
    """First start and last end on the axis; [0, 0] without slices."""
    if not len(slices):
        return [0.0, 0.0]
    return [float(slices.start.min()), float((slices.start + slices.duration).max())]


def _bytes(column: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes()
