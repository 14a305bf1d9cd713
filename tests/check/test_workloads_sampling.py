"""V1 and MRV2 on random workloads whose requests use every sampling parameter: tokens of greedy requests, logprobs,
prompt logprobs and what was chosen from. Sampled requests go along a's tokens, since the two draw by the same law
alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from mrv2lab.check import sampling_draws
from mrv2lab.check.compare import NearReport
from mrv2lab.check.side import Weights, weights_of
from mrv2lab.check.twin import Twin, TwinReport
from mrv2lab.check.workloads import (
    ALL,
    MODEL,
    SAMPLING_FACTORS,
    all_pairs,
    configs,
    pairs,
    run_twin,
    twin_cases,
)
from mrv2lab.config import RunnerConfig
from mrv2lab.protocol import SamplingParams
from tests.check.plain_arithmetic import plain_arithmetic  # noqa: F401

COUNT = 200
QUICK = 8
CASES = twin_cases(COUNT, max_requests=16, sampling="all")


def label(index: int) -> str:
    return f"{index:03}-" + "-".join(CASES[index].setting.values())


def params(count: int, quick: int) -> list[object]:
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
            steps=report.steps, preemptions=report.stats.num_preemptions, hits=report.stats.prefix_hit_tokens
        )


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    made = Totals()
    yield made
    print(f"\n{made.near.rows} rows, {made.near.tokens} tokens, {made.near.excused} excused; {dict(made.counts)}")


def run(index: int, weights: Weights, a: RunnerConfig, b: RunnerConfig, equality: str) -> TwinReport:
    """Even draws are driven by a, odd ones by b."""
    report = run_twin(CASES[index], *((a, b) if index % 2 == 0 else (b, a)), weights=weights)
    assert report.equality == equality
    assert report.equal, str(report)
    assert report.rows > report.steps
    return report


def v1(reorder: str = "mrv2", **options: object) -> RunnerConfig:
    return RunnerConfig(**{"runner": "v1", "reorder": reorder, "device": "cpu"} | options)  # type: ignore[arg-type]


def mrv2(**options: object) -> RunnerConfig:
    return RunnerConfig(**{"device": "cpu"} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", params(COUNT, 3))
def test_v1_and_mrv2(index: int, weights: Weights, totals: Totals) -> None:
    """Exact: V1 sorts its batch as MRV2 does."""
    report = run(index, weights, v1(), mrv2(), "exact")
    assert report.excused == 0
    totals.add(report)


@pytest.mark.parametrize("index", params(COUNT // 4, 2))
def test_v1_in_its_own_order(index: int, weights: Weights, totals: Totals) -> None:
    totals.add(run(index, weights, v1("none"), mrv2(), "near"))


@pytest.mark.parametrize("index", params(COUNT // 4, 3))
def test_mrv2_on_two_streams_and_policies(index: int, weights: Weights, totals: Totals) -> None:
    """Every bit, of sampled requests too."""
    report = run(index, weights, mrv2(), mrv2(), "exact")
    assert report.near.tokens > report.rows / 6, "unfinished prefills have none"
    totals.add(report)


@pytest.mark.parametrize("index", params(COUNT // 8, 1))
def test_v1_on_two_streams_and_policies(index: int, weights: Weights) -> None:
    run(index, weights, v1(), v1(), "exact")


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("index", params(COUNT // 8, 1))
def test_every_mode_of_logprobs(index: int, mode: str, weights: Weights) -> None:
    """And NaN counts, of which there are none."""
    more = {"logprobs_mode": mode, "count_nans": True}
    run(index, weights, v1(**more), mrv2(**more), "exact")


@pytest.mark.slow
@pytest.mark.parametrize("index", range(COUNT // 8))
def test_mrv2_in_the_interpreter(index: int, weights: Weights) -> None:
    """Near: another machine."""
    case = CASES[index]
    with Twin.build(*configs(case, mrv2(), mrv2(kernels="interpret")), weights=weights) as twin:
        for arrival in list(case.workload.resolve(MODEL.vocab_size))[:2]:
            twin.submit(f"w{arrival.step}{len(twin.tokens)}", arrival.prompt, arrival.params)  # type: ignore[arg-type]
        for _ in range(4):
            twin.step()
        assert twin.difference is None, str(twin.difference)


@pytest.mark.gpu
@pytest.mark.parametrize("index", params(50, 50))
def test_v1_and_mrv2_on_a_gpu(index: int, weights: Weights, totals: Totals) -> None:
    totals.add(run(index, weights, v1(device="cuda"), mrv2(device="cuda"), "exact"))


@pytest.mark.gpu
@pytest.mark.parametrize("index", params(20, 20))
def test_policies_on_a_gpu(index: int, weights: Weights) -> None:
    run(index, weights, mrv2(device="cuda"), mrv2(device="cuda"), "exact")


@pytest.mark.gpu
@pytest.mark.parametrize("index", params(12, 12))
def test_cpu_and_gpu_are_near(index: int, weights: Weights, totals: Totals) -> None:
    totals.add(run(index, weights, mrv2(), mrv2(device="cuda"), "near"))


def test_excused(totals: Totals) -> None:
    """At most 0.5 % over all that ran, and everything that a schedule can do did happen."""
    if not totals.near.rows:
        pytest.skip("no workload ran before")
    totals.near.check()
    assert min(totals.counts[name] for name in ("preemptions", "hits")) > 0


# -- the draws ---------------------------------------------------------------------------------------------------------


def test_every_pair_of_settings_occurs() -> None:
    covered = set().union(*(pairs(case.setting) for case in CASES))
    assert covered == all_pairs(SAMPLING_FACTORS)
    drawn = sampling_draws.settings()
    assert set().union(*map(pairs, drawn)) == all_pairs(sampling_draws.PARAMS)
    # A case of 12 requests or more takes them in turn.
    assert set().union(*map(pairs, drawn[:36])) == all_pairs(sampling_draws.PARAMS)


def test_the_quick_ones_use_every_parameter() -> None:
    plain = SamplingParams()
    used: Counter[str] = Counter()
    for case in CASES[:QUICK]:
        for arrival in case.workload:
            given = arrival.params
            used.update(name for name in vars(given) if getattr(given, name) != getattr(plain, name))
    wanted = set(vars(plain)) - {"stop", "include_stop_str_in_output", "structured_output", "extra_args"}
    assert set(used) == wanted
    assert min(used.values()) >= 20, used


def test_all_greedy_draws_no_temperature() -> None:
    for case in CASES[:QUICK]:
        assert case.setting["sampling"] in ALL
        hot = [arrival.params.temperature > 0 for arrival in case.workload]
        assert any(hot) == (case.setting["sampling"] == "all")


def test_sampling_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="sampling must be 'plain' or 'all', got 'some'"):
        twin_cases(1, sampling="some")
