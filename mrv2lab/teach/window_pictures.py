"""Sliding windows as a second KV-cache group: a request's tables as it grows, and the blocks that it holds meanwhile.

Colours are Okabe and Ito's; each cell says its block id, and what has been let go is crossed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import NULL_BLOCK, SamplingParams

HELD, NULLED, EMPTY = "#56B4E9", "#FFFFFF", "#EEEEEE"
LINES = (("#0072B2", "solid", "circle"), ("#E69F00", "dash", "square"), ("#009E73", "dot", "diamond"))


class Growth(NamedTuple):
    """A request between two steps."""

    tokens: int
    """Computed, or promised by a step in flight."""
    # one list a group: the scheduler's table, 0 = let go
    tables: tuple[list[int], ...]


def grow(engine: Engine, prompt: Sequence[int], **wishes: Any) -> Iterator[Growth]:
    """Run one request to its end, alone; after every step in which it lives, its tables as the scheduler has them."""
    name = engine.submit(list(prompt), SamplingParams(ignore_eos=True, **wishes))
    while engine.has_work():
        engine.step()
        request = engine.scheduler.requests.get(name)
        if request is not None and name in engine.scheduler.kv.tables:
            yield Growth(request.num_computed_tokens, engine.scheduler.kv.block_ids(request))


def held(life: Sequence[Growth]) -> pd.DataFrame:
    """Blocks held, a row a number of tokens, a column a group (0, 1, ...)."""
    rows = {one.tokens: [sum(block != NULL_BLOCK for block in table) for table in one.tables] for one in life}
    return pd.DataFrame(rows).T.rename_axis("tokens")


def held_picture(frame: pd.DataFrame, names: Sequence[str]) -> go.Figure:
    """Blocks held against tokens, a line a group. ``frame`` is :func:`held`'s."""
    figure = go.Figure()
    for column, name, (colour, dash, symbol) in zip(frame.columns, names, LINES, strict=False):
        figure.add_scatter(
            x=frame.index, y=frame[column], name=name, mode="lines+markers",
            line={"color": colour, "dash": dash, "shape": "hv"}, marker={"symbol": symbol, "size": 5},
        )  # fmt: skip
    figure.update_layout(
        title="Blocks that one request holds", template="plotly_white", height=320, font={"color": "black"},
        margin={"l": 10, "r": 10, "t": 60, "b": 10},
    )  # fmt: skip
    figure.update_xaxes(title="tokens")
    return figure.update_yaxes(title="blocks", rangemode="tozero")


def tables_picture(life: Sequence[Growth], names: Sequence[str], every: int = 8) -> go.Figure:
    """The scheduler's table of each group after every ``every``-th step and the last: a row a moment, a cell an entry.
    What has been let go is a crossed 0, the null block."""
    moments = [one for i, one in enumerate(life) if i % every == 0 or i == len(life) - 1]
    width = max(len(one.tables[0]) for one in moments)
    figure = go.Figure()
    cells: dict[str, list[tuple[float, int, str]]] = {"held": [], "let go": []}
    for row, one in enumerate(moments):
        for g, table in enumerate(one.tables):
            for column, block in enumerate(table):
                cells["let go" if block == NULL_BLOCK else "held"].append((g * (width + 2) + column, row, str(block)))
    for what, fill, symbol in (("held", HELD, "square"), ("let go", NULLED, "square-x")):
        found = cells[what]
        figure.add_scatter(
            x=[x for x, _, _ in found],
            y=[y for _, y, _ in found],
            text=["" if what == "let go" else text for _, _, text in found],
            mode="markers+text",
            name="held (number: block)" if what == "held" else "let go: the null block 0",
            marker={"symbol": symbol, "size": 24, "color": fill, "line": {"color": "#555555", "width": 1}},
            textfont={"size": 11, "color": "black"},
            hoverinfo="skip",
        )
    for g, name in enumerate(names):
        figure.add_annotation(
            x=g * (width + 2) - 0.5, y=-0.8, text=f"<b>{name}</b>", showarrow=False, xanchor="left", yanchor="bottom"
        )
    figure.update_layout(
        title="One request's block tables as it grows", template="plotly_white", height=170 + 34 * len(moments),
        font={"color": "black"}, margin={"l": 10, "r": 10, "t": 50, "b": 10},
        legend={"orientation": "h", "y": -0.1},
    )  # fmt: skip
    figure.update_xaxes(visible=False, range=[-0.8, len(names) * (width + 2) - 1.5])
    return figure.update_yaxes(
        tickvals=list(range(len(moments))), ticktext=[f"{one.tokens} tokens" for one in moments],
        range=[len(moments) - 0.3, -1.4], showgrid=False, zeroline=False,
    )  # fmt: skip
