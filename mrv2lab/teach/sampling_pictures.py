"""Pictures of the sampling lesson: noise and its tail, the race, what a cut keeps, memory, and what penalties cost.

Colours are Okabe and Ito's; hatching, dashes or markers are the second cue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mrv2lab.teach.noise_lab import OURS, TWENTY_FOUR_BITS
from mrv2lab.teach.sampling_lab import softmax

Array = np.ndarray[Any, Any]
STATIC: dict[str, Any] = {"staticPlot": True}
"""``figure.show(config=STATIC)``: a picture, no controls."""
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#BBBBBB"


def noise_picture(noise: Array) -> go.Figure:
    """How often each value of ``noise`` float32[...] came, beside Gumbel's density exp(-g - exp(-g))."""
    counts, edges = np.histogram(noise.ravel(), bins=np.linspace(-3.5, 10, 82), density=True)
    g = (edges[:-1] + edges[1:]) / 2
    figure = go.Figure()
    figure.add_bar(x=g, y=counts, name="the noise", marker={"color": "#56B4E9", "line": {"width": 0}})
    density = np.exp(-g - np.exp(-g))
    figure.add_scatter(x=g, y=density, mode="lines", name="Gumbel's density", line={"color": RED, "dash": "dash"})
    figure.update_layout(**_layout(f"{noise.size:,} values of noise", 330), bargap=0)
    figure.update_xaxes(title="noise g (added to a logit; no unit)")
    return figure.update_yaxes(title="density (1 / unit of g)")


def tail_picture(count: int = 1200) -> go.Figure:
    """The least uniforms that each way can make, in units of 2^-24: from the bits r = 0, 1, 2, ... of the hash."""
    bits = np.arange(count, dtype=np.uint32)
    figure = go.Figure()
    for name, uniforms, look in (
        ("32 bits (ours)", OURS.uniforms, {"color": BLUE}),
        ("24 bits (the mutant)", TWENTY_FOUR_BITS.uniforms, {"color": RED, "dash": "dot"}),
    ):
        figure.add_scatter(x=bits, y=uniforms(bits)[0] * 2.0**24, mode="lines", name=name, line={**look, "width": 3})
    figure.update_layout(**_layout("The winning tail: uniforms next to 0", 330))
    figure.update_xaxes(title="bits r of the hash (the rarest winners, from 0 on)")
    return figure.update_yaxes(title="uniform u (multiples of 2<sup>-24</sup>)")


def race_picture(logits: Array, rows: Sequence[Array], names: Sequence[str]) -> go.Figure:
    """A panel a draw: each token's logit, and above it logit + noise. The greatest sum wins and has a star.

    ``logits`` float[V]; ``rows`` one float[V] of noise a draw; ``names`` of the tokens."""
    figure = make_subplots(1, len(rows), shared_yaxes=True, subplot_titles=[f"draw {i + 1}" for i in range(len(rows))])
    for column, noise in enumerate(rows, start=1):
        score = logits + noise
        best = int(score.argmax())
        shown = {"row": 1, "col": column}
        for token, name in enumerate(names):
            line = {"color": GREY, "width": 3}
            figure.add_scatter(
                x=[name] * 2, y=[logits[token], score[token]], mode="lines", line=line, showlegend=False, **shown
            )
        only_once = {"showlegend": column == 1}
        dash = {"color": BLUE, "symbol": "line-ew-open", "size": 14, "line": {"width": 3}}
        figure.add_scatter(x=list(names), y=logits, mode="markers", name="logit", marker=dash, **only_once, **shown)
        losers = [token for token in range(len(names)) if token != best]
        dot = {"color": ORANGE, "symbol": "circle", "size": 9}
        at = {"x": [names[token] for token in losers], "y": score[losers]}
        figure.add_scatter(**at, mode="markers", name="logit + noise", marker=dot, **only_once, **shown)
        star = {"color": RED, "symbol": "star", "size": 15}
        at = {"x": [names[best]], "y": [score[best]]}
        figure.add_scatter(**at, mode="markers", name="the winner", marker=star, **only_once, **shown)
    figure.update_layout(**_layout("The race: one draw is one argmax", 400))
    figure.update_xaxes(title="token", categoryorder="array", categoryarray=list(names))
    figure.update_yaxes(title="score (logits; no unit)", col=1)
    return figure


def kept_picture(logits: Array, kept: Mapping[str, Array], names: Sequence[str]) -> go.Figure:
    """A panel a cut, named with its parameters: the law, most likely token first, and what the cut keeps of it.

    ``kept``: title -> bool[V]."""
    order = np.argsort(-logits, kind="stable")
    probs = 100 * softmax(logits)[order]
    shown = [names[token] for token in order]
    figure = make_subplots(1, len(kept), shared_yaxes=True, subplot_titles=list(kept), horizontal_spacing=0.03)
    for column, keep in enumerate(kept.values(), start=1):
        for name, inside, color, hatch in (("kept", keep[order], BLUE, ""), ("dropped", ~keep[order], GREY, "/")):
            figure.add_bar(
                x=shown,
                y=np.where(inside, probs, 0),
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                marker={"color": color, "pattern": {"shape": hatch, "fgcolor": "black", "size": 5}},
                row=1,
                col=column,
            )
    figure.update_layout(**_layout("What each cut keeps", 380), barmode="stack")
    figure.update_xaxes(title="token, most likely first", categoryorder="array", categoryarray=shown, tickangle=0)
    figure.update_yaxes(title="probability before the cut (%)", col=1)
    return figure


def memory_picture(bytes_of: Mapping[str, Mapping[str, float]], title: str) -> go.Figure:
    """``bytes_of``: stage -> way -> bytes; a group of bars a stage, on a logarithmic axis."""
    figure = go.Figure()
    looks = ((RED, "x"), (BLUE, ""), (GREEN, "."), (ORANGE, "/"))
    ways = list(dict.fromkeys(way for stage in bytes_of.values() for way in stage))
    for way, (color, hatch) in zip(ways, looks, strict=False):
        values = [stage.get(way) for stage in bytes_of.values()]
        figure.add_bar(
            x=list(bytes_of),
            y=[None if value is None else value / 2**20 for value in values],
            text=["" if value is None else f"{value / 2**20:,.3g}" for value in values],
            textposition="outside",
            cliponaxis=False,
            name=way,
            marker={"color": color, "pattern": {"shape": hatch, "fgcolor": "black", "size": 6}},
        )
    figure.update_layout(**_layout(title, 380), barmode="group")
    figure.update_xaxes(title="stage")
    return figure.update_yaxes(type="log", title="extra memory (MiB, logarithmic)")


def penalty_picture(costs: Sequence[Mapping[str, Any]], title: str) -> go.Figure:
    """Rows of ``penalties_by_length``: a step's penalties against the length of the outputs, both axes logarithmic.
    Whiskers are the quartiles."""
    figure = go.Figure()
    for impl, name, color, dash, symbol in (
        ("mrv2lab v1", "V1: count everything again", RED, "dash", "square"),
        ("mrv2lab", "MRV2: counts on the device", BLUE, "solid", "circle"),
    ):
        rows = [row for row in costs if row["impl"] == impl]
        figure.add_scatter(
            x=[row["output_len"] for row in rows],
            y=[row["median_us"] for row in rows],
            error_y={
                "array": [row["q3_us"] - row["median_us"] for row in rows],
                "arrayminus": [row["median_us"] - row["q1_us"] for row in rows],
                "color": color,
            },
            mode="lines+markers",
            name=name,
            line={"color": color, "dash": dash},
            marker={"symbol": symbol, "size": 9},
        )
    lengths = sorted({row["output_len"] for row in costs})
    figure.update_layout(**_layout(title, 380))
    figure.update_xaxes(
        type="log", title="tokens of output (each request)", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths]
    )
    return figure.update_yaxes(type="log", title="a step's penalties (µs, this machine)")


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "title": title,
        "height": height,
        "template": "plotly_white",
        "font": {"color": "black"},
        "legend": {"title": {"text": ""}},
        "margin": {"l": 10, "r": 10, "t": 80, "b": 10},
    }
