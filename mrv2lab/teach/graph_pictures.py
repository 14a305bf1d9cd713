"""Pictures of the lesson on graphs: which shape took which steps, what padding wastes, and what launching costs.

Colours are Okabe and Ito's; hatching, dashes or markers are the second cue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mrv2lab.graphs import GraphStats

BLUE, ORANGE, GREEN, GREY, BLACK = "#0072B2", "#E69F00", "#009E73", "#BBBBBB", "#000000"
LOOKS = {"full": (BLUE, ""), "piecewise": (ORANGE, "/"), "eager": (GREY, ".")}
"""Mode -> colour and hatching."""
WAYS = {
    "eager": (ORANGE, "dash", "square-open"),
    "pieces": (GREEN, "dot", "diamond"),
    "graph": (BLUE, "solid", "circle"),
}
"""How a step is launched -> colour, dash, marker."""


def shapes_picture(rows: Sequence[Mapping[str, Any]], stats: GraphStats) -> go.Figure:
    """Steps that each captured shape took, smallest shapes at the bottom, and the eager ones above. Shapes that took
    none are counted, not drawn. ``rows`` are ``CudaGraphManager.rows()``."""
    hit = sorted((row for row in rows if row["steps"]), key=lambda row: (row["tokens"], row["mode"]))
    figure = go.Figure()
    for mode in ("full", "piecewise"):
        mine = [row for row in hit if row["mode"] == mode]
        figure.add_bar(
            orientation="h",
            y=[_label(row) for row in mine],
            x=[row["steps"] for row in mine],
            text=[f"{row['steps']:,}" for row in mine],
            textposition="outside",
            hovertext=[
                f"{row['graph']}<br>takes {row['from_tokens']} to {row['to_tokens']} tokens<br>"
                f"{row['step_tokens']:,} tokens there were, {row['padding']:,} computed for nothing"
                for row in mine
            ],
            **_bar(mode),
        )
    eager = sum(tally.steps for tally in stats.tallies() if tally.decision.mode == "eager")
    labels = [_label(row) for row in hit]
    if eager:
        labels.append("eager")
        why = "<br>".join(
            f"{tally.steps:,} x {tally.decision.reason}"
            for tally in stats.tallies()[:8]
            if tally.decision.mode == "eager"
        )
        figure.add_bar(
            orientation="h",
            y=["eager"],
            x=[eager],
            text=[f"{eager:,}"],
            textposition="outside",
            hovertext=[why],
            **_bar("eager"),
        )
    unused = len(rows) - len(hit)
    title = "Which graph took how many steps"
    if unused:
        title += f" ({unused} of {len(rows)} captured shapes took none)"
    figure.update_layout(**_layout(title, 150 + 26 * max(len(labels), 3)), barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=labels, title="tokens of the padded step")
    return figure.update_xaxes(title="steps")


def padding_picture(stats: GraphStats, last: int = 120) -> go.Figure:
    """The last steps one by one: tokens there were, and on top of them those computed for nothing."""
    shown = list(stats.recent)[-last:]
    figure = go.Figure()
    for mode in LOOKS:
        mine = [one for one in shown if one.decision.mode == mode]
        if mine:
            figure.add_bar(
                x=[one.step for one in mine],
                y=[one.num_tokens for one in mine],
                width=0.85,  # else eager steps, which are far apart, would be as wide as the gaps
                hovertext=[f"step {one.step}: {one.decision.reason}" for one in mine],
                **_bar(mode),
            )
    padded = [one for one in shown if one.padding]
    figure.add_bar(
        x=[one.step for one in padded],
        y=[one.padding for one in padded],
        base=[one.num_tokens for one in padded],
        name="padding",
        width=0.85,
        hovertext=[f"step {one.step}: {one.padding} tokens for nothing" for one in padded],
        hoverinfo="text",
        marker={"color": "white", "line": {"color": BLACK, "width": 1}, "pattern": {"shape": "x", "fgcolor": BLACK}},
    )
    tokens, waste = sum(one.num_tokens for one in shown), sum(one.padding for one in shown)
    share = 100 * waste / max(tokens + waste, 1)
    title = f"Padding: {waste:,} of {tokens + waste:,} tokens computed for nothing ({share:.1f} %)"
    figure.update_layout(**_layout(title, 340), barmode="overlay")
    figure.update_xaxes(title="step (number)")
    return figure.update_yaxes(title="tokens a step")


def launch_picture(frame: pd.DataFrame, title: str = "") -> go.Figure:
    """Share of a step that the host spends launching the forward pass, against the batch's size: segment by segment,
    in pieces, by one graph.

    ``frame`` has columns requests, way (eager, pieces, graph), forward_us and step_us, as
    :func:`graph_lesson.launch_share` and ``bench.graph_bench`` make them."""
    figure = go.Figure()
    for way, (color, dash, symbol) in WAYS.items():
        mine = frame[frame["way"] == way].sort_values("requests")
        if len(mine):
            figure.add_scatter(
                x=mine["requests"],
                y=100 * mine["forward_us"] / mine["step_us"],
                mode="lines+markers",
                name=way,
                line={"color": color, "dash": dash, "width": 2},
                marker={"symbol": symbol, "size": 9},
                hovertext=[
                    f"{row.requests} requests, {way}: {row.forward_us:,.0f} of {row.step_us:,.0f} µs"
                    for row in mine.itertuples()
                ],
                hoverinfo="text",
            )
    sizes = sorted(frame["requests"].unique())
    figure.update_layout(**_layout(title or "What launching the forward pass takes of a decode step", 340))
    figure.update_xaxes(title="requests in the batch", type="log", tickvals=sizes, ticktext=[str(n) for n in sizes])
    return figure.update_yaxes(title="launching / step (%)", rangemode="tozero")


def _label(row: Mapping[str, Any]) -> str:
    kind = "piecewise" if row["mode"] == "piecewise" else "decodes" if row["query_len"] else "any lengths"
    return f"{row['tokens']} ({kind})"


def _bar(mode: str) -> dict[str, Any]:
    color, shape = LOOKS[mode]
    pattern = {"shape": shape, "fgcolor": "black", "size": 6, "fgopacity": 0.5}
    return {"name": mode, "marker": {"color": color, "pattern": pattern}, "hoverinfo": "text"}


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "title": title,
        "height": height,
        "template": "plotly_white",
        "font": {"color": "black"},
        "legend": {"title": {"text": ""}},
        "margin": {"l": 10, "r": 10, "t": 80, "b": 10},
    }
