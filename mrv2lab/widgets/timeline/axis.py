"""One axis for two traces: A's own nanoseconds, and by how much B is moved to lie on it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrv2lab.trace.trace import DEVICE_KINDS, Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd

ALIGNMENTS = ("start", "step", "first kernel")


def offsets_of(
    traces: Sequence[Trace], align: str | Sequence[int], steps: Sequence[pd.DataFrame | None]
) -> tuple[tuple[int, ...], str]:
    """What to add to each trace's times, in ns, and a sentence where that is not what ``align`` says. The axis is the
    first trace's own time, so its offset is 0 unless given.

    ``align``: ``"start"`` puts the first events together, ``"step"`` moves by the median distance of the starts of the
    steps that both have (as :func:`mrv2lab.trace.align.align` does, so that a comparison agrees), ``"first kernel"``
    puts the first device work together; or one offset a trace. Raises :class:`TraceError` for an alignment that a trace
    has nothing for.
    """
    if not isinstance(align, str):
        offsets = tuple(int(offset) for offset in align)
        if len(offsets) != len(traces):
            raise TraceError(f"align={offsets} has {len(offsets)} offset(s) for {len(traces)} trace(s); give one each")
        return offsets, ""
    if align not in ALIGNMENTS:
        raise TraceError(f"align={align!r} is not known: choose one of {', '.join(map(repr, ALIGNMENTS))} or offsets")
    if len(traces) < 2 or not all(len(trace) for trace in traces):
        return (0,) * len(traces), ""
    if align == "step":
        return _by_steps(traces, steps)
    if align == "first kernel":
        moments = [_first_kernel(trace) for trace in traces]
    else:
        moments = [int(trace.start.min()) for trace in traces]
    return tuple(moments[0] - moment for moment in moments), ""


def _first_kernel(trace: Trace) -> int:
    work = trace.mask(*DEVICE_KINDS)
    if not work.any():
        raise TraceError(f"{trace.info.title}: no GPU activity recorded, so align='first kernel' has no moment to use")
    return int(trace.start[work].min())


def _by_steps(traces: Sequence[Trace], steps: Sequence[pd.DataFrame | None]) -> tuple[tuple[int, ...], str]:
    starts: list[dict[object, int]] = []
    for trace, frame in zip(traces, steps, strict=True):
        if frame is None or not len(frame):
            raise TraceError(f"{trace.info.title}: align='step' needs the steps of each trace; give steps=(a, b)")
        first: dict[object, int] = {}
        for key, start in zip(_keys(frame), frame["host_start_ns"].tolist(), strict=True):
            first.setdefault(key, int(start))  # names repeat, numbers do not
        starts.append(first)
    common = [key for key in starts[0] if key in starts[1]]
    if common:
        return (0, round(statistics.median(starts[0][key] - starts[1][key] for key in common))), ""
    # Steps of different runs need not share a name; then the first step of each is the best anchor there is.
    first_a, first_b = (min(start.values()) for start in starts)
    return (0, first_a - first_b), "The runs share no step number: their first steps lie together."


def _keys(frame: pd.DataFrame) -> list[object]:
    """A step's number where it has one, else its name."""
    names: list[object] = frame["step"].tolist()
    if "number" not in frame:
        return names
    return [
        name if missing else int(number)
        for name, number, missing in zip(names, frame["number"].tolist(), frame["number"].isna(), strict=True)
    ]
