"""The race's result as tables to read: who ran, how fast, with which spread, and ours over each other engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pandas as pd


def runs(figures: Mapping[str, Any]) -> pd.DataFrame:
    """A row an engine and workload: output tokens a second, ms a token, ``spread %`` (greatest less least wall, of the
    median) and repetitions. ``figures`` is ``bench.engine_bench``'s."""
    rows = {
        (row["workload"], row["sampling"], _engine(row)): {
            "tokens/s": round(row["output_tokens_per_s"]),
            "ms/token": round(row["ms_per_token"], 2),
            "spread %": round(100 * row["spread"], 1),
            "repetitions": row["repetitions"],
        }
        for row in figures["rows"]
    }
    index = pd.MultiIndex.from_tuples(list(rows), names=["workload", "sampling", "engine"])
    return pd.DataFrame(list(rows.values()), index, ["tokens/s", "ms/token", "spread %", "repetitions"]).sort_index()


def ratios(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Ours over another engine, a row a pair and workload: ``throughput`` of the medians, the least and the greatest of
    single rounds, and whether these leave a difference: ``resolved`` is False where 1 lies between them. Empty where
    one engine ran alone."""
    rows = [
        {
            "workload": one["workload"],
            "sampling": one["sampling"],
            "ours": one["of"],
            "over": one["over"],
            "throughput": round(one["throughput"], 2),
            "least": round(one["throughput_range"][0], 2),
            "greatest": round(one["throughput_range"][1], 2),
            "resolved": not one["throughput_range"][0] <= 1 <= one["throughput_range"][1],
        }
        for one in figures["ratios"]
    ]
    names = ["workload", "sampling", "ours", "over", "throughput", "least", "greatest", "resolved"]
    return pd.DataFrame(rows, columns=names).set_index(names[:4])


def losses(figures: Mapping[str, Any]) -> str:
    """Where MRV2 is slower than V1 beyond the spread, and what was not settled or not measured, in a sentence each."""
    rows = figures.get("mrv2_over_v1", [])
    slower = [_load(row) for row in rows if row["resolved"] and row["ratio"] < 1]
    open_ = [_load(row) for row in rows if not row["resolved"]]
    faster = len(rows) - len(slower) - len(open_)
    said = [f"MRV2 is faster at {faster} of {len(rows)} loads, slower at {'; '.join(slower) or 'none'}."]
    if open_:
        said.append(f"Inside the noise: {'; '.join(open_)}.")
    measured = {tuple(row[key] for key in ("kind", "sampling", "requests")) for row in rows}
    loads = itertools.product(*(dict.fromkeys(one[place] for one in measured) for place in range(3)))
    if gone := [
        f"{kind} {sampling} at {count}" for kind, sampling, count in loads if (kind, sampling, count) not in measured
    ]:
        said.append(f"Not measured: {'; '.join(sorted(gone))}.")
    return "\n".join(said)


def _load(row: Mapping[str, Any]) -> str:
    return f"{row['kind']} {row['sampling']} at {row['requests']} ({row['ratio']:.2f})"


def missing(figures: Mapping[str, Any]) -> list[str]:
    """Who did not run, or not to the end, and why; and that it was no race, where nobody else was there."""
    said = [f"{name} is absent: {why}" for name, why in figures["absent"].items()]
    said += [f"{name} failed: {why}" for name, why in figures["failed"].items()]
    engines = sorted({_engine(row) for row in figures["rows"]})
    if len(engines) == 1:
        said.append(f"only {engines[0]} is in this file, so there is nothing to compare it with")
    return said


def _engine(row: Mapping[str, Any]) -> str:
    return str(row["impl"]) if row["runner"] == "-" else f"{row['impl']} {row['runner']}"
