"""Two hundred workloads, each with one seeded draw from the settings; every pair of settings occurs at least once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.protocol import SamplingParams
from tests.equality.harness import Trace, run_workload
from tests.equality.models import MODELS, source

FACTORS: dict[str, tuple[str, ...]] = {
    "model": MODELS,
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
Setting = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

COUNT = 200
QUICK = 20
"""So many of them run in `make test`: the first, which cover the most pairs."""


def pairs(setting: Setting) -> set[Pair]:
    """The pairs of settings that a draw covers."""
    return set(itertools.combinations(setting.items(), 2))


def all_pairs() -> set[Pair]:
    """Every pair of values of two different factors."""
    made: set[Pair] = set()
    for one, other in itertools.combinations(FACTORS, 2):
        made |= {((one, a), (other, b)) for a in FACTORS[one] for b in FACTORS[other]}
    return made


@cache
def settings(count: int = COUNT, seed: int = 2) -> tuple[Setting, ...]:
    """``count`` draws: of 40 random candidates each time the one that covers the most pairs not covered yet."""
    rng = np.random.default_rng(seed)
    uncovered, made = all_pairs(), []
    for _ in range(count):
        candidates = [{name: str(rng.choice(values)) for name, values in FACTORS.items()} for _ in range(40)]
        if uncovered:  # one of them is bound to cover something
            (one, a), (other, b) = sorted(uncovered)[int(rng.integers(len(uncovered)))]
            candidates[0] |= {one: a, other: b}
        best = max(candidates, key=lambda setting: len(pairs(setting) & uncovered))
        uncovered -= pairs(best)
        made.append(best)
    return tuple(made)


def label(index: int) -> str:
    """A test's id: what was drawn."""
    return f"{index:03}-" + "-".join(settings()[index].values())


@dataclass(frozen=True)
class Case:
    """A draw made concrete: what to run, and on what."""

    index: int
    setting: Setting
    workload: Workload
    aborts: tuple[tuple[int, int], ...]
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


def make_case(index: int, *, vocab_size: int, max_requests: int = 64) -> Case:
    """The workload of draw ``index``, seeded by it."""
    setting = settings()[index]
    rng = np.random.default_rng([index, 1])
    block = int(setting["block"])
    burst = setting["arrivals"] == "burst"
    most_requests = min(max_requests, 20) if setting["pool"] == "storm" else max_requests
    count = 12 if burst else int(rng.integers(12, most_requests + 1))
    steps = np.zeros(count, int) if burst else np.cumsum(rng.integers(0, 3, count))
    heads = [rng.integers(0, vocab_size, 2 * block).tolist() for _ in range(3)]
    arrivals = []
    for step in steps.tolist():
        length = int(rng.integers(3, 22))
        prompt = rng.integers(0, vocab_size, length).tolist()
        if setting["prefix"] == "shared":
            prompt = heads[int(rng.integers(3))] + prompt[: int(rng.integers(1, 8))]
        params = _params(setting, rng, vocab_size)
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


def _params(setting: Setting, rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    kind = setting["sampling"]
    sampled = kind in ("sampled", "seeded") or (kind == "mixed" and bool(rng.integers(2)))
    given = kind == "seeded" or (kind == "mixed" and bool(rng.integers(2)))
    storm = setting["pool"] == "storm"
    stop_ids: tuple[int, ...] = ()
    if setting["stop"] == "stop_ids":
        stop_ids = tuple(rng.choice(vocab_size, vocab_size // (40 if storm else 12), replace=False).tolist())
    return SamplingParams(
        # A pool becomes dry by requests that grow.
        max_tokens=int(rng.integers(20, 33)) if storm else int(rng.integers(8, 20)),
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.5])) if sampled else 0.0,
        seed=int(rng.integers(-(2**63), 2**63 - 1)) if given else None,
        stop_token_ids=stop_ids,
        # One token in 17 is an end: a storm needs requests that outlive it.
        ignore_eos=setting["stop"] != "eos" or (storm and bool(rng.integers(3))),
    )


def run_case(case: Case, device: str = "cpu", **options: Any) -> Trace:
    """Run it on a fresh engine; ``options`` go before the case's own."""
    options = {"dtype": "float32"} | case.options | case.transport | options
    with Engine(source(case.setting["model"]), device=device, **options) as engine:
        return run_workload(engine, case.workload, aborts=case.aborts)
