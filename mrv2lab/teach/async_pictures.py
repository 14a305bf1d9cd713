"""Figures of the lesson on the asynchronous loop: host beside device, from recordings, and the sweep of a modelled
device.

A colour never stands alone: hatching, dashes and markers say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mrv2lab.recording.recording import Recording

LANES = ("host works", "host waits", "device")
STEP_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
HATCHES = ("", "/", ".", "x")
SWEEP = {
    ("mrv2", False): ("MRV2 sync", "#56B4E9", "dash", "circle-open"),
    ("mrv2", True): ("MRV2 async", "#0072B2", "solid", "circle"),
    ("v1", False): ("V1 sync", "#E69F00", "dash", "square-open"),
    ("v1", True): ("V1 async", "#D55E00", "solid", "square"),
}
"""(runner, asynchronous) -> name, colour, dash, marker."""


class Bar(NamedTuple):
    """Something that took time: microseconds from the start of the first step shown."""

    lane: str
    step: int
    what: str
    start: float
    end: float


def bars_of(recording: Recording, first: int, count: int) -> list[Bar]:
    """Host phases and the main stream's work of ``count`` steps. On the device a bar is a launch where launches were
    stamped, else a phase, the gaps between its launches included."""
    bars: list[Bar] = []
    zero = min(span.start_ns for span in recording[first].spans)
    for index in range(first, first + count):
        record, meta = recording[index], recording.view(index).meta
        offset = (min(span.start_ns for span in record.spans) - zero) / 1000
        for span in meta["spans"]:
            if not span["depth"] and not span["added"]:
                lane = "host waits" if span["name"] in ("wait_output", "barrier_wait") else "host works"
                bars.append(Bar(lane, record.step, span["name"], offset + span["start"], offset + span["end"]))
        for one in meta["marks"] + meta["device_phases"]:
            known = one["device_start"] is not None and one["device_end"] is not None
            if known and one["stream"] == "main" and not one["added"]:
                start, end = offset + one["device_start"], offset + one["device_end"]
                bars.append(Bar("device", record.step, one["name"], start, end))
    return bars


def timeline(recordings: Mapping[str, Recording], first: int, count: int = 4, title: str = "") -> go.Figure:
    """Up to four steps of each recording, one below the other; a colour and a hatching a step."""
    figure = make_subplots(
        len(recordings), 1, shared_xaxes=True, subplot_titles=list(recordings), vertical_spacing=0.16
    )
    shown = 0.0
    for row, recording in enumerate(recordings.values(), start=1):
        bars = bars_of(recording, first, count)
        shown = max(shown, *(bar.end for bar in bars if bar.lane == "device"))
        for i, step in enumerate(sorted({bar.step for bar in bars})):
            mine = [bar for bar in bars if bar.step == step]
            pattern = {"shape": HATCHES[i], "fgcolor": "black", "size": 5, "fgopacity": 0.5}
            figure.add_bar(
                orientation="h",
                y=[bar.lane for bar in mine],
                base=[bar.start for bar in mine],
                x=[bar.end - bar.start for bar in mine],
                hovertext=[f"step {bar.step}: {bar.what}, {bar.end - bar.start:.0f} µs" for bar in mine],
                hoverinfo="text",
                name=f"{i + 1}. step",
                # The line keeps a launch that was over at once visible, as a tick.
                marker={"color": STEP_COLORS[i], "pattern": pattern, "line": {"width": 1, "color": STEP_COLORS[i]}},
                legendgroup=str(i),
                showlegend=row == 1,
                row=row,
                col=1,
            )
    height = 170 + 170 * len(recordings)
    figure.update_layout(
        barmode="overlay", title=title, height=height, template="plotly_white", legend_title="belongs to"
    )
    figure.update_yaxes(categoryorder="array", categoryarray=LANES[::-1])
    figure.update_xaxes(range=[0, 1.05 * shown])
    figure.update_xaxes(title_text="time (µs)", row=len(recordings))
    return figure


def sweep_picture(launches: Sequence[float], step_us: Mapping[tuple[str, bool], Sequence[float]]) -> go.Figure:
    """Microseconds a step against the modelled microseconds a launch, for each (runner, asynchronous)."""
    figure = go.Figure()
    for key, values in step_us.items():
        name, color, dash, symbol = SWEEP[key]
        line, marker = {"color": color, "dash": dash}, {"symbol": symbol, "size": 9}
        figure.add_scatter(x=launches, y=values, mode="lines+markers", name=name, line=line, marker=marker)
    figure.update_xaxes(type="log", title_text="modelled device time a launch (µs)", tickvals=launches)
    figure.update_yaxes(type="log", title_text="time a step (µs)")
    figure.update_layout(
        title="Steady decode of 8 requests (host real, device modelled)", height=420, template="plotly_white"
    )
    return figure
