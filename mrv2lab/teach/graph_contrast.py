"""V1's dispatcher beside MRV2's manager: which graph each gives to which step, and what the same run cost with either.

Both have the same job, the same sizes and the same decoder. V1 makes a key and looks it up, captures inside a forward
that it reaches by dummy runs, and keeps the tails of padded inputs neutral by hand; MRV2 has a table of decisions,
captures on a path of its own, and pads where it prepares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mrv2lab.config import GraphConfig, SchedulerConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.graphs import DispatchTable
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1.graph_dispatcher import GraphDispatcher
from mrv2lab.teach.graph_pictures import BLACK, BLUE, ORANGE

WORDS = {"FULL": "full", "PIECEWISE": "piecewise", "NONE": "eager"}
"""V1's modes in MRV2's words."""
BATCHES = ("decodes", "mixed")
STRUCTURE: tuple[tuple[str, str, str], ...] = (
    (
        "Which graph?",
        "a key, padded, looked up in one set, relaxed, looked up in another",
        "a table, one entry a shape",
    ),
    ("Who captures?", "the forward, on the first use of a key", "the manager, on a path of its own"),
    ("What does it run meanwhile?", "_dummy_run, a second preparation kept by hand", "the step's own preparation"),
    ("Who pads the tails?", "five fills, one a duty, some on the host and some launched", "the kernels that prepare"),
    ("What does attention get?", "metadata made in every step, though a full graph ignores it", "made once a graph"),
    ("Decodes beyond the last size below R?", "piecewise: R itself has no key", "full: R always has one"),
)
"""(question, V1, MRV2)."""


def structure() -> pd.DataFrame:
    """The contrast in words: a row a question, columns V1 and MRV2."""
    return pd.DataFrame(STRUCTURE, columns=["", "V1", "MRV2"]).set_index("")


def dispatch_contrast(
    graphs: GraphConfig, scheduler: SchedulerConfig, *, full_graphs: bool = True, backend: str = "attention"
) -> pd.DataFrame:
    """A row a batch (decodes, or mixed: one chunk and decodes) and token count, up to one beyond the largest size:
    what each runner does (``v1``, ``mrv2``: full, piecewise, eager), to how many tokens it pads (``v1_padded``,
    ``mrv2_padded``) and why (``v1_why``, ``mrv2_why``). Every graph is taken to be captured."""
    backs: dict[str, Any] = {"full_graphs": full_graphs, "backend": backend}
    theirs, ours = GraphDispatcher(graphs, scheduler, **backs), DispatchTable(graphs, scheduler, **backs)
    theirs.enable()
    most = min((theirs.sizes or (0,))[-1] + 1, scheduler.max_num_batched_tokens)
    rows = []
    for batch in BATCHES:
        for tokens in range(1, most + 1):
            # A chunk of two tokens or more, and as many decodes as there are rows.
            reqs = tokens if batch == "decodes" else min(max(tokens - 1, 1), scheduler.max_num_reqs)
            if (tokens < 2 and batch == "mixed") or reqs > scheduler.max_num_reqs:
                continue
            longest = 1 if batch == "decodes" else tokens - reqs + 1
            one, other = theirs.dispatch(reqs, tokens, longest), ours.dispatch(reqs, tokens, longest)
            rows.append(
                {
                    "batch": batch,
                    "tokens": tokens,
                    "v1": WORDS[one.mode],
                    "v1_padded": one.padded_tokens or tokens,
                    "v1_why": one.reason,
                    "mrv2": other.mode,
                    "mrv2_padded": other.padded_tokens or tokens,
                    "mrv2_why": other.reason,
                }
            )
    return pd.DataFrame(rows)


def differing(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`dispatch_contrast` in which the two do not do the same."""
    return frame[(frame["v1"] != frame["mrv2"]) | (frame["v1_padded"] != frame["mrv2_padded"])]


def run_both(
    lengths: Sequence[int] = (3, 9, 2, 14, 5), *, model: Any = "tiny", max_tokens: int = 12, **options: Any
) -> pd.DataFrame:
    """The same requests, prompts of ``lengths`` tokens, one more a step, under V1 (in MRV2's batch order) and MRV2.

    A row a runner: steps by mode (``full``, ``piecewise``, ``eager``), ``tokens``, ``padding`` (computed for nothing),
    ``launches`` (kernels, segments, copies and replays in all), ``tail_launches`` (what V1 launches for padding alone),
    and of the captures ``graphs``, ``nbytes`` and ``seconds``. ``text`` is equal for both: the greedy tokens.
    """
    rows = []
    for runner in ({"runner": "v1", "reorder": "mrv2"}, {"runner": "mrv2"}):
        settings: dict[str, Any] = {
            "cudagraph_mode": "full_and_piecewise",
            "progress": False,
            "max_num_reqs": 8,
            "max_model_len": 128,
            "num_blocks": 256,
        }
        log = EventLog()
        with Engine(model, **settings | options | runner, observer=log) as engine:
            capture = engine.worker.capture_report
            log.clear()
            ids = []
            for i, length in enumerate(lengths):
                prompt = [(7 * i + j) % 50 + 1 for j in range(length)]
                ids.append(engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
                engine.step()
            while engine.has_work():
                engine.step()
            tallies = engine.worker.runner.graphs.stats.tallies()
            modes: Counter[str] = Counter()
            for tally in tallies:
                modes[WORDS.get(tally.decision.mode, tally.decision.mode)] += tally.steps
            launched = [mark.name for mark in log.marks if mark.kind in ("kernel", "run", "h2d", "d2h", "replay")]
            rows.append(
                {
                    "runner": runner["runner"],
                    **{mode: modes[mode] for mode in ("full", "piecewise", "eager")},
                    "tokens": sum(tally.tokens for tally in tallies),
                    "padding": sum(tally.padding for tally in tallies),
                    "launches": len(launched),
                    "tail_launches": launched.count("v1.pad_tails"),
                    "graphs": sum(one.graphs for one in capture.captured) if capture else 0,
                    "nbytes": capture.nbytes if capture else 0,
                    "seconds": capture.seconds if capture else 0.0,
                    "text": [engine.output(req_id).token_ids for req_id in ids],
                }
            )
    return pd.DataFrame(rows).set_index("runner")


LINES = {"v1": (ORANGE, "dash", "V1"), "mrv2": (BLUE, "solid", "MRV2")}
SYMBOLS = {"full": "circle", "piecewise": "diamond-open", "eager": "x"}


def contrast_picture(frame: pd.DataFrame, batch: str = "decodes") -> go.Figure:
    """Tokens that a step of ``batch`` is padded to, against the tokens it has, for both runners; the marker is what is
    done. ``frame`` is :func:`dispatch_contrast`'s."""
    if batch not in BATCHES:
        raise ValueError(f"batch must be one of {BATCHES}, got {batch!r}")
    mine = frame[frame["batch"] == batch]
    figure = go.Figure()
    figure.add_scatter(
        x=mine["tokens"], y=mine["tokens"], mode="lines", name="no padding", line={"color": BLACK, "width": 1}
    )
    for runner, (color, dash, name) in LINES.items():
        figure.add_scatter(
            x=mine["tokens"],
            y=mine[f"{runner}_padded"],
            mode="lines+markers",
            name=name,
            line={"color": color, "dash": dash, "width": 2, "shape": "vh"},
            marker={"symbol": [SYMBOLS[mode] for mode in mine[runner]], "size": 13 if runner == "v1" else 7},
            hovertext=[f"{name}: {mode}; {why}" for mode, why in zip(mine[runner], mine[f"{runner}_why"], strict=True)],
            hoverinfo="text",
        )
    what = "plain decodes" if batch == "decodes" else "a chunk and decodes"
    count = len(differing(mine))
    figure.update_layout(
        title=f"Steps of {what}: V1 and MRV2 differ at {count} of {len(mine)} token counts"
        "<br><sup>circle: full graph, open diamond: pieces, x: eager</sup>",
        height=380,
        template="plotly_white",
        font={"color": "black"},
        margin={"l": 10, "r": 10, "t": 80, "b": 10},
    )
    figure.update_xaxes(title="tokens of the step")
    return figure.update_yaxes(title="tokens after padding")
