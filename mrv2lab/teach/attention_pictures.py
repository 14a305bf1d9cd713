"""Pictures of attention metadata: the block table that our kernels read, over the page list that flashinfer reads.

Colours are Okabe and Ito's; each cell says its block id, and what is not read is crossed out.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mrv2lab.teach.attention_lesson import StepMetadata

_ROW, _LIST, _BETWEEN = 38, 64, 90
"""Pixels: a request's row, the list, and what lies between the two."""
STATIC: dict[str, Any] = {"staticPlot": True}
"""``figure.show(config=STATIC)``: a picture, no controls."""
READ, BEHIND, STALE = "read by this step", "behind the window", "stale or never filled"
LOOKS: dict[str, tuple[str, str, str]] = {
    READ: ("#56B4E9", "square", "#000000"),
    BEHIND: ("#E69F00", "square-x", "#000000"),
    STALE: ("#BBBBBB", "square-x-open", "#555555"),
}
"""Fill, marker of the legend, colour of the number."""


def pages_picture(step: StepMetadata, most_columns: int = 24) -> go.Figure:
    """Above, the padded block table [r, B] that ``torch`` and ``triton`` read, a row a request; below, flashinfer's
    pages, one request behind another. Numbers are block ids. Columns past ``most_columns`` are cut off, and said so."""
    first, used = step.first_visible_page(), step.pages_in_use()
    width = min(step.block_table.shape[1], most_columns)
    window = "all tokens" if step.group.window is None else f"a window of {step.group.window} tokens"
    cut = f", the first {width} of {step.block_table.shape[1]}" if width < step.block_table.shape[1] else ""
    inner = _ROW * len(used) + _BETWEEN + _LIST
    figure = make_subplots(
        2,
        1,
        row_heights=[_ROW * len(used), _LIST],
        vertical_spacing=_BETWEEN / inner,
        subplot_titles=[f"torch, triton: block table{cut}", f"flashinfer: {len(step.page_indices)} pages in a list"],
    )
    cells: dict[str, list[tuple[float, float, int]]] = {what: [] for what in LOOKS}
    for j, (begin, end) in enumerate(zip(first, used, strict=True)):
        for column in range(width):
            what = BEHIND if column < min(begin, end) else READ if column < end else STALE
            cells[what].append((column, j, int(step.block_table[j, column])))
    for what, found in cells.items():
        _squares(figure, 1, found, what)
    pages = [(float(i), 0.0, int(block)) for i, block in enumerate(step.page_indices[: most_columns * 2])]
    _squares(figure, 2, pages, READ, legend=False)
    for j, start in enumerate(step.page_starts[:-1]):
        if start < most_columns * 2:
            figure.add_vline(x=float(start) - 0.5, line={"color": "#000000", "width": 2}, row=2, col=1)
            figure.add_annotation(
                x=float(start) - 0.4, y=1, text=f"request {j}", showarrow=False, xanchor="left", row=2, col=1
            )
    labels = [
        f"{j}: {query} of {length} tokens"
        for j, (query, length) in enumerate(zip(step.query_lens, step.seq_lens, strict=True))
    ]
    figure.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=labels, autorange="reversed", title="request", row=1, col=1
    )
    figure.update_yaxes(visible=False, range=[-0.7, 1.4], row=2, col=1)
    figure.update_xaxes(range=[-0.7, max(width, len(pages)) - 0.3], dtick=1, zeroline=False, showgrid=False)
    figure.update_xaxes(title=f"entry (blocks of {step.block_size} tokens)", row=1, col=1)
    figure.update_xaxes(title="place in the list (pages)", row=2, col=1)
    figure.update_layout(
        title=f"One step's attention metadata; layers see {window}",
        template="plotly_white",
        height=inner + 200,
        margin={"t": 90, "b": 110},
        legend={"orientation": "h", "yref": "container", "y": 0.02},
    )
    return figure


def _squares(
    figure: go.Figure, row: int, cells: list[tuple[float, float, int]], what: str, *, legend: bool = True
) -> None:
    fill, symbol, ink = LOOKS[what]
    if not cells:
        return
    x, y, text = zip(*cells, strict=True)
    figure.add_scatter(
        x=x,
        y=y,
        text=[str(block) for block in text],
        mode="markers+text",
        marker={
            "symbol": symbol,
            "size": 26,
            "color": fill,
            "line": {"color": "#BBBBBB" if what == STALE else "#777777", "width": 1},
        },
        textfont={"size": 11, "color": ink},
        name=what,
        showlegend=legend,
        hoverinfo="skip",
        row=row,
        col=1,
    )
