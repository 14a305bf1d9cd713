"""Figures of the lesson on the persistent batch. A colour never stands alone: dashes and markers say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mrv2lab.teach.batch_lesson import Rows

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
MARKERS = ("circle", "square", "diamond", "x", "cross", "triangle-up", "star")
RUNNERS: dict[str, dict[str, Any]] = {
    "v1": {"line": {"color": "#D55E00"}, "marker": {"symbol": "square", "size": 9}, "name": "V1"},
    "mrv2": {"line": {"color": "#0072B2", "dash": "dash"}, "marker": {"symbol": "circle", "size": 9}, "name": "MRV2"},
}


def rows_picture(history: Mapping[str, Sequence[Rows]], titles: Mapping[str, str]) -> go.Figure:
    """The row of each request over the steps, a panel a runner; markers where a request comes, moves or ends."""
    figure = make_subplots(1, len(history), shared_yaxes=True, subplot_titles=[titles[kind] for kind in history])
    names = list(dict.fromkeys(name for steps in history.values() for rows in steps for name in rows))
    for column, steps in enumerate(history.values(), start=1):
        for i, name in enumerate(names):
            points = [(step, rows[name]) for step, rows in enumerate(steps) if name in rows]
            y = [row for _, row in points]
            sizes = [9 if k in (0, len(y) - 1) or y[k] != y[k - 1] else 0 for k in range(len(y))]
            figure.add_scatter(
                x=[step for step, _ in points],
                y=y,
                mode="lines+markers",
                line={"color": COLORS[i % 7], "dash": ("solid", "dot")[i // 7 % 2], "width": 3, "shape": "hv"},
                marker={"color": COLORS[i % 7], "symbol": MARKERS[i % 7], "size": sizes, "opacity": 1},
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="step (turns of the loop)")
    figure.update_yaxes(title_text="row (index)", col=1)
    legend = {"title": "request", "tracegroupgap": 0, "itemsizing": "constant"}
    figure.update_layout(title="The row of each request", height=520, template="plotly_white", legend=legend)
    return figure


def condense_picture(curves: Mapping[str, tuple[Sequence[int], Sequence[tuple[float, float]]]]) -> go.Figure:
    """KiB moved above, microseconds below; a column for each of ``curves``: title -> (x, (bytes, us) of each x)."""
    figure = make_subplots(2, len(curves), shared_xaxes=True, vertical_spacing=0.08, horizontal_spacing=0.06)
    for column, (title, (x, costs)) in enumerate(curves.items(), start=1):
        series = ([moved / 1024 for moved, _ in costs], [us for _, us in costs])
        for row, values in enumerate(series, start=1):
            line = {"color": ("#0072B2", "#D55E00")[row - 1], "dash": ("solid", "dash")[row - 1]}
            marker = {"symbol": ("circle", "square")[row - 1], "size": 8}
            figure.add_scatter(
                x=x, y=values, mode="lines+markers", line=line, marker=marker, showlegend=False, row=row, col=column
            )
        figure.update_xaxes(type="log", tickvals=x, tickangle=0, col=column)
        figure.update_xaxes(title_text=title, row=2, col=column)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="moved (KiB a step)", row=1, col=1)
    figure.update_yaxes(title_text="time, this machine (µs)", row=2, col=1)
    figure.update_layout(title="What condense costs", height=480, template="plotly_white")
    return figure


def bus_picture(panels: Mapping[str, tuple[str, Sequence[int], Mapping[str, Sequence[float]]]]) -> go.Figure:
    """Bytes a step from host to device; ``panels``: title -> (name of x, x, runner -> bytes of each x)."""
    figure = make_subplots(1, len(panels), shared_yaxes=True, subplot_titles=list(panels))
    for column, (name, x, sent) in enumerate(panels.values(), start=1):
        for kind, values in sent.items():
            figure.add_scatter(
                x=x, y=values, mode="lines+markers", **RUNNERS[kind], showlegend=column == 1, row=1, col=column
            )
        figure.update_xaxes(title_text=name, type="log", tickvals=x, col=column)
    figure.update_yaxes(type="log", title_text="bytes a step", col=1)
    figure.update_layout(title="Host to device (UVA included), steady decode", height=380, template="plotly_white")
    return figure
