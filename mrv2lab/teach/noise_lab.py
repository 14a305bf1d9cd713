"""Sampling by noise, many rows at a time: the noise of ``ops/noise.py``, ways to get it wrong, and what each breaks.

A :class:`Source` makes noise for rows that a batch holds. :func:`grid` fills requests x positions with it, and the law
tests ask: do the tokens follow softmax, do positions and requests know of each other, is the winning tail dense, and
does a request's draw survive when it moves to another place of the batch?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mrv2lab.ops.noise import gumbel_spec, row_keys_spec, token_bits_spec, uniforms_spec
from mrv2lab.teach.sampling_lab import Fit, chi_square, independent, softmax

Array = np.ndarray[Any, Any]
CHUNK = 8192
"""Rows at a time: their temporaries stay in the cache."""
TAIL = 8
"""Uniforms below 2^-TAIL are the winning tail; the law's bins below 2^-24 need float32 to be that dense there."""


def _as_given(seeds: Array, positions: Array, places: Array) -> tuple[Array, Array]:
    return seeds, positions


@dataclass(frozen=True)
class Source:
    """Where a row's noise comes from: ``keys`` says which (seed, position) is hashed for rows of int64[n] seeds,
    positions and places in the batch; ``uniforms`` turns uint32 bits into float32 u and 1 - u."""

    name: str
    keys: Callable[[Array, Array, Array], tuple[Array, Array]] = _as_given
    uniforms: Callable[[Array], tuple[Array, Array]] = uniforms_spec

    def rows(self, seeds: Array, positions: Array, places: Array, vocab: int) -> tuple[Array, Array]:
        """Uniforms u and noise g, float32[n, V]."""
        k0, k1 = row_keys_spec(*self.keys(seeds, positions, places))
        u, v = self.uniforms(token_bits_spec(k0[:, None], k1[:, None], np.arange(vocab, dtype=np.uint32)))
        return u, gumbel_spec(u, v)


def _24_bits(bits: Array) -> tuple[Array, Array]:
    u = ((bits >> 8).astype(np.float64) + 0.5) * 2.0**-24
    return u.astype(np.float32), (1 - u).astype(np.float32)


OURS = Source("seed, position and token")
TWENTY_FOUR_BITS = replace(OURS, name="24-bit uniforms", uniforms=_24_bits)
SHARED = Source("shared by all rows", lambda seeds, positions, places: (np.zeros_like(seeds), positions))
BY_PLACE = Source("by place in the batch", lambda seeds, positions, places: (places, positions))
POSITION_IGNORED = Source("position ignored", lambda seeds, positions, places: (seeds, np.zeros_like(positions)))
MUTANTS = (TWENTY_FOUR_BITS, SHARED, BY_PLACE, POSITION_IGNORED)
"""Deliberate bugs, of which each fails at least one test of :func:`examine`."""


@dataclass(frozen=True)
class Grid:
    """``requests`` x ``positions`` rows of noise over ``vocab`` tokens, each with a seed of its own."""

    # [Q, P, V] float32 each
    u: Array
    noise: Array

    def tokens(self, logits: Array) -> Array:
        """int64[Q, P]: argmax(logits + noise), ties to the lowest id; ``logits`` float32[V] are everybody's."""
        return np.asarray((np.asarray(logits, np.float32) + self.noise).argmax(axis=2))


def grid(source: Source, seed: int, requests: int = 1000, positions: int = 1000, vocab: int = 8) -> Grid:
    """The noise of requests with seeds drawn by ``seed``, at positions 0, 1, 2, ..., each in a place of its own."""
    seeds = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, requests)
    rows = np.arange(requests * positions)
    u, noise = (np.empty((len(rows), vocab), np.float32) for _ in range(2))
    for start in range(0, len(rows), CHUNK):
        place, position = np.divmod(rows[start : start + CHUNK], positions)
        u[start : start + CHUNK], noise[start : start + CHUNK] = source.rows(seeds[place], position, place, vocab)
    shape = (requests, positions, vocab)
    return Grid(u.reshape(shape), noise.reshape(shape))


def law(grid: Grid, logits: Array) -> Fit:
    """Chi-square of all tokens against softmax(logits)."""
    tokens = grid.tokens(logits)
    return chi_square(np.bincount(tokens.ravel(), minlength=len(logits)), softmax(logits))


def between_positions(grid: Grid, logits: Array) -> Fit:
    """Whether a request's next token knows of this one. The logits are the same, so it must not."""
    tokens = grid.tokens(logits)
    return independent(tokens[:, :-1], tokens[:, 1:])


def between_requests(grid: Grid, logits: Array) -> Fit:
    """Whether requests of different seeds know of each other, at equal positions."""
    tokens = grid.tokens(logits)
    return independent(tokens[:-1], tokens[1:])


def tail(grid: Grid) -> Fit:
    """The law of the extreme uniforms, those below 2^-8, which win where many tokens are alike: chi-square over 16
    equal bins of u and, inside each multiple of 2^-24, 16 bins of the rest, all equally likely."""
    extreme = grid.u[grid.u < 2.0**-TAIL].astype(np.float64)
    coarse = (extreme * 2.0 ** (TAIL + 4)).astype(np.int64)
    fine = (extreme * 2.0**28).astype(np.int64) & 15
    return chi_square(np.bincount(coarse * 16 + fine, minlength=256), np.full(256, 1 / 256))


def survives_moves(source: Source, requests: int = 64, vocab: int = 64) -> bool:
    """Whether each request draws the same token from the same logits after the batch was shuffled."""
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(-(2**63), 2**63 - 1, requests), rng.integers(0, 1000, requests)
    places = np.arange(requests)
    before = source.rows(seeds, positions, places, vocab)[1].argmax(1)
    after = source.rows(seeds, positions, rng.permutation(requests), vocab)[1].argmax(1)
    return bool((before == after).all())


def extremes(source: Source) -> tuple[float, float]:
    """The least uniform that a source can make, and its noise: of bits 0. Ours: 2^-33 and 22.87."""
    u, v = source.uniforms(np.zeros(1, np.uint32))
    return float(u[0]), float(gumbel_spec(u, v)[0])


LOGITS = np.array([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, -2.0, float("-inf")], np.float32)
"""A law for :func:`examine`: seven tokens between 1 and 49 %, and one that cannot be drawn."""


def examine(source: Source, seed: int, requests: int = 1000, positions: int = 1000) -> dict[str, float]:
    """A p-value for each law, on ``requests`` x ``positions`` draws."""
    made = grid(source, seed, requests, positions, len(LOGITS))
    return {
        "law": law(made, LOGITS).p,
        "flat law": law(made, np.zeros(len(LOGITS))).p,
        "tail": tail(made).p,
        "between positions": between_positions(made, LOGITS).p,
        "between requests": between_requests(made, LOGITS).p,
    }


# -- the race ----------------------------------------------------------------------------------------------------------
def race(probs: Array, u: Array) -> Array:
    """int64[...]: V1's way, argmax(p / q) with q = -log(1 - u) from Exp(1); probs float[V], u float[..., V].

    q is exp(-g) of the Gumbel noise g of the same u, so log(p / q) = log p + g: both pick the same token."""
    return np.asarray((np.asarray(probs, np.float64) / -np.log1p(-u.astype(np.float64))).argmax(-1))
