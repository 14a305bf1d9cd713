"""The race as a picture, from its result alone. Colours are Okabe and Ito's; hatching is the second cue."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

LOOKS = {
    "mrv2lab mrv2": ("#0072B2", ""),
    "mrv2lab v1": ("#56B4E9", "/"),
    "vllm mrv2": ("#E69F00", "x"),
    "vllm v1": ("#F0E442", "."),
    "transformers": ("#999999", "-"),
}


def race_picture(figures: dict[str, Any]) -> go.Figure:
    """Output tokens per second of every engine, a panel a workload; whiskers are the slowest and the fastest round."""
    rows = figures["rows"]
    cases = list(dict.fromkeys((row["workload"], row["sampling"]) for row in rows))
    figure = make_subplots(1, max(len(cases), 1), subplot_titles=[f"{name}, {sampling}" for name, sampling in cases])
    for column, case in enumerate(cases, start=1):
        for row in rows:
            if (row["workload"], row["sampling"]) != case:
                continue
            name = row["impl"] if row["runner"] == "-" else f"{row['impl']} {row['runner']}"
            rate, tokens = row["output_tokens_per_s"], row["output_tokens_per_s"] * row["median_s"]
            colour, shape = LOOKS.get(name, ("#BBBBBB", ""))
            whiskers = {
                "type": "data",
                "symmetric": False,
                "array": [tokens / row["min_s"] - rate],
                "arrayminus": [rate - tokens / row["max_s"]],
            }
            marker = {"color": colour, "pattern": {"shape": shape, "fgcolor": "black"}, "line": {"width": 1}}
            figure.add_bar(
                x=[name], y=[rate], error_y=whiskers, marker=marker, name=name, showlegend=False, row=1, col=column
            )
    figure.update_layout(title="The race: medians, slowest and fastest round", template="plotly_white", height=420)
    return figure.update_yaxes(title="output tokens / s", rangemode="tozero", col=1)


def over_v1_picture(figures: dict[str, Any]) -> go.Figure:
    """MRV2's throughput over V1's by number of requests; whiskers are the least and the greatest ratio of a round."""
    looks = {
        ("steady", "greedy"): ("#0072B2", "solid", "circle"),
        ("steady", "seeded"): ("#E69F00", "dash", "square"),
        ("churn", "greedy"): ("#009E73", "dot", "diamond"),
        ("churn", "seeded"): ("#D55E00", "dashdot", "x"),
    }
    figure = go.Figure()
    for (kind, sampling), (colour, dash, symbol) in looks.items():
        rows = [row for row in figures.get("mrv2_over_v1", []) if (row["kind"], row["sampling"]) == (kind, sampling)]
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": [row["ratio_range"][1] - row["ratio"] for row in rows],
            "arrayminus": [row["ratio"] - row["ratio_range"][0] for row in rows],
        }
        figure.add_scatter(
            x=[row["requests"] for row in rows], y=[row["ratio"] for row in rows], error_y=whiskers,
            mode="lines+markers", name=f"{kind}, {sampling}", line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 9},
        )  # fmt: skip
    figure.add_hline(y=1, line={"color": "#666666", "width": 1})
    figure.update_layout(title="MRV2 over V1: output tokens per second", template="plotly_white", height=380)
    figure.update_xaxes(title="requests", type="log", tickvals=[1, 4, 16, 64, 256])
    return figure.update_yaxes(title="ratio (whiskers: single rounds)")
