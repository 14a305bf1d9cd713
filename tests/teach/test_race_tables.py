"""The race's tables: names, spreads, and what is not resolved."""

from __future__ import annotations

from typing import Any

from mrv2lab.bench.engine_bench import ratios as ratios_of
from mrv2lab.teach.race_tables import losses, missing, ratios, runs


def row(impl: str, runner: str, walls: list[float]) -> dict[str, Any]:
    median = sorted(walls)[len(walls) // 2]
    return {
        "workload": "A", "sampling": "greedy", "impl": impl, "runner": runner, "output_tokens_per_s": 1000 / median,
        "ms_per_token": median, "spread": (max(walls) - min(walls)) / median, "median_s": median,
        "repetitions": len(walls), "walls_s": walls,
    }  # fmt: skip


OURS = row("mrv2lab", "mrv2", [1.0, 1.1, 1.2])


def figures(*rows: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"rows": list(rows), "ratios": ratios_of(rows), "absent": {}, "failed": {}} | others


def test_a_race() -> None:
    made = figures(OURS, row("vllm", "mrv2", [2.0, 2.2, 2.1]), row("transformers", "-", [1.2, 1.0, 1.15]))
    table = ratios(made)
    assert table.loc[("A", "greedy", "mrv2lab mrv2", "vllm mrv2")].tolist() == [1.91, 1.75, 2.0, True]
    assert not table.loc[("A", "greedy", "mrv2lab mrv2", "transformers"), "resolved"], "1 lies between the rounds"
    shown = runs(made)
    assert shown.index.get_level_values("engine").tolist() == ["mrv2lab mrv2", "transformers", "vllm mrv2"]
    assert shown.loc[("A", "greedy", "mrv2lab mrv2")].tolist() == [909, 1.1, 18.2, 3]
    assert missing(made) == []


def test_one_engine_alone_is_no_race() -> None:
    made = figures(OURS, absent={"vllm mrv2": "not installed"}, failed={"vllm v1": "ended with 1"})
    assert len(ratios(made)) == 0 and len(runs(made)) == 1
    assert missing(made) == [
        "vllm mrv2 is absent: not installed",
        "vllm v1 failed: ended with 1",
        "only mrv2lab mrv2 is in this file, so there is nothing to compare it with",
    ]


def test_nobody_ran() -> None:
    made = figures()
    assert len(runs(made)) == len(ratios(made)) == 0 and missing(made) == []


def test_losses() -> None:
    def row(kind: str, requests: int, ratio: float, resolved: bool = True) -> dict[str, Any]:
        return {"kind": kind, "sampling": "greedy", "requests": requests, "ratio": ratio, "resolved": resolved}

    figures = {"mrv2_over_v1": [row("steady", 1, 1.5), row("steady", 4, 0.9, False), row("churn", 4, 0.6)]}
    assert losses(figures).splitlines() == [
        "MRV2 is faster at 1 of 3 loads, slower at churn greedy at 4 (0.60).",
        "Inside the noise: steady greedy at 4 (0.90).",
        "Not measured: churn greedy at 1.",
    ]
