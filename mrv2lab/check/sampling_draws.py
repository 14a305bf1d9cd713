"""Random sampling parameters as values, one setting a request: every pair of settings of two parameters comes early."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from mrv2lab.protocol import SamplingParams

Setting = dict[str, str]
Factors = Mapping[str, tuple[str, ...]]
Pair = tuple[tuple[str, str], tuple[str, str]]

PARAMS: dict[str, tuple[str, ...]] = {
    "top_k": ("off", "1", "some"),
    "top_p": ("off", "some"),
    "min_p": ("off", "some"),
    "penalties": ("off", "repetition", "frequency", "presence", "all"),
    "bias": ("off", "some"),
    "allowed": ("off", "some"),
    "min_tokens": ("off", "some"),
    "stop_ids": ("off", "some"),
    "bad_words": ("off", "some"),
    "logprobs": ("off", "0", "some", "many", "vocabulary"),
    "prompt_logprobs": ("off", "0", "some", "vocabulary"),
    "temperature": ("0", "1", "other"),
    "seed": ("off", "given"),
}
"""What each request's parameters are drawn from. "many" logprobs are more than a device orders."""
COUNT = 64
"""So many settings are drawn, and requests take them in turn."""


def pairs(setting: Setting) -> set[Pair]:
    """The pairs of values that a setting covers."""
    return set(itertools.combinations(setting.items(), 2))


def all_pairs(factors: Factors) -> set[Pair]:
    """Every pair of values of two different factors."""
    made: set[Pair] = set()
    for one, other in itertools.combinations(factors, 2):
        made |= {((one, a), (other, b)) for a in factors[one] for b in factors[other]}
    return made


def draw(count: int, seed: int, factors: Factors) -> tuple[Setting, ...]:
    """``count`` settings: of 40 random candidates each time the one that covers the most pairs not covered yet."""
    rng = np.random.default_rng(seed)
    uncovered, made = all_pairs(factors), []
    for _ in range(count):
        candidates = [{name: str(rng.choice(values)) for name, values in factors.items()} for _ in range(40)]
        if uncovered:  # one of them is bound to cover something
            (one, a), (other, b) = sorted(uncovered)[int(rng.integers(len(uncovered)))]
            candidates[0] |= {one: a, other: b}
        best = max(candidates, key=lambda setting: len(pairs(setting) & uncovered))
        uncovered -= pairs(best)
        made.append(best)
    return tuple(made)


@cache
def settings(seed: int = 3) -> tuple[Setting, ...]:
    """:data:`COUNT` settings of :data:`PARAMS`; every pair occurs."""
    return draw(COUNT, seed, PARAMS)


def params(setting: Setting, rng: np.random.Generator, vocab_size: int, **base: Any) -> SamplingParams:
    """The parameters of one request. ``base`` has those that are no part of the setting (``max_tokens``, ...)."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(vocab_size, count, replace=False).tolist())

    def on(name: str) -> bool:
        return setting[name] != "off"

    made: dict[str, Any] = {"temperature": {"0": 0.0, "1": 1.0}.get(setting["temperature"], 0.0)}
    if setting["temperature"] == "other":
        made["temperature"] = float(rng.choice([0.3, 0.7, 1.5]))
    if on("top_k"):
        made["top_k"] = 1 if setting["top_k"] == "1" else int(rng.integers(2, 40))
    if on("top_p"):
        made["top_p"] = float(rng.uniform(0.3, 0.99))
    if on("min_p"):
        made["min_p"] = float(rng.uniform(0.001, 0.3))
    kind = setting["penalties"]
    if kind in ("repetition", "all"):
        made["repetition_penalty"] = float(rng.uniform(0.7, 2.5))
    if kind in ("frequency", "all"):
        made["frequency_penalty"] = float(rng.uniform(-1, 2))
    if kind in ("presence", "all"):
        made["presence_penalty"] = float(rng.uniform(-1, 2))
    if on("bias"):
        made["logit_bias"] = {token: float(rng.uniform(-3, 3)) for token in some(min(5, vocab_size))}
    if on("allowed"):
        made["allowed_token_ids"] = some(max(1, vocab_size // 5 if vocab_size < 1024 else 1000))
    if on("stop_ids"):
        made["stop_token_ids"] = tuple(base.pop("stop_token_ids", ())) or some(max(1, min(vocab_size // 12, 100)))
    if on("min_tokens"):
        made["min_tokens"] = int(rng.integers(1, base["max_tokens"] + 1))
    if on("bad_words"):
        pool = some(min(12, vocab_size))
        made["bad_words"] = (pool[:1], pool[1:2], *((one, other) for one in pool[2:6] for other in pool[6:]))
    counts = {"0": 0, "some": int(rng.integers(1, 21)), "many": min(40, vocab_size), "vocabulary": -1}
    for name in ("logprobs", "prompt_logprobs"):
        if on(name):
            made[name] = counts[setting[name]]
    if on("seed"):
        made["seed"] = int(rng.integers(-(2**63), 2**63 - 1))
    return SamplingParams(**base | made)
