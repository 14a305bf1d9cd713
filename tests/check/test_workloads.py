"""V1 and MRV2 on random workloads: every bit where V1 sorts its batch as MRV2 does, near where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from mrv2lab.check.compare import NearReport
from mrv2lab.check.side import Weights, weights_of
from mrv2lab.check.twin import TwinReport
from mrv2lab.check.workloads import FACTORS, MODEL, all_pairs, configs, draw, pairs, run_twin, twin_cases
from mrv2lab.config import RunnerConfig
from tests.check.plain_arithmetic import plain_arithmetic  # noqa: F401

COUNT = 200
QUICK = 12
"""In `make test`: the first, which cover the most pairs."""
ON_GPU = 50

CASES = twin_cases(COUNT)


def label(index: int) -> str:
    return f"{index:03}-" + "-".join(CASES[index].setting.values())


def params(count: int, quick: int = QUICK) -> list[object]:
    return [pytest.param(i, id=label(i), marks=[] if i < quick else [pytest.mark.slow]) for i in range(count)]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return weights_of(MODEL)


class Totals:
    """What the file saw."""

    def __init__(self) -> None:
        self.near = NearReport()
        self.counts: Counter[str] = Counter()

    def add(self, report: TwinReport) -> None:
        self.near += report.near
        self.counts += Counter(
            steps=report.steps,
            preemptions=report.stats.num_preemptions,
            hits=report.stats.prefix_hit_tokens,
            wasted=report.stats.wasted_rows,
        )


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    made = Totals()
    yield made
    print(f"\n{made.near.rows} rows, {made.near.excused} excused, worst {made.near.worst:.2g}; {dict(made.counts)}")


def run(index: int, weights: Weights, reorder: str, device: str = "cpu") -> TwinReport:
    """Even draws are driven by V1, odd ones by MRV2."""
    v1 = RunnerConfig(runner="v1", reorder=reorder, device=device)  # type: ignore[arg-type]
    pair = (v1, RunnerConfig(device=device)) if index % 2 == 0 else (RunnerConfig(device=device), v1)
    return run_twin(CASES[index], *pair, weights=weights)


@pytest.mark.parametrize("index", params(COUNT))
def test_every_bit(index: int, weights: Weights, totals: Totals) -> None:
    report = run(index, weights, "mrv2")
    assert report.equality == "exact"
    assert report.equal, str(report)
    assert report.excused == 0 and report.rows > report.steps > 12
    setting = CASES[index].setting
    # Requests that end early may spare each other.
    if (setting["pool"], setting["stop"], setting["aborts"]) == ("storm", "length", "no"):
        assert report.stats.num_preemptions
    totals.add(report)


@pytest.mark.parametrize("index", params(COUNT // 4, quick=1))
def test_near_without_the_demand(index: int, weights: Weights, totals: Totals) -> None:
    report = run(index, weights, "none")
    assert report.equality == "near"
    assert report.equal, str(report)
    totals.add(report)


@pytest.mark.gpu
@pytest.mark.parametrize("index", params(ON_GPU, quick=ON_GPU))
def test_every_bit_on_a_gpu(index: int, weights: Weights, totals: Totals) -> None:
    report = run(index, weights, "mrv2", "cuda")
    assert report.equality == "exact"
    assert report.equal, str(report)
    totals.add(report)


@pytest.mark.gpu
@pytest.mark.parametrize("index", params(8, quick=8))
def test_cpu_and_gpu_are_near(index: int, weights: Weights, totals: Totals) -> None:
    sides = RunnerConfig(device="cpu"), RunnerConfig(device="cuda")
    report = run_twin(CASES[index], *sides, weights=weights)
    assert report.equality == "near"
    assert report.equal, str(report)
    totals.add(report)


def test_excused(totals: Totals) -> None:
    """At most 0.5 % over all that ran, and everything that a schedule can do did happen."""
    if not totals.near.rows:
        pytest.skip("no workload ran before")
    totals.near.check()
    assert min(totals.counts[name] for name in ("preemptions", "hits", "wasted")) > 0


def test_every_pair_of_settings_occurs() -> None:
    covered = set().union(*(pairs(case.setting) for case in CASES))
    assert covered == all_pairs()


def test_the_quick_ones_hold_every_value() -> None:
    for name, values in FACTORS.items():
        assert {case.setting[name] for case in CASES[:QUICK]} == set(values)


def test_a_draw_is_a_value() -> None:
    """The same seed, the same cases; another seed, others."""
    assert draw(5, 0) == draw(5, 0) != draw(5, 1)
    assert twin_cases(3, 4)[2].workload == twin_cases(3, 4)[2].workload != twin_cases(3, 5)[2].workload


def test_the_sides_have_other_streams_and_policies() -> None:
    for case in CASES[:QUICK]:
        a, b = configs(case, RunnerConfig(runner="v1"), RunnerConfig())
        assert a.scheduler == b.scheduler and a.cache == b.cache and a.model == b.model
        assert a.runner.transfer != b.runner.transfer
        assert (a.runner.stream, a.runner.lag) != (b.runner.stream, b.runner.lag)
        assert "unsafe" not in (a.runner.transfer, b.runner.transfer)
