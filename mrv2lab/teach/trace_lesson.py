"""What the lesson on foreign traces shows beside the analyses: lanes, one step's part of a trace, and how to know the
public files; and the launch queue drawn."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.intervals import union
from mrv2lab.trace.launch_queue import queue_depth
from mrv2lab.trace.steps import step_of, steps
from mrv2lab.trace.trace import DEVICE_KINDS, Trace, TraceError
from mrv2lab.trace.verdict import verdict

if TYPE_CHECKING:
    import pandas as pd

PUBLIC: dict[str, tuple[str, str]] = {
    "7f5e9c9dc4ba71371fde1d947204134575b05d7a614986f249fa8142663c7ca2": (
        "tests/traces/b200/eager_trace.json.gz",
        "vLLM's V1 runner on a B200, one eager prefill of 888 tokens",
    ),
    "da0a9ffe51da7b5cc0ece37be5708c4c002a2f89e2839bd2bad00ab8d7e6f8c5": (
        "tests/traces/inference/vllm_decode_full/graph_execution.json.gz",
        "vLLM's V1 runner, one decode step of 32 requests as a single graph launch (ROCm)",
    ),
}
"""sha256 -> path and contents, in github.com/AMD-AGI/TraceLens at commit 171dd747 (MIT licence). They are not here."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
DASHES = ("solid", "dash", "dot", "dashdot")


def published(path: str | Path) -> str:
    """Which of :data:`PUBLIC` a file is, in one sentence."""
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    if digest not in PUBLIC:
        return "This is none of the two public files."
    where, what = PUBLIC[digest]
    return f"This is {where} of AMD-AGI/TraceLens: {what}."


def lanes(trace: Trace) -> pd.DataFrame:
    """One row a lane that has events: ``role``, ``events``, ``busy_us`` (time in which any of them ran, nested
    ones once), ``first_us``, ``last_us``."""
    import pandas as pd

    used = np.unique(trace.lane)
    rows = []
    for lane in used.tolist():
        mine = trace.lane == lane
        first, last = int(trace.start[mine].min()), int(trace.end[mine].max())
        busy = union(trace.start[mine], trace.end[mine]).total_ns
        rows.append((trace.lanes[lane].role, int(mine.sum()), busy / 1e3, first / 1e3, last / 1e3))
    names = pd.Index([str(trace.lanes[lane]) for lane in used], name="lane", dtype="str")
    return pd.DataFrame(rows, names, ["role", "events", "busy_us", "first_us", "last_us"])


def of_step(trace: Trace, row: int) -> Trace:
    """What belongs to one step: its host events, and the device work that they launched, whenever it ran.

    ``row`` counts from 0 as in ``steps(trace)``. Raises ``TraceError`` where there is no such step.
    """
    count = len(steps(trace))
    if not 0 <= row < count:
        raise TraceError(f"{trace.info.title}: there is no step {row}; it has {count}, counted from 0")
    return trace.select(step_of(trace) == row)


def two_ways_to_cut(trace: Trace) -> pd.DataFrame:
    """One row a step: ``its_own`` (pieces of device work that it launched), ``its_own_inside`` (of these, within its
    host range) and ``anyone_inside`` (device work within its host range, whoever launched it)."""
    import pandas as pd

    table = steps(trace)
    work = trace.select(trace.mask(*DEVICE_KINDS))
    anyone = [
        int(((work.start >= start) & (work.end <= end)).sum())
        for start, end in zip(table["host_start_ns"], table["host_end_ns"], strict=True)
    ]
    columns = {
        "step": table["step"],
        "its_own": table["gpu_events"],
        "its_own_inside": table["gpu_events_inside"],
        "anyone_inside": anyone,
    }
    return pd.DataFrame(columns)


def limits(trace: Trace) -> pd.DataFrame:
    """What limits each step, and last the whole trace: ``step``, ``label``, ``sentence``."""
    import pandas as pd

    names = steps(trace)["step"].tolist()
    found = [(name, verdict(of_step(trace, row))) for row, name in enumerate(names)]
    found.append(("the whole file", verdict(trace)))
    rows = [(name, one.label, one.sentence) for name, one in found]
    return pd.DataFrame(rows, columns=["step", "label", "sentence"])


def queue_picture(trace: Trace) -> Any:
    """A plotly figure: waiting launches of every stream over time, with the steps' host ranges behind them."""
    import plotly.graph_objects as go

    depth = queue_depth(trace)
    figure = go.Figure()
    for place, (lane, rows) in enumerate(depth.groupby("lane", sort=False)):
        dash = DASHES[place % len(DASHES)]
        figure.add_scatter(
            x=rows["time_ns"] / 1e6,
            y=rows["depth"],
            name=str(lane),
            mode="lines",
            line={"shape": "hv", "color": COLOURS[place % len(COLOURS)], "dash": dash, "width": 1.5},
        )
    for row in steps(trace).itertuples():
        figure.add_vrect(
            x0=row.host_start_ns / 1e6,
            x1=row.host_end_ns / 1e6,
            fillcolor="#999999",
            opacity=0.2,
            line_width=0,
            annotation_text=f"{row.Index}: {row.kind}",
            annotation_position="top left",
            annotation_font_size=11,
        )
    title = "Launches that wait for their turn (grey: the steps on the host)"
    if not len(depth):
        title = f"No launches to count: {'; '.join(depth.attrs['cannot_say'])}"[:110]
    figure.update_layout(
        title={"text": title, "font_size": 14},
        xaxis_title="ms",
        yaxis_title="launches",
        height=280,
        margin={"l": 60, "r": 20, "t": 50, "b": 45},
        template="plotly_white",
        showlegend=True,
    )
    return figure
