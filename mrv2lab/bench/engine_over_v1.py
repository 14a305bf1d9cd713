"""MRV2 over V1 inside the lab: throughput by number of requests, and where a step's host time goes in either.

Both engines of the race decode the same load and are stepped in turn, a window each. The ratio's spread is that of the
single rounds; where it straddles 1 the difference is not resolved, and the row says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mrv2lab.bench.engine_workloads import SAMPLINGS

RUNNERS = ("v1", "mrv2")
KINDS = ("steady", "churn")
"""Requests that outlive the measurement; or one ends and another comes nearly every step (``runner_bench.Load``)."""

MOST_ROUNDS = 12
"""Requests grow by 40 tokens a round on a GPU, and behind 14 rounds the KV cache of the race is too small for 256 of
them: some would be preempted, and what is compared would be no steady load."""

Call = Callable[[str, dict[str, Any]], Any]
"""An engine's name and a message -> its answer, None if it failed."""


def over_v1(
    call: Call, rounds: int, on_gpu: bool, bar: Any, in_time: Callable[[], bool] = lambda: True
) -> list[dict[str, Any]]:
    """One row for each number of requests, way of choosing tokens and kind of load, while ``in_time()``."""
    sizes: Sequence[int] = (1, 4, 16, 64, 256) if on_gpu else (1, 4)
    steps, prompt_len = (32, 128) if on_gpu else (4, 24)
    cases = [(kind, sampling, count) for kind in KINDS for sampling in SAMPLINGS for count in sizes]
    bar.reset(total=len(cases))
    bar.set_description("mrv2 over v1")
    rows = []
    for kind, sampling, count in cases:
        if not in_time():
            break
        row = one_load(call, count, kind, sampling, rounds, steps, prompt_len)
        bar.update()
        if row is not None:
            rows.append(row)
    return rows


def one_load(
    call: Call, count: int, kind: str, sampling: str, rounds: int, steps: int, prompt_len: int
) -> dict[str, Any] | None:
    """A row of at most :data:`MOST_ROUNDS`; None if an engine failed. A quarter of a window's steps are then timed by
    phase."""
    rounds = min(rounds, MOST_ROUNDS)
    by_phase = max(steps // 4, 2)
    load = {"count": count, "kind": kind, "sampling": sampling, "prompt_len": prompt_len}
    load["longest"] = (rounds + 1) * (steps + by_phase) + 64
    rates: dict[str, list[float]] = {runner: [] for runner in RUNNERS}
    phases: dict[str, list[dict[str, float]]] = {runner: [] for runner in RUNNERS}
    for runner in RUNNERS:
        if call(f"mrv2lab {runner}", {"do": "load", **load}) is None:
            return None
    for number in range(rounds + 1):
        for runner in RUNNERS if number % 2 else RUNNERS[::-1]:
            window = call(f"mrv2lab {runner}", {"do": "window", "steps": steps})
            watched = call(f"mrv2lab {runner}", {"do": "phases", "steps": by_phase})
            if window is None or watched is None:
                return None
            if number:  # the first round warms up
                rates[runner].append(window["tokens"] / window["seconds"])
                phases[runner].append(watched)
    for runner in RUNNERS:
        if call(f"mrv2lab {runner}", {"do": "unload"}) is None:
            return None
    single = [mrv2 / v1 for mrv2, v1 in zip(rates["mrv2"], rates["v1"], strict=True)]
    medians = {runner: statistics.median(rates[runner]) for runner in RUNNERS}
    return {
        "requests": count,
        "kind": kind,
        "sampling": sampling,
        "ratio": medians["mrv2"] / medians["v1"],
        "ratio_range": [min(single), max(single)],
        "resolved": min(single) > 1 or max(single) < 1,
        "output_tokens_per_s": medians,
        "spread": {runner: (max(rates[runner]) - min(rates[runner])) / medians[runner] for runner in RUNNERS},
        "host_us": {runner: median_by_phase(phases[runner]) for runner in RUNNERS},
    }


def median_by_phase(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median over rounds of every phase's microseconds a step."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in names}
