"""When two samples of times are called different, when the same, and when nobody can tell.

The rule, for samples of a quantity, one value a step:

1. *Different* (``a faster``, ``b faster``) where two things hold. A two-sided Wilcoxon rank-sum test, exact up to 50
   values and by the normal approximation with ties and continuity beyond, has p < 1 % after Holm's correction over all
   quantities that are judged together. And the medians are further apart than half the distance between the quartiles
   of the wider sample, and than 1 % of the larger: with thousands of steps, or with times that never vary, a tenth of
   a percent is significant, and still nobody's gain.
2. *Same within noise* where not different and a 99 % bootstrap interval of the ratio of the medians (fixed seed) lies
   within 10 % of 1: the steps were enough to exclude a larger difference.
3. *Cannot tell* otherwise, and always with fewer than 8 values on a side.

Steps are taken as independent draws. What changes from run to run (clocks, placement, neighbours) is not in one run:
of two runs of one program on a busy machine the rule may call one faster, and then it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Call = Literal["a faster", "b faster", "same within noise", "cannot tell"]

FEWEST = 8
"""Values on each side: with 8 and 8 the rarest order has a chance of 1 in 6,435."""
ALPHA = 0.01
"""Chance of calling any of the quantities judged together different when none is."""
LEAST = 0.01
"""Differences up to this share of the larger median are called none."""
SAME_WITHIN = 0.1
EXACT_UP_TO = 50
"""Values together; beyond, the normal approximation is good to a few percent of p."""
RESAMPLES = 2000
_MOST_DRAWN = 4_000_000


@dataclass(frozen=True)
class Judgement:
    """One quantity of two traces."""

    call: Call
    reason: str
    p: float
    """Of the rank test, Holm-corrected; NaN with too few values."""
    low: float
    """Lower end of the ratio's interval, b / a; NaN where it was not needed or has no meaning."""
    high: float


def judge(pairs: Sequence[tuple[Array, Array]]) -> list[Judgement]:
    """Judge quantities together: for each (values in a [n], values in b [m]) by the rule above."""
    enough = [min(len(a), len(b)) >= FEWEST for a, b in pairs]
    ps = iter(holm([rank_test(a, b) for (a, b), some in zip(pairs, enough, strict=True) if some]))
    return [_judge(a, b, next(ps)) if some else _too_few(a, b) for (a, b), some in zip(pairs, enough, strict=True)]


def _too_few(a: Array, b: Array) -> Judgement:
    few = f"{len(a)} and {len(b)} values; at least {FEWEST} are needed on each side"
    return Judgement("cannot tell", few, math.nan, math.nan, math.nan)


def _judge(a: Array, b: Array, p: float) -> Judgement:
    if different(a, b, p):
        call: Call = "b faster" if np.median(b) < np.median(a) else "a faster"
        return Judgement(call, f"rank test p = {p:.2g}", p, math.nan, math.nan)
    low, high = ratio_interval(a, b)
    if low >= 1 / (1 + SAME_WITHIN) and high <= 1 + SAME_WITHIN:
        return Judgement("same within noise", f"the ratio lies between {low:.3f} and {high:.3f}", p, low, high)
    between = "" if math.isnan(low) else f", ratio between {low:.3f} and {high:.3f}"
    return Judgement("cannot tell", f"the difference is inside the noise: p = {p:.2g}{between}", p, low, high)


def different(a: Array, b: Array, p: float) -> bool:
    """Rule 1, given the corrected p."""
    return p < ALPHA and apart(a, b)


def apart(a: Array, b: Array) -> bool:
    """The half of rule 1 that is about the size of the difference."""
    medians = float(np.median(a)), float(np.median(b))
    return abs(medians[1] - medians[0]) > max(half_spread(a), half_spread(b), LEAST * max(medians))


def half_spread(values: Array) -> float:
    """Half the distance between the quartiles."""
    q1, q3 = np.percentile(values, (25, 75))
    return float(q3 - q1) / 2


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for how many there are (Holm 1979): below alpha together means a chance of at most alpha that
    any of them is a false alarm."""
    corrected = [1.0] * len(ps)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda one: ps[one])):
        worst = max(worst, min(1.0, ps[index] * (len(ps) - rank)))
        corrected[index] = worst
    return corrected


def rank_test(a: Array, b: Array) -> float:
    """Two-sided p of the Wilcoxon rank-sum test, ties given their mean rank; 1 where all values are equal."""
    pooled = np.concatenate([a, b])
    values, inverse, counts = np.unique(pooled, return_inverse=True, return_counts=True)
    if len(values) == 1:
        return 1.0
    # Twice the mean rank is a whole number.
    doubled = (2 * np.cumsum(counts) - counts + 1)[inverse.reshape(-1)]
    if len(pooled) <= EXACT_UP_TO:
        return _exact(doubled, len(a))
    n, m, total = len(a), len(b), len(pooled)
    off = abs(float(doubled[:n].sum()) - n * (total + 1)) / 2
    ties = float((counts.astype(np.float64) ** 3 - counts).sum()) / (total * (total - 1))
    deviation = math.sqrt(n * m / 12 * (total + 1 - ties))
    return math.erfc(max(off - 0.5, 0.0) / deviation / math.sqrt(2))


def _exact(doubled: Array, n: int) -> float:
    """Share of all ways to choose n of these doubled ranks whose sum is as far from its mean as the first n's."""
    # ways[k, s]: ways to choose k of the ranks so far with sum s
    ways = np.zeros((n + 1, int(doubled.sum()) + 1))
    ways[0, 0] = 1
    for rank in doubled.tolist():
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    mean = n * (len(doubled) + 1)
    sums = np.arange(ways.shape[1])
    far = np.abs(sums - mean) >= abs(int(doubled[:n].sum()) - mean)
    return float(ways[n, far].sum() / ways[n].sum())


def ratio_interval(a: Array, b: Array) -> tuple[float, float]:
    """99 % bootstrap interval of median(b) / median(a); NaN where a median of a is 0."""
    random = np.random.default_rng(0)
    count = max(200, min(RESAMPLES, _MOST_DRAWN // (len(a) + len(b))))
    medians = [np.median(side[random.integers(0, len(side), (count, len(side)))], axis=1) for side in (a, b)]
    if (medians[0] <= 0).any():
        return (1.0, 1.0) if not a.any() and not b.any() else (math.nan, math.nan)
    low, high = np.percentile(medians[1] / medians[0], (0.5, 99.5))
    return float(low), float(high)
