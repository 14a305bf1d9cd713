"""Pictures of the memory ledger: bytes by place as R or L grows, and who owns them.

Colours are Okabe and Ito's; hatching is the second cue.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

LOOKS = {
    "device": ("#0072B2", ""),
    "uva": ("#E69F00", "/"),
    "pinned": ("#009E73", "x"),
    "host": ("#BBBBBB", "."),
}
WORDS = {"max_num_reqs": "R, rows", "max_model_len": "L, tokens of a request", "max_num_batched_tokens": "T, tokens"}
MEGABYTE = 1e6


def growth_picture(growth: pd.DataFrame, title: str = "State tables by place") -> go.Figure:
    """Stacked bars of a frame of ``check.memory_ledger.growth``: bytes by place, a bar for each row."""
    figure = go.Figure()
    values = [f"{value:,}" for value in growth.index]
    for place, (colour, shape) in LOOKS.items():
        figure.add_bar(
            x=values,
            y=growth[place] / MEGABYTE,
            name=place,
            marker={"color": colour, "pattern": {"shape": shape, "fgcolor": "black"}, "line": {"width": 1}},
            hovertemplate="%{x}: %{y:,.3f} MB<extra>" + place + "</extra>",
        )
    figure.update_layout(**_layout(title), barmode="stack")
    name = str(growth.index.name)
    figure.update_xaxes(title=WORDS.get(name, name), type="category")
    return figure.update_yaxes(title="MB")


def owners_picture(by_owner: pd.DataFrame, most: int = 12) -> go.Figure:
    """The modules with the most bytes, a bar each: a frame of ``Ledger.by_owner``."""
    order = by_owner.sum(axis=1).sort_values().index[-most:]
    figure = go.Figure()
    for place, (colour, shape) in LOOKS.items():
        if place in by_owner:
            figure.add_bar(
                y=list(order),
                x=by_owner.loc[order, place] / MEGABYTE,
                name=place,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": shape, "fgcolor": "black"}, "line": {"width": 1}},
            )
    figure.update_layout(**_layout("Who owns the bytes"), barmode="stack")
    return figure.update_xaxes(title="MB")


def _layout(title: str) -> dict[str, Any]:
    return {"title": title, "template": "plotly_white", "height": 400, "legend_title_text": "place"}
