"""Whether draws follow a law: tests on counts and uniforms that return p-values, in plain NumPy.

    fit = chi_square(np.bincount(tokens, minlength=len(law)), law)      # fit.p
    passes([fit.p for fit in ten_seeds])                                # the rule of this project's law tests

A p-value is the probability that a right sampler looks at least this wrong; under a right one it is uniform on (0, 1).
So one small p says little, and ten are judged together, on seeds fixed before anybody looked: :func:`passes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

SEEDS = range(10)
"""Of the law tests, fixed."""
DRAWS = 1_000_000
LEAST_EXPECTED = 5.0
"""Below it a bin's count is far from normal, and chi-square's p is wrong."""


class Fit(NamedTuple):
    """A test's outcome. ``dof``: degrees of freedom, or the sample's size where there are none."""

    statistic: float
    dof: int
    p: float


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x), a > 0, x >= 0, to about 1e-9: a series below x = a + 1,
    a continued fraction (modified Lentz) above, as in every handbook. ValueError outside."""
    if not (a > 0 and x >= 0):
        raise ValueError(f"Q(a, x) needs a > 0 and x >= 0, got a = {a}, x = {x}")
    if x == 0:
        return 1.0
    if math.isinf(x):
        return 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - front * total)
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    value, i = d, 0
    while True:
        i += 1
        b += 2
        factor = -i * (i - a)
        d = 1 / (_away(factor * d + b, tiny))
        c = _away(b + factor / c, tiny)
        value *= d * c
        if abs(d * c - 1) < 1e-15:
            return min(1.0, front * value)


def _away(x: float, tiny: float) -> float:
    return x if abs(x) > tiny else tiny


def chi_square_p(statistic: float, dof: int) -> float:
    """The probability of a chi-square of ``dof`` degrees of freedom above ``statistic``."""
    return upper_gamma(dof / 2, statistic / 2)


def chi_square(counts: Array, law: Array, least: float = LEAST_EXPECTED) -> Fit:
    """Pearson's test of ``counts`` int[V] against the probabilities ``law`` float[V], rare tokens pooled until each bin
    expects ``least``. A count where the law has 0 is impossible: p = 0.

    Raises ``ValueError`` for arrays that do not fit, a law that does not sum to 1, or fewer than two bins.
    """
    counts, law = np.asarray(counts, np.float64), np.asarray(law, np.float64)
    if counts.shape != law.shape or counts.ndim != 1:
        raise ValueError(f"counts {counts.shape} and law {law.shape} must be two rows of the same length")
    if abs(law.sum() - 1) > 1e-9 or law.min() < 0:
        raise ValueError(f"a law's probabilities are >= 0 and sum to 1; these have {law.min()} and {law.sum()}")
    if counts[law == 0].any():
        return Fit(math.inf, int(np.sum(law > 0)) - 1, 0.0)
    order = np.argsort(law, kind="stable")
    order = order[law[order] > 0]
    seen, expected = _pool(counts[order], counts.sum() * law[order], least)
    if len(expected) < 2:
        raise ValueError(f"{counts.sum():.0f} draws fill only {len(expected)} bin of {least} expected; draw more")
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return Fit(statistic, len(expected) - 1, chi_square_p(statistic, len(expected) - 1))


def _pool(counts: Array, expected: Array, least: float) -> tuple[Array, Array]:
    """Neighbours together until each bin expects ``least``; ``expected`` rises, so what is left joins the last one."""
    few = int(np.searchsorted(expected, least))
    starts, total = [], 0.0
    for i in range(few):
        if total == 0:
            starts.append(i)
        total += expected[i]
        if total >= least:
            total = 0.0
    starts += range(few, len(expected))
    if total and few < len(expected):  # the last pool is not full: the first whole bin joins it
        starts.remove(few)
    elif total and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(counts, starts), np.add.reduceat(expected, starts)


def independent(a: Array, b: Array) -> Fit:
    """Whether two equally long streams of tokens know of each other: chi-square of their table of pairs. Tokens too
    rare for an expectation of 5 in each cell count as one. Streams of a single token: p = 0, since they show nothing.

    Raises ``ValueError`` for streams of different lengths."""
    a, b = np.ravel(a), np.ravel(b)
    if len(a) != len(b):
        raise ValueError(f"the streams have {len(a)} and {len(b)} tokens")
    (x, width), (y, height) = _classes(a), _classes(b)
    if width < 2 or height < 2:
        return Fit(math.inf, 0, 0.0)
    table = np.bincount(x * height + y, minlength=width * height).reshape(width, height).astype(np.float64)
    expected = table.sum(1)[:, None] * table.sum(0)[None, :] / len(a)
    statistic, dof = float(((table - expected) ** 2 / expected).sum()), (width - 1) * (height - 1)
    return Fit(statistic, dof, chi_square_p(statistic, dof))


def _classes(tokens: Array) -> tuple[Array, int]:
    """Tokens numbered from 0, those with fewer than sqrt(5 n) occurrences all alike."""
    counts = np.bincount(tokens)
    enough = math.sqrt(LEAST_EXPECTED * len(tokens))
    common = np.flatnonzero(counts >= enough)
    number = np.full(len(counts), len(common))
    number[common] = np.arange(len(common))
    rare = counts.sum() - counts[common].sum()
    if 0 < rare < enough and len(common):
        number[number == len(common)] = number[common[np.argmin(counts[common])]]
        rare = 0
    return number[tokens], len(common) + bool(rare)


def kolmogorov(uniforms: Array) -> Fit:
    """Kolmogorov and Smirnov's test against the uniform law on (0, 1); p by the asymptotic series with Stephens'
    correction, good from some 20 values on."""
    x = np.sort(np.ravel(uniforms).astype(np.float64))
    n = len(x)
    at = np.arange(n)
    distance = float(max((x - at / n).max(), ((at + 1) / n - x).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.2:  # the series would need many terms for a p of 1
        return Fit(distance, n, 1.0)
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return Fit(distance, n, min(1.0, max(0.0, 2 * series)))


def passes(ps: Sequence[float]) -> bool:
    """The rule for the p-values of :data:`SEEDS`: at most three below 0.05 and none below 0.0001. A right sampler
    breaks it about once in 500 times."""
    return sum(p < 0.05 for p in ps) <= 3 and min(ps) >= 1e-4


def softmax(logits: Array) -> Array:
    """float64 probabilities of a row of logits."""
    x = np.asarray(logits, np.float64)
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())
