"""Pictures of the barrier's lesson: the host beside the streams, and where each policy's host stands still.

Colours are Okabe and Ito's; hatching is the second cue.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mrv2lab.teach.stream_times import COPIES, FORWARD, OUTPUT

STATIC: dict[str, Any] = {"staticPlot": True}
"""``figure.show(config=STATIC)``: a picture, no controls."""
LOOKS: dict[str, tuple[str, str]] = {
    "wait at the barrier": ("#D55E00", "x"),
    "prepare": ("#56B4E9", "/"),
    "launch": ("#0072B2", ""),
    "wait for the output": ("#E69F00", "\\"),
    "schedule": ("#BBBBBB", "."),
    COPIES: ("#CC79A7", "|"),
    FORWARD: ("#009E73", ""),
    OUTPUT: ("#F0E442", "-"),
    "everything else on the host": ("#BBBBBB", "."),
}
"""Colour and hatching."""


def stream_picture(frame: pd.DataFrame, steps: range, title: str) -> go.Figure:
    """Host, main stream and copy stream of a :meth:`StreamTimes.frame`, from the first step's E to the last one's C.

    Numbers in bars are steps. Solid lines are E (recorded behind a step's copies), dotted ones C (behind its output).

    Raises ``ValueError`` where a step of the picture has no such event.
    """
    is_event = frame["lane"] == "event"
    at = frame[is_event].set_index(["work", "step"])["start_us"]
    try:
        begin, end = at["E", steps[0]], at["C", steps[-1]]
    except (KeyError, IndexError):
        raise ValueError(
            f"no events E and C of steps {steps}; the frame has steps {sorted(set(frame['step']))}"
        ) from None
    shown = frame[(frame["end_us"] > begin - 0.1 * (end - begin)) & (frame["start_us"] < end + 0.02 * (end - begin))]
    begin = begin - 0.1 * (end - begin)
    shown = shown.assign(start_us=(shown["start_us"] - begin).clip(lower=0), end_us=(shown["end_us"] - begin))
    shown["end_us"] = shown["end_us"].clip(upper=1.02 * (end - begin))
    figure = go.Figure()
    bars, events = shown[shown["lane"] != "event"], shown[shown["lane"] == "event"]
    for work in (work for work in LOOKS if work in set(bars["work"])):
        rows = bars[bars["work"] == work]
        length = rows["end_us"] - rows["start_us"]
        # A number that does not fit would be written across its neighbours.
        numbers = rows["step"].astype(str).where(length > 0.025 * (end - begin), "")
        figure.add_bar(
            y=rows["lane"],
            x=length,
            base=rows["start_us"],
            orientation="h",
            name=work,
            marker=_marker(work),
            text=numbers,
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            insidetextfont={"color": "white" if work in (FORWARD, "launch") else "black"},
        )
    for event in events.itertuples():
        is_copies = event.work == "E"
        line = {"color": "black", "width": 1.5, "dash": "solid" if is_copies else "dot"}
        figure.add_vline(x=event.start_us, line=line)
        label = f"{event.work}<sub>{event.step}</sub>"
        # E above, C below: they may lie close together.
        where = {"y": 1.08, "xanchor": "left"} if is_copies else {"y": 0.06, "xanchor": "right"}
        figure.add_annotation(x=event.start_us, yref="paper", text=label, showarrow=False, **where)
    figure.update_layout(
        _layout(title, 430),
        barmode="overlay",
        yaxis={"categoryorder": "array", "categoryarray": ["copy stream", "main stream", "host"]},
    )
    return figure.update_xaxes(title="time (us; the device's is modelled)")


def wait_picture(costs: pd.DataFrame, title: str) -> go.Figure:
    """Where a step's time goes on the host, from :func:`mrv2lab.bench.frames.policy_frame`: a bar a case and policy.

    The whisker is the range of the whole step over the repetitions.
    """
    labels = [costs["case"], costs["runner"] + " " + costs["policy"]]
    waits = costs["barrier_wait_us"] + costs["wait_output_us"]
    parts = {
        "wait at the barrier": costs["barrier_wait_us"],
        "wait for the output": costs["wait_output_us"],
        "everything else on the host": (costs["step_us"] - waits).clip(lower=0),
    }
    figure = go.Figure()
    for name, values in parts.items():
        figure.add_bar(y=labels, x=values / 1000, orientation="h", name=name, marker=_marker(name))
    figure.data[-1].error_x = {
        "array": (costs["step_max_us"] - costs["step_us"]) / 1000,
        "arrayminus": (costs["step_us"] - costs["step_min_us"]) / 1000,
        "color": "black",
    }
    figure.update_layout(_layout(title, 150 + 24 * len(costs)), barmode="stack", yaxis={"autorange": "reversed"})
    return figure.update_xaxes(title="host time of a step (ms)")


def _marker(name: str) -> dict[str, Any]:
    colour, hatch = LOOKS[name]
    pattern = {"shape": hatch, "fgcolor": "black", "fgopacity": 0.35, "size": 6}
    return {"color": colour, "line": {"color": "black", "width": 0.5}, "pattern": pattern}


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 15}, "yref": "container", "yanchor": "top", "y": 1 - 8 / height},
        "height": height,
        "template": "plotly_white",
        "font": {"color": "black"},
        # Between the title and the bars: below them it would lie over the axis' title.
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "top",
            "y": 1 - 38 / height,
            "title": {"text": ""},
        },
        "margin": {"l": 10, "r": 10, "t": 118, "b": 10},
    }
