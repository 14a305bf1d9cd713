"""The policies' benchmark in a tiny form on a CPU, where times are modelled, so that it is certain where each waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrv2lab.bench import policy_bench
from mrv2lab.bench.frames import policy_frame
from mrv2lab.engine.engine import Engine
from tests.steady_clock import steady_clock

ENGINES = [f"{runner} {policy}" for runner in ("v1", "mrv2") for policy in ("barrier", "pinned_copy", "uva_pool")]


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    with steady_clock():
        return policy_bench.bench("cpu", 1, 3, requests=2, progress=False)


def test_every_policy_in_every_case(figures: dict[str, Any]) -> None:
    assert list(figures["cases"]) == ["host-bound", "device-bound", "late copies"]
    assert all(list(engines) == ENGINES for engines in figures["cases"].values())
    assert figures["modelled"]
    frame = policy_frame(figures)
    assert len(frame) == 18
    assert list(frame.columns) == (
        "case runner policy step_us barrier_wait_us wait_output_us step_min_us step_max_us preparation_us "
        "h2d_copies h2d_bytes uva_publishes"
    ).split(" ")
    assert (frame["preparation_us"] > 0).all()


def test_where_the_host_waits(figures: dict[str, Any]) -> None:
    frame = policy_frame(figures).set_index(["case", "policy"])
    stand_in_us = figures["stand_in_ms"] * 1000
    for policy in policy_bench.POLICIES:
        waits = {case: frame.loc[(case, policy)] for case in policy_bench.CASES}
        assert (waits["host-bound"][["barrier_wait_us", "wait_output_us"]].sum(axis=1) < 0.5 * stand_in_us).all()
        assert (waits["device-bound"]["wait_output_us"] > 0.3 * stand_in_us).all()
        at, elsewhere = ("barrier_wait_us", "wait_output_us")[:: 1 if policy == "barrier" else -1]
        assert (waits["late copies"][at] > 0.3 * stand_in_us).all()
        assert (waits["late copies"][elsewhere] < 0.3 * stand_in_us).all()
        assert policy == "barrier" or (waits["device-bound"]["barrier_wait_us"] == 0).all()


def test_counts_are_the_policies_own(figures: dict[str, Any]) -> None:
    counts = figures["a_step"]
    assert counts["v1 barrier"]["h2d copies"] == counts["v1 pinned_copy"]["h2d copies"] == 7
    assert "uva publishes" not in counts["v1 barrier"]
    assert counts["mrv2 uva_pool"]["h2d copies"] == 2
    assert [counts[name]["waits: synchronize"] for name in ENGINES] == [2, 1, 1, 2, 1, 1]


def test_bad_case() -> None:
    with Engine("tiny", device="cpu", num_blocks=64) as engine:
        bench = policy_bench.Bench(engine, 1, 32, 8, 1.0)
        with pytest.raises(ValueError, match=r"case must be one of .* got 'fast'"):
            bench.times("fast", 1)


def test_it_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy_bench, "bench", lambda device, repeats, steps: {"of": [device, repeats, steps]})
    out = tmp_path / "policies.json"
    policy_bench.main(out, "cpu", 2, 4)
    made = json.loads(out.read_text())
    assert (made["name"], made["figures"]) == ("policies_cpu", {"of": ["cpu", 2, 4]})
    assert capsys.readouterr().out.strip() == out.read_text().strip()
