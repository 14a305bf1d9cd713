"""The bound lies above the noise, everywhere and not far; a gap would let a winner be skipped."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.ops import noise
from mrv2lab.ops._noise_bound import SLACK, SLOPE, TOP, noise_bound_spec
from tests.ops.test_noise import spread


def gap(y: np.ndarray, bound=noise_bound_spec) -> np.ndarray:
    """float64: bound - noise, of hashes in front of their last xor."""
    r = y ^ (y >> np.uint32(14))
    return bound(y) - noise.gumbel_spec(*noise.uniforms_spec(r)).astype(np.float64)


def winning_tail() -> np.ndarray:
    """uint32: all y below 2^20, then the 64 numbers around each of 2^17 log-spaced ones."""
    around = (2.0 ** np.linspace(20, 32, 2**15, endpoint=False)).astype(np.uint64)[:, None] + np.arange(64)
    return np.concatenate([np.arange(2**20, dtype=np.uint64), around.reshape(-1).clip(0, 2**32 - 1)]).astype(np.uint32)


def test_the_bound_is_above_the_noise():
    for y in (spread(), winning_tail()):
        assert gap(y).min() >= SLACK / 2  # the rest is left to the roundings of a score


def test_the_bound_is_near_the_noise_of_winners():
    y = winning_tail()
    near = gap(y)
    g = noise_bound_spec(y) - near
    assert near[(g > 3) & (y > 99)].max() < 0.1  # below, the half in r + 1/2 is much
    assert near[g > 3].mean() < 0.1


@pytest.mark.slow
def test_the_bound_of_every_float():
    """y enters through float(y): the least y of each float has the largest noise that a float must cover, 2.4e8 of them
    between 2^24 and 2^32 included."""
    for first in range(0, 2**32, 2**24):
        step = max(1, 2 ** int(np.log2(max(first, 1))) >> 23)
        assert gap(np.arange(first, first + 2**24, step, dtype=np.uint64).astype(np.uint32)).min() >= SLACK / 2


@pytest.mark.parametrize(
    "mutant",
    [
        lambda y: TOP - 0.0005 * 4 - y.astype(np.float32).view(np.int32) * SLOPE,  # no slack
        lambda y: TOP - (y + np.uint32(2**16)).astype(np.float32).view(np.int32) * SLOPE,  # the xor forgotten
        lambda y: TOP - y.astype(np.float32).view(np.int32) * (SLOPE * 1.0001),
    ],
)
def test_mutants(mutant):
    assert min(gap(spread(), mutant).min(), gap(winning_tail(), mutant).min()) < SLACK / 2
