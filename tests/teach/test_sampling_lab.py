"""The statistics: against known values, uniform under a right law, small under a wrong one, and the rule for ten."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrv2lab.teach import noise_lab, sampling_lab
from mrv2lab.teach.noise_lab import LOGITS, MUTANTS, OURS, examine, extremes, grid, race, survives_moves
from mrv2lab.teach.sampling_lab import (
    Fit,
    chi_square,
    chi_square_p,
    independent,
    kolmogorov,
    passes,
    softmax,
    upper_gamma,
)


# -- the gamma function --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dof", "statistic", "p"),
    [
        (1, 3.841458820694124, 0.05),  # tables: 95 % and 99.9 % points
        (1, 10.827566170662733, 0.001),
        (5, 11.070497693516351, 0.05),
        (10, 18.307038053275146, 0.05),
        (35, 49.80184957, 0.05),
        (100, 124.3421134, 0.05),
        (100, 77.92946517, 0.95),
        (1000, 1074.679449, 0.05),
    ],
)
def test_chi_square_table(dof: int, statistic: float, p: float) -> None:
    assert chi_square_p(statistic, dof) == pytest.approx(p, rel=1e-6)


def test_gamma_in_closed_form() -> None:
    """Q(1, x) = exp(-x); Q(1/2, x) = erfc(sqrt x); Q(3, x) = exp(-x) (1 + x + x^2 / 2): on both sides of x = a + 1."""
    for x in (1e-6, 0.3, 1.0, 1.999, 2.0, 2.001, 5.0, 40.0, 300.0):
        assert upper_gamma(1, x) == pytest.approx(math.exp(-x), rel=1e-12)
        assert upper_gamma(0.5, x) == pytest.approx(math.erfc(math.sqrt(x)), rel=1e-9)
        assert upper_gamma(3, x) == pytest.approx(math.exp(-x) * (1 + x + x * x / 2), rel=1e-9)
    assert (upper_gamma(2, 0), upper_gamma(2, math.inf)) == (1.0, 0.0)


def test_gamma_of_many_degrees_of_freedom() -> None:
    """Wilson and Hilferty's cube root is good to a few thousandths there."""
    dof = 49_999
    for z in (-3, 0, 1, 3):
        statistic = dof * (1 - 2 / (9 * dof) + z * math.sqrt(2 / (9 * dof))) ** 3
        assert chi_square_p(statistic, dof) == pytest.approx(math.erfc(z / math.sqrt(2)) / 2, rel=5e-3)


@pytest.mark.parametrize(("a", "x"), [(0, 1), (-1, 1), (1, -1), (float("nan"), 1)])
def test_gamma_outside(a: float, x: float) -> None:
    with pytest.raises(ValueError, match="a > 0 and x >= 0"):
        upper_gamma(a, x)


# -- chi-square ----------------------------------------------------------------------------------------------------
def test_chi_square_by_hand() -> None:
    fit = chi_square(np.array([30, 70]), np.array([0.5, 0.5]))
    assert fit == Fit(16.0, 1, pytest.approx(6.334e-5, rel=1e-3))


@pytest.mark.parametrize(
    ("expected", "bins"),
    [
        ([1, 2, 3, 94], 2),  # 1 + 2 + 3 reach 5
        ([1, 2, 97], 1),  # they do not: the whole bin joins them
        ([1, 1, 1, 3, 4, 4, 86], 3),  # {1, 1, 1, 3}, {4, 4}, {86}
        ([2, 4, 1, 93], 2),  # by size, not by place
        ([10, 20, 70], 3),
        ([4, 4, 4, 88], 2),  # {4, 4}, and the third joins the whole bin
    ],
)
def test_rare_tokens_are_pooled(expected: list[int], bins: int) -> None:
    law = np.array(expected) / 100
    if bins == 1:
        with pytest.raises(ValueError, match="draw more"):
            chi_square(np.array(expected), law)
    else:
        assert chi_square(np.array(expected), law) == Fit(0.0, bins - 1, 1.0)


def test_everything_is_rare() -> None:
    assert chi_square(np.full(9, 2), np.full(9, 1 / 9)) == Fit(0.0, 2, 1.0)  # three pools of three


def test_an_impossible_token() -> None:
    law = np.array([0.5, 0.5, 0.0])
    assert chi_square(np.array([50, 50, 0]), law).dof == 1
    assert chi_square(np.array([5000, 5000, 1]), law).p == 0


@pytest.mark.parametrize(
    ("counts", "law", "words"),
    [([1, 2], [1.0], "same length"), ([1, 2], [0.5, 0.4], "sum to 1"), ([1, 2], [1.5, -0.5], ">= 0")],
)
def test_chi_square_refuses(counts: list[int], law: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chi_square(np.array(counts), np.array(law))


def test_p_is_uniform_under_the_law() -> None:
    """500 samples with rare tokens in them: the p-values pass Kolmogorov's test."""
    law = softmax(np.random.default_rng(0).normal(0, 2, 60))
    rng = np.random.default_rng(1)
    fits = [chi_square(rng.multinomial(2000, law), law) for _ in range(500)]
    assert kolmogorov(np.array([fit.p for fit in fits])).p > 0.01


# -- independence and Kolmogorov -------------------------------------------------------------------------------------
def test_independence_by_hand() -> None:
    a, b = np.repeat([0, 0, 1, 1], [30, 20, 20, 30]), np.repeat([0, 1, 0, 1], [30, 20, 20, 30])
    assert independent(a, b) == Fit(4.0, 1, pytest.approx(0.0455, rel=1e-3))


def test_independence_under_the_law() -> None:
    rng = np.random.default_rng(2)
    law = softmax(np.linspace(0, -8, 40))
    ps = [independent(*(rng.choice(40, 3000, p=law) for _ in range(2))).p for _ in range(300)]
    assert kolmogorov(np.array(ps)).p > 0.01


def test_streams_that_know_of_each_other() -> None:
    a = np.random.default_rng(3).integers(0, 5, 2000)
    assert independent(a, a).p == 0
    assert independent(a, (a + 1) % 5).p == 0
    assert independent(a, np.zeros(2000, int)).p == 0, "a stream that never changes shows nothing"
    with pytest.raises(ValueError, match="2000 and 1999"):
        independent(a, a[1:])


def test_kolmogorov() -> None:
    """Its 5 % point is 1.358 for large samples; the p-values of right samples are uniform themselves."""
    n = 10_000
    at = (np.arange(n) + 0.5) / n
    shift = 1.358 / math.sqrt(n)
    assert kolmogorov(np.clip(at * (1 - shift) + shift, 0, 1)).p == pytest.approx(0.05, abs=0.004)
    assert kolmogorov(at).p == 1
    assert kolmogorov(at**1.1).p < 1e-6
    rng = np.random.default_rng(4)
    ps = np.array([kolmogorov(rng.random(400)).p for _ in range(400)])
    assert kolmogorov(ps).p > 0.01
    assert passes(ps[:10].tolist())


@pytest.mark.parametrize(
    ("ps", "verdict"),
    [
        ([0.5] * 10, True),
        ([0.04] * 3 + [0.5] * 7, True),
        ([0.04] * 4 + [0.5] * 6, False),
        ([1e-4] + [0.5] * 9, True),
        ([9e-5] + [0.5] * 9, False),
    ],
)
def test_the_rule(ps: list[float], verdict: bool) -> None:
    assert passes(ps) is verdict


# -- the noise, examined in small --------------------------------------------------------------------------------------
FEW = {"requests": 100, "positions": 500}


def test_ours_passes_in_small() -> None:
    assert min(examine(OURS, 0, **FEW).values()) > 1e-4
    assert survives_moves(OURS)
    assert extremes(OURS) == (2.0**-33, pytest.approx(22.8738, abs=1e-4))


CAUGHT_BY = {
    "24-bit uniforms": {"tail"},
    "shared by all rows": {"law", "flat law", "tail", "between positions", "between requests"},
    "by place in the batch": set(),
    "position ignored": {"law", "flat law", "tail", "between positions", "between requests"},
}


@pytest.mark.parametrize("source", MUTANTS, ids=lambda source: source.name)
def test_each_mutant_fails(source: noise_lab.Source) -> None:
    """Noise by place has every law, and fails where a request moves."""
    failed = {name for name, p in examine(source, 0, **FEW).items() if p < 1e-4}
    assert failed >= CAUGHT_BY[source.name]
    assert survives_moves(source) == (source is not noise_lab.BY_PLACE)
    assert failed or not survives_moves(source)
    assert (extremes(source)[1] < 17.4) == (source is noise_lab.TWENTY_FOUR_BITS)


def test_a_grid_is_the_definition() -> None:
    """Row by row the noise of ``ops/noise.py``, whatever the chunks."""
    from mrv2lab.ops.noise import noise_spec

    made = grid(OURS, 5, requests=3, positions=4000, vocab=7)
    seeds = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 3)
    for request, position in ((0, 0), (1, 17), (2, 3999), (2, 192)):
        np.testing.assert_array_equal(made.noise[request, position], noise_spec(int(seeds[request]), position, 7))


def test_a_race_is_gumbel_max() -> None:
    """V1's argmax(p / q) and MRV2's argmax(logit + g), from the same uniforms: the same tokens."""
    made = grid(OURS, 1, requests=100, positions=1000)
    assert (race(softmax(LOGITS), made.u) != made.tokens(LOGITS)).sum() == 0


def test_seeds_and_draws_are_fixed() -> None:
    assert (list(sampling_lab.SEEDS), sampling_lab.DRAWS) == (list(range(10)), 10**6)
