"""Exercises of the sampling lesson: a function of the learner's against the sampler's own definitions, with a reason.

check_min_p(lambda logits, p: ...)      # -> right. / not yet: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrv2lab.ops._cut import OFF, cut_spec
from mrv2lab.ops.noise import noise_spec
from mrv2lab.teach.noise_lab import Source, grid, law, survives_moves

Array = np.ndarray[Any, Any]
LAW = np.array([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, -2.0, 0.0], np.float32)


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and why not."""

    right: bool
    reason: str

    def __repr__(self) -> str:
        return f"right. {self.reason}" if self.right else f"not yet: {self.reason}"


def kept_tokens(logits: Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """bool[V]: what min-p and then top-k and top-p keep of a row of logits, after the temperature."""
    x = np.asarray(logits, np.float32)
    keep = x > -np.inf
    if min_p > 0:
        keep &= x >= x.max() + np.float32(np.log(min_p))
    value, last = cut_spec(np.where(keep, x, np.float32("-inf")), top_k, top_p)
    if last == OFF:
        return np.asarray(keep)
    return np.asarray(keep & ((x > value) | ((x == value) & (np.arange(len(x)) <= last))))


def check_min_p(keep: Callable[[Array, float], Array]) -> Verdict:
    """``keep(logits float32[V], p)`` -> bool[V]: tokens at least p times as likely as the most likely one."""
    cases = ((np.array([2, 1, 0, -3], np.float32), 0.1), (np.zeros(5, np.float32), 0.9), (LAW, 0.3), (LAW, 1.0))
    done = "The threshold is max + log(p): no probability is needed, so no softmax."
    return _same_sets(((f"logits {x.tolist()}, p = {p}", keep(x, p), kept_tokens(x, min_p=p)) for x, p in cases), done)


def check_top_p(keep: Callable[[Array, float], Array]) -> Verdict:
    """``keep(logits float32[V], p)`` -> bool[V]: the fewest of the most likely tokens whose probability reaches p, ties
    to the lowest ids."""
    ties = np.zeros(4, np.float32)
    cases = ((LAW, 0.5), (np.array([9, 0, 0], np.float32), 0.1), (ties, 0.5), (ties[:3], 0.34), (LAW, 0.9))
    done = "One token always stays, the one that reaches p stays, and of equal ones the first."
    return _same_sets(((f"logits {x.tolist()}, p = {p}", keep(x, p), kept_tokens(x, top_p=p)) for x, p in cases), done)


def _same_sets(cases: Iterable[tuple[str, Any, Array]], done: str) -> Verdict:
    for what, got, want in cases:
        if np.shape(got) != want.shape:
            return Verdict(False, f"{what}: a bool for each token is wanted, got {got!r}")
        got = np.asarray(got, bool)
        for token in np.flatnonzero(got != want).tolist():
            did, should = ("keep", "drop") if got[token] else ("drop", "keep")
            return Verdict(
                False,
                f"{what}: you {did} token {token}, the sampler {should}s it ({np.flatnonzero(want).tolist()} stay)",
            )
    return Verdict(True, done)


def check_draw(draw: Callable[[Array, float, int, int], int]) -> Verdict:
    """``draw(logits float32[V], temperature, seed, position)`` -> token: softmax(logits / temperature) by Gumbel-max,
    the argmax at temperature 0."""
    for temperature in (0.0, 1.0, 0.5, 2.0):
        for position in range(40):
            scores = (
                LAW.copy() if temperature == 0 else LAW / np.float32(temperature) + noise_spec(5, position, len(LAW))
            )
            got, want = draw(LAW, temperature, 5, position), int(scores.argmax())
            if got != want:
                why = (
                    "noise comes behind the temperature, which scales logits"
                    if temperature
                    else "0 is greedy: no noise"
                )
                return Verdict(
                    False,
                    f"temperature {temperature}, position {position}: token {got}, the sampler draws {want}; {why}",
                )
    return Verdict(True, "Temperature divides the logits; then the noise is added; then one argmax.")


def check_key(key: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Verdict:
    """``key(seed, position, place)`` (arrays int64[n]) -> the two numbers to hash, so that draws follow the law, differ
    from step to step and between requests, and stay when the batch changes."""
    source = Source("yours", lambda seed, position, place: _two(key(seed, position, place), seed))
    if not survives_moves(source):
        return Verdict(False, "a request that moves to another place of the batch draws another token")
    made = grid(source, 0, 40, 250)
    tokens = made.tokens(LAW)
    if all(len(np.unique(row)) == 1 for row in tokens):
        return Verdict(False, "a request draws the same token at every position")
    if (tokens == tokens[0]).all():
        return Verdict(False, "all requests draw the same tokens")
    if (p := law(made, LAW).p) < 1e-4:
        return Verdict(False, f"the tokens do not follow the law (p = {p:.1g}): rows share noise that they should not")
    return Verdict(True, "The request's own numbers, and nothing of the batch.")


def _two(made: tuple[Any, Any], like: Array) -> tuple[Array, Array]:
    first, second = (np.broadcast_to(np.asarray(one, np.int64), like.shape) for one in made)
    return first, second
