"""Random workloads as values: arrival, abort, preemption by a tight pool, chunked prefill, prefix hits, sampling mixes.

A *setting* gives each factor one value; ``draw`` makes settings so that every pair of values of two factors occurs
early; ``make_case`` turns one into what to run. A setting may ask for every sampling parameter (:data:`ALL`). The
equality tests draw a model too, so they bring their own factors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mrv2lab.check import sampling_draws
from mrv2lab.check.sampling_draws import Factors, Pair, Setting
from mrv2lab.check.sampling_draws import pairs as pairs
from mrv2lab.check.side import Weights
from mrv2lab.check.twin import Twin, TwinReport
from mrv2lab.config import EngineConfig, ModelConfig, RunnerConfig
from mrv2lab.engine.options import split_options
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.protocol import SamplingParams

FACTORS: dict[str, tuple[str, ...]] = {
    "loop": ("sync", "async"),
    # Deferred until a wait needs it, deferred by 0, 1 and 2 steps, threaded.
    "stream": ("deferred", "lag0", "lag1", "lag2", "threaded"),
    "policy": ("barrier", "pinned_copy", "uva_pool"),
    # long_prefill_token_threshold, or 11 tokens a step for everybody together.
    "chunk": ("none", "1", "3", "16", "budget"),
    "prefix": ("off", "shared"),
    # Storm: a KV pool for three requests.
    "pool": ("roomy", "storm"),
    "arrivals": ("burst", "random"),
    "sampling": ("greedy", "sampled", "mixed", "seeded"),
    "stop": ("length", "eos", "stop_ids"),
    "order": ("fcfs", "priority"),
    "block": ("8", "16"),
    "aborts": ("no", "yes"),
}
"""What a workload is drawn from; all transfer policies but ``unsafe``."""

ALL = ("all", "all-greedy")
"""Two more values of ``sampling``: every parameter that a request may have, drawn for each request so that every pair
of their settings comes (``check/sampling_draws.py``); at temperature 0 or at any."""
SAMPLING_FACTORS: dict[str, tuple[str, ...]] = FACTORS | {"sampling": ALL}

MODEL = ModelConfig(
    name="check",
    vocab_size=331,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_ids=tuple(range(5, 331, 17)),
)
"""Small, with random weights; one token in 17 ends a request that does not ignore it."""


def all_pairs(factors: Factors = FACTORS) -> set[Pair]:
    """Every pair of values of two different factors."""
    return sampling_draws.all_pairs(factors)


def draw(count: int, seed: int, factors: Factors = FACTORS) -> tuple[Setting, ...]:
    """``count`` settings: of 40 random candidates each time the one that covers the most pairs not covered yet."""
    return sampling_draws.draw(count, seed, factors)


@dataclass(frozen=True)
class Case:
    """A setting made concrete: what to run, and on what."""

    index: int
    setting: Setting
    workload: Workload
    aborts: tuple[tuple[int, int], ...]
    """(step, arrival)"""
    options: dict[str, Any]
    """Keywords of ``Engine`` except stream, lag and transfer."""

    @property
    def transport(self) -> dict[str, Any]:
        """The stream and the policy, as keywords of ``Engine``."""
        return transport(self.setting["stream"], self.setting["policy"])

    def other_transport(self) -> dict[str, Any]:
        """Another draw of stream and policy, both different."""
        rng = np.random.default_rng([self.index, 7])
        streams = [name for name in FACTORS["stream"] if name != self.setting["stream"]]
        policies = [name for name in FACTORS["policy"] if name != self.setting["policy"]]
        return transport(str(rng.choice(streams)), str(rng.choice(policies)))


def transport(stream: str, policy: str) -> dict[str, Any]:
    """Keywords of ``Engine`` for a stream and a policy."""
    made: dict[str, Any] = {"transfer": policy, "stream": "threaded" if stream == "threaded" else "deferred"}
    if stream.startswith("lag"):
        made["lag"] = int(stream[3:])
    return made


def make_case(index: int, setting: Setting, *, vocab_size: int, max_requests: int = 64, seed: int = 1) -> Case:
    """The workload of ``setting``, drawn by ``index`` and ``seed``."""
    rng = np.random.default_rng([index, seed])
    block = int(setting["block"])
    burst = setting["arrivals"] == "burst"
    most_requests = min(max_requests, 20) if setting["pool"] == "storm" else max_requests
    count = 12 if burst else int(rng.integers(12, most_requests + 1))
    steps = np.zeros(count, int) if burst else np.cumsum(rng.integers(0, 3, count))
    heads = [rng.integers(0, vocab_size, 2 * block).tolist() for _ in range(3)]
    arrivals = []
    for number, step in enumerate(steps.tolist()):
        length = int(rng.integers(3, 22))
        prompt = rng.integers(0, vocab_size, length).tolist()
        if setting["prefix"] == "shared":
            prompt = heads[int(rng.integers(3))] + prompt[: int(rng.integers(1, 8))]
        params = _params(setting, rng, vocab_size, 17 * index + number)
        priority = int(rng.integers(3)) if setting["order"] == "priority" else 0
        arrivals.append(Arrival(step, tuple(prompt), params, priority))
    longest = max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals)  # type: ignore[arg-type]
    storm, shared = setting["pool"] == "storm", setting["prefix"] == "shared"
    most = -(-longest // block)
    # For three requests; where three may share a head, for its two blocks once.
    for_three = 3 * most - (4 if shared else 0)
    # Fewer rows than requests now and then, so that rows find new owners, and that there are hits where everybody
    # of a burst would start on the same head in the same step.
    few_rows = shared and burst and setting["chunk"].isdigit() and not storm
    options: dict[str, Any] = {
        "async_scheduling": setting["loop"] == "async",
        "block_size": block,
        "num_blocks": 1 + (for_three if storm else count * most),
        "enable_prefix_caching": shared,
        "policy": setting["order"],
        "max_num_reqs": 5 if few_rows else 16 if storm or burst else int(rng.choice([5, 8, 16])),
        "max_num_batched_tokens": 11 if setting["chunk"] == "budget" else 600,
        "long_prefill_token_threshold": int(setting["chunk"]) if setting["chunk"].isdigit() else 0,
        "max_model_len": 96,
    }
    aborts: list[tuple[int, int]] = []
    if setting["aborts"] == "yes":
        for victim in sorted(rng.choice(count, count // 4, replace=False).tolist()):
            aborts.append((int(steps[victim]) + int(rng.integers(0, 16)), victim))
    return Case(index, setting, Workload(tuple(arrivals), f"draw {index}"), tuple(sorted(aborts)), options)


def _params(setting: Setting, rng: np.random.Generator, vocab_size: int, number: int) -> SamplingParams:
    kind = setting["sampling"]
    sampled = kind in ("sampled", "seeded") or (kind == "mixed" and bool(rng.integers(2)))
    given = kind == "seeded" or (kind == "mixed" and bool(rng.integers(2)))
    storm = setting["pool"] == "storm"
    stop_ids: tuple[int, ...] = ()
    if setting["stop"] == "stop_ids":
        stop_ids = tuple(rng.choice(vocab_size, vocab_size // (40 if storm else 12), replace=False).tolist())
    made = SamplingParams(
        # A pool becomes dry by requests that grow.
        max_tokens=int(rng.integers(20, 33)) if storm else int(rng.integers(8, 20)),
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.5])) if sampled else 0.0,
        seed=int(rng.integers(-(2**63), 2**63 - 1)) if given else None,
        stop_token_ids=stop_ids,
        # One token in 17 is an end: a storm needs requests that outlive it.
        ignore_eos=setting["stop"] != "eos" or (storm and bool(rng.integers(3))),
    )
    if kind not in ALL:
        return made
    drawn = dict(sampling_draws.settings()[number % sampling_draws.COUNT])
    if kind == "all-greedy":
        drawn["temperature"] = "0"
    if setting["stop"] != "stop_ids":
        drawn["stop_ids"] = "off"
    base = {"max_tokens": made.max_tokens, "stop_token_ids": stop_ids, "ignore_eos": made.ignore_eos}
    return sampling_draws.params(drawn, rng, vocab_size, **base)


# -- for twins ---------------------------------------------------------------------------------------------------------


@cache
def twin_cases(count: int, seed: int = 0, max_requests: int = 24, sampling: str = "plain") -> tuple[Case, ...]:
    """``count`` cases for :data:`MODEL`; over 200 every pair of settings occurs. ``sampling`` ``"all"``: with every
    sampling parameter; ``"plain"``: temperature, seed and stop tokens alone.

    Raises ``ValueError`` for another word.
    """
    factors = {"plain": FACTORS, "all": SAMPLING_FACTORS}.get(sampling)
    if factors is None:
        raise ValueError(f"sampling must be 'plain' or 'all', got {sampling!r}")
    cases = enumerate(draw(count, seed, factors))
    return tuple(
        make_case(i, setting, vocab_size=MODEL.vocab_size, max_requests=max_requests, seed=seed + 1)
        for i, setting in cases
    )


def configs(
    case: Case, a: RunnerConfig, b: RunnerConfig, model: ModelConfig = MODEL
) -> tuple[EngineConfig, EngineConfig]:
    """``case`` for two runners: a on its stream and policy, b on others."""
    cache, scheduler, *_ = split_options(case.options, {})
    return (
        EngineConfig(model, cache, scheduler, dataclasses.replace(a, **case.transport)),
        EngineConfig(model, cache, scheduler, dataclasses.replace(b, **case.other_transport())),
    )


def run_twin(
    case: Case, a: RunnerConfig, b: RunnerConfig, *, model: ModelConfig = MODEL, weights: Weights | None = None
) -> TwinReport:
    """Run ``case`` on both, each on its own draw of stream, lag and policy."""
    with Twin.build(*configs(case, a, b, model), weights=weights) as twin:
        return twin.run(case.workload, aborts=case.aborts)
