"""The noise rule of compare as a law: how often it calls what is the same different, and what it finds."""

import math

import numpy as np
import pytest

from mrv2lab.trace import compare_noise
from mrv2lab.trace.compare_noise import holm, judge, rank_test
from tests.trace.step_runs import COUNT


def false_calls(count: int = 500, n: int = COUNT) -> int:
    """How many of ``count`` comparisons of one distribution with itself are called different."""
    random = np.random.default_rng(7)
    pairs = (random.lognormal(11, 0.05, (2, n)) for _ in range(count))
    return sum(judge([(a, b)])[0].call in ("a faster", "b faster") for a, b in pairs)


def found_changes(count: int = 500, n: int = COUNT) -> int:
    """How often a 20 % change with 5 % noise is found, on the right side."""
    random = np.random.default_rng(8)
    pairs = ((random.normal(100, 5, n), random.normal(80, 4, n)) for _ in range(count))
    return sum(judge([(a, b)])[0].call == "b faster" for a, b in pairs)


@pytest.fixture
def no_bootstrap(monkeypatch):
    """Intervals decide between "same" and "cannot tell" only."""
    monkeypatch.setattr(compare_noise, "ratio_interval", lambda a, b: (math.nan, math.nan))


@pytest.mark.usefixtures("no_bootstrap")
def test_one_distribution_is_called_different_in_at_most_5_percent():
    assert false_calls() <= 25


@pytest.mark.usefixtures("no_bootstrap")
def test_a_change_of_20_percent_in_5_percent_noise_is_found():
    assert found_changes() >= 475


@pytest.mark.usefixtures("no_bootstrap")
def test_a_rule_that_ignores_spread_breaks_the_law(monkeypatch):
    monkeypatch.setattr(compare_noise, "half_spread", lambda values: 0.0)
    monkeypatch.setattr(compare_noise, "rank_test", lambda a, b: 0.0)
    assert false_calls() > 25


@pytest.mark.usefixtures("no_bootstrap")
def test_a_rule_that_wants_the_ranges_apart_misses_changes(monkeypatch):
    monkeypatch.setattr(compare_noise, "half_spread", np.ptp)
    assert found_changes() < 475


@pytest.mark.slow
@pytest.mark.usefixtures("no_bootstrap")
def test_many_quantities_together_raise_no_more_alarms_than_one(monkeypatch):
    """Twenty quantities without a difference, 100 times: at 1 % together about one alarm, without Holm about twenty."""
    random = np.random.default_rng(3)
    samples = random.lognormal(11, 0.3, (100, 20, 2, COUNT))

    def alarms() -> int:
        judged = (judge([(a, b) for a, b in family]) for family in samples)
        return sum(any(one.call in ("a faster", "b faster") for one in family) for family in judged)

    assert alarms() <= 5
    monkeypatch.setattr(compare_noise, "holm", list)
    assert alarms() > 5


def test_a_significant_tenth_of_a_percent_is_the_same():
    random = np.random.default_rng(0)
    a, b = random.normal(1000, 10, 20_000), random.normal(1001, 10, 20_000)
    assert rank_test(a, b) < 1e-9
    assert judge([(a, b)])[0].call == "same within noise"
    constant = np.full(20, 62_102), np.full(20, 62_082)
    assert judge([constant])[0].call == "same within noise"


def test_too_much_noise_cannot_tell_and_too_few_values_cannot_either():
    random = np.random.default_rng(0)
    wide = judge([(random.lognormal(11, 1, COUNT), random.lognormal(11, 1, COUNT))])[0]
    assert wide.call == "cannot tell"
    assert wide.reason.startswith("the difference is inside the noise: p = ")
    few = judge([(np.arange(100, 107), np.arange(900, 1000))])[0]
    assert (few.call, few.reason) == ("cannot tell", "7 and 100 values; at least 8 are needed on each side")
    assert judge([(np.arange(100, 108), np.arange(900, 1000))])[0].call == "a faster"


def test_rank_test_by_hand():
    # All of a below all of b: 1 of the 20 ways to choose 3 of 6, and its mirror image.
    assert rank_test(np.array([1, 2, 3]), np.array([4, 5, 6])) == pytest.approx(2 / 20)
    # Ranks 1.5, 1.5, 3, 4. Pairs' sums: 3, 4.5 (4x), 5.5 (4x..): only {1.5, 1.5} and {3, 4} are as far from 5.
    assert rank_test(np.array([7, 7]), np.array([8, 9])) == pytest.approx(2 / 6)
    assert rank_test(np.array([5, 5]), np.array([5, 5])) == 1.0


def test_exact_and_normal_agree(monkeypatch):
    random = np.random.default_rng(5)
    a, b = random.normal(0, 1, 25), random.normal(0.8, 1, 25)
    exact = rank_test(a, b)
    monkeypatch.setattr(compare_noise, "EXACT_UP_TO", 0)
    assert rank_test(a, b) == pytest.approx(exact, rel=0.05)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
