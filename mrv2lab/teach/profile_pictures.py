"""Pictures of a memory profile: who has the device's memory, and what is left for the KV cache.

Colours are Okabe and Ito's; hatching is the second cue.
"""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from mrv2lab.engine.kv_cache_config import KVCacheConfig
from mrv2lab.runner.profile_memory import size_words

LOOKS = {
    "weights, tables, buffers": ("#0072B2", ""),
    "context, kernels, others": ("#999999", "."),
    "largest step": ("#D55E00", "x"),
    "graphs (estimate)": ("#F0E442", "-"),
    "KV cache": ("#56B4E9", "/"),
    "left alone": ("#FFFFFF", ""),
}
"""Part of a profile -> colour and hatching."""


def profile_picture(sizes: Mapping[str, KVCacheConfig], title: str = "The device's memory") -> go.Figure:
    """One bar a measured size, from a name to its ``KVCacheConfig``: bytes by part. Raises ``ValueError`` for a size
    that was not measured."""
    unmeasured = [name for name, size in sizes.items() if size.profile is None]
    if unmeasured:
        raise ValueError(f"{unmeasured[0]} was not measured; build the engine with num_blocks=None")
    parts = {name: size.profile.parts() for name, size in sizes.items() if size.profile is not None}
    figure = go.Figure()
    for part, (colour, shape) in LOOKS.items():
        values = [one[part] for one in parts.values()]
        if any(values):
            figure.add_bar(
                y=list(parts),
                x=[value / 2**20 for value in values],
                orientation="h",
                name=part,
                text=[_label(part, value, size) for value, size in zip(values, sizes.values(), strict=True)],
                textposition="inside",
                insidetextanchor="middle",
                marker={
                    "color": colour,
                    "pattern": {"shape": shape, "fgcolor": "black", "size": 6, "fgopacity": 0.2},
                    "line": {"width": 1, "color": "black"},
                },
                textfont={"color": "white" if part == "weights, tables, buffers" else "black"},
                hoverinfo="name+text",
            )
    figure.update_layout(
        title=title, template="plotly_white", barmode="stack", height=180 + 55 * len(parts), font={"color": "black"},
        margin={"l": 10, "r": 10, "t": 60, "b": 10}, legend={"orientation": "h", "y": -0.35, "traceorder": "normal"},
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", title="utilization")
    return figure.update_xaxes(title="MiB")


def _label(part: str, nbytes: int, size: KVCacheConfig) -> str:
    if not nbytes:
        return ""
    return f"{size.num_blocks:,} blocks" if part == "KV cache" else size_words(nbytes)
