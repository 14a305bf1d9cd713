"""Tables from benchmark results: what each transfer policy costs, and V1 beside MRV2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

COUNTS: dict[str, str] = {
    "h2d copies": "h2d copies",
    "h2d bytes": "h2d bytes",
    "uva publishes": "uva publishes",
    "waits: synchronize": "waits",
    "row_moves": "row moves",
}
"""A step's counts in a result -> the column's name."""
OWN = "runner's own phases"


def policy_frame(figures: Mapping[str, Any]) -> pd.DataFrame:
    """The figures of ``policy_bench`` as one row a (case, runner, policy).

    Microseconds a step, medians over the repetitions: ``step_us`` with ``step_min_us`` and ``step_max_us``,
    ``barrier_wait_us``, ``wait_output_us``, ``preparation_us`` (apply_writes and prepare_inputs). Counts a step:
    ``h2d_copies``, ``h2d_bytes``, ``uva_publishes``.
    """
    rows = []
    for case, engines in figures["cases"].items():
        for name, parts in engines.items():
            runner, policy = name.split(" ")
            counted = figures["a_step"][name]
            row: dict[str, Any] = {"case": case, "runner": runner, "policy": policy}
            row |= {f"{part}_us": parts[part]["median"] for part in ("step", "barrier_wait", "wait_output")}
            row |= {f"step_{end}_us": parts["step"][end] for end in ("min", "max")}
            row["preparation_us"] = parts["preparation"]["median"]
            row |= {name.replace(" ", "_"): counted.get(name, 0.0) for name in list(COUNTS)[:3]}
            rows.append(row)
    return pd.DataFrame(rows)


def _loads(figures: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The loads of ``runner_bench``'s figures: (kind, requests)."""
    names = [key.split(" ") for key, value in figures.items() if isinstance(value, dict) and "host_us" in value]
    return list(dict.fromkeys((kind, int(count)) for kind, count, _ in names))


def runner_frame(figures: Mapping[str, Any]) -> pd.DataFrame:
    """The figures of ``runner_bench`` as one row a (load, requests), V1's and MRV2's columns side by side.

    ``own us``: host microseconds of a step in the runner's own phases, median over the repetitions (shared ones and
    waits left out); ``spread us``: their range; then counts a step.
    """
    rows = []
    for kind, count in _loads(figures):
        row: dict[tuple[str, str], Any] = {}
        for runner in ("v1", "mrv2"):
            part = figures[f"{kind} {count} {runner}"]
            own = part["host_us"][OWN]
            row["own us", runner] = own["median"]
            row["spread us", runner] = own["max"] - own["min"]
            row |= {(column, runner): part["a_step"].get(name, 0.0) for name, column in COUNTS.items()}
        rows.append(row)
    index = pd.MultiIndex.from_tuples(_loads(figures), names=["load", "requests"])
    made = pd.DataFrame(rows, index=index)
    made.columns = pd.MultiIndex.from_tuples(made.columns)
    return made


def phase_frame(figures: Mapping[str, Any], kind: str) -> pd.DataFrame:
    """Median host microseconds by phase (rows; no sub-spans) at each number of requests and runner (columns)."""
    columns = {
        (count, runner): {
            phase: part["median"]
            for phase, part in figures[f"{kind} {count} {runner}"]["host_us"].items()
            if "/" not in phase
        }
        for load, count in _loads(figures)
        if load == kind
        for runner in ("v1", "mrv2")
    }
    frame = pd.DataFrame(columns)
    last = [name for name in (OWN, "step") if name in frame.index]
    return frame.loc[[name for name in frame.index if name not in last] + last]


def no_gain(figures: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The loads (kind, requests) at which MRV2's own phases take no less host time than V1's, by their medians."""
    frame = runner_frame(figures)["own us"]
    return [index for index, row in frame.iterrows() if row["mrv2"] >= row["v1"]]
