"""Models with sliding-window layers against transformers, every block that nobody holds poisoned after every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check import workloads
from mrv2lab.check.invariants import check_invariants
from mrv2lab.check.workloads import Case
from mrv2lab.config import KVGroup, ModelConfig
from mrv2lab.engine.block_pool import FreeList
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.kv_groups import GroupReach
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.model.load import load_model
from mrv2lab.protocol import SamplingParams
from tests.equality.compare import compare_exact, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.settings import settings
from tests.slow import mostly_slow

SLIDES, FULL = "sliding_attention", "full_attention"
_SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "eos_token_ids": tuple(range(5, 331, 17)),
}
MODELS: dict[str, ModelConfig] = {
    # Two groups of two layers that share two tensors.
    "mixed": ModelConfig(
        **_SHAPE,
        name="mixed",
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        num_hidden_layers=4,
        sliding_window=11,
        layer_types=(SLIDES, FULL, SLIDES, FULL),  # type: ignore[arg-type]
    ),
    # One group, every layer slides; a window of a block.
    "all": ModelConfig(**_SHAPE, name="all", architecture="MistralForCausalLM", num_hidden_layers=2, sliding_window=8),
    # Unequal groups; a window shorter than a block.
    "mostly": ModelConfig(
        **_SHAPE,
        name="mostly",
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        num_hidden_layers=3,
        sliding_window=3,
        layer_types=(SLIDES, SLIDES, FULL),  # type: ignore[arg-type]
    ),
}


@cache
def theirs(name: str) -> Any:
    """transformers' model with our weights; its config is written out here, not read from our converter."""
    import transformers

    config = MODELS[name]
    own: dict[str, Any] = {"sliding_window": config.sliding_window}
    family = "Mistral"
    if config.architecture == "Qwen3ForCausalLM":
        family = "Qwen3"
        own |= {"use_sliding_window": True, "layer_types": list(config.layer_types), "attention_bias": False}
    shape = {key: value for key, value in _SHAPE.items() if key != "eos_token_ids"}
    hf = getattr(transformers, f"{family}Config")(
        **shape,
        **own,
        num_hidden_layers=config.num_hidden_layers,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(hf).float()
    model.load_state_dict({key: weight.float() for key, weight in load_model(config).weights.items()}, strict=True)
    return model.eval()


def poison_free_blocks(engine: Engine, check: bool) -> Callable[[Engine], None]:
    """Called after every step: NaN, behind everything queued so far, into each block that no table holds and no lookup
    can find, the null block included: into what was let go, and what a block held before it is handed out again.
    ``check``: the master invariants too, which synchronises."""

    def poison(ids: tuple[int, ...], *caches: torch.Tensor) -> None:
        for one in caches:
            one[list(ids)] = float("nan")

    engine.rt.register("test.poison", poison)
    caches = [tensor for pair in engine.worker.kv_caches for tensor in pair]

    def between(engine: Engine) -> None:
        if check and engine.config.runner.runner == "mrv2":
            check_invariants(engine)
        pool = engine.scheduler.kv.pool
        ids = tuple(block.block_id for block in pool.blocks if not block.ref_cnt and block.key is None)
        engine.rt.run("test.poison", ids, *caches, writes=tuple(caches))

    return between


def run(name: str, workload: Workload, *, near: bool = True, check: bool = False, **options: Any) -> Trace:
    """On a fresh engine; against transformers unless ``near`` is False."""
    options = {"max_num_reqs": 16, "num_blocks": 200, "max_model_len": 96, "block_size": 8} | options
    aborts = options.pop("aborts", ())
    with Engine(MODELS[name], device="cpu", **options) as engine:
        trace = run_workload(engine, workload, aborts=aborts, between=poison_free_blocks(engine, check))
    if near:
        compare_near(trace, reference_logits(theirs(name), trace))
    return trace


def long_ones(count: int = 5, seed: int = 0) -> Workload:
    """Prompts of several windows; every second request sampled."""
    rng = np.random.default_rng(seed)
    arrivals = tuple(
        Arrival(i, int(rng.integers(1, 50)), SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), ignore_eos=True))
        for i in range(count)
    )
    return Workload(arrivals, "long", seed)


each_model = pytest.mark.parametrize("name", mostly_slow(MODELS, 1))


@pytest.fixture(autouse=True)
def _freed_blocks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool hands a block without content out again at once, often to the same request, slot upon slot behind what
    it reads: too early is then no error. Last in line, such a block is poisoned before anyone gets it."""
    monkeypatch.setattr(FreeList, "appendleft", FreeList.append)


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@each_model
def test_against_transformers(name: str, caching: bool) -> None:
    run(name, long_ones(), check=True, enable_prefix_caching=caching, long_prefill_token_threshold=13)


@each_model
def test_prefix_hits(name: str) -> None:
    """Who comes later hits, with blocks of the sliding group only where its window reaches."""
    rng = np.random.default_rng(3)
    heads = [rng.integers(0, 300, 40).tolist() for _ in range(2)]
    arrivals = tuple(
        Arrival(2 * i, (*heads[i % 2], *rng.integers(0, 300, 1 + i % 5).tolist()), SamplingParams(max_tokens=8))
        for i in range(6)
    )
    trace = run(name, Workload(arrivals))
    assert trace.stats.prefix_hit_tokens == 4 * 40
    assert run(name, Workload(arrivals), near=False, enable_prefix_caching=False).tokens == trace.tokens


@each_model
def test_preemptions(name: str) -> None:
    """A pool in which two of six fit."""
    workload = long_ones(6, seed=1)
    blocks = {"mixed": 22, "all": 11, "mostly": 20}[name]
    trace = run(name, workload, num_blocks=blocks, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert trace.stats.num_preemptions > 0
    assert run(name, workload, near=False).tokens == trace.tokens


def test_all_sliding_goes_on_in_a_small_pool() -> None:
    """90 tokens in blocks of 8, and never more than 4 of them held: 16 tokens a step and a window of 8."""
    workload = Workload((Arrival(0, 40, SamplingParams(max_tokens=50, ignore_eos=True)),))
    trace = run("all", workload, num_blocks=6, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert len(trace.outputs["w0"].token_ids) == 50
    assert trace.stats.num_preemptions == 0


def case_of(index: int) -> Case:
    return workloads.make_case(index, settings()[index], vocab_size=331, max_requests=16)


@pytest.mark.parametrize("index", mostly_slow(range(20), 1))
@each_model
def test_random_workloads(name: str, index: int) -> None:
    """Streams, policies, loops, chunks, pools, aborts, as drawn for the other models."""
    case = case_of(index)
    trace = run(name, case.workload, aborts=case.aborts, **{"dtype": "float32"} | case.options | case.transport)
    other = case.options | case.other_transport()
    compare_exact(trace, run(name, case.workload, near=False, aborts=case.aborts, **{"dtype": "float32"} | other))


@each_model
def test_v1_is_exact(name: str) -> None:
    """Both runners, batches in the same order."""
    options = {"max_num_batched_tokens": 16}
    one = run(name, long_ones(), **options)
    other = run(name, long_ones(), near=False, runner="v1", reorder="mrv2", **options)
    assert one.batches == other.batches
    greedy = [req_id for req_id, params in one.params.items() if params.temperature == 0]
    assert greedy
    for req_id in greedy:
        assert one.tokens[req_id] == other.tokens[req_id]
        assert torch.equal(one.logits[req_id], other.logits[req_id])


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "a_block_too_many": (
        GroupReach,
        "first_needed",
        lambda self, at: (
            0 if self.window is None else max(at - self.window + 1 + self.block_size, 0) // self.block_size
        ),
    ),
    "one_group_for_all": (ModelConfig, "kv_groups", property(lambda self: (_full_group(self),))),
}


def _full_group(config: ModelConfig) -> KVGroup:
    return KVGroup(None, tuple(range(config.num_hidden_layers)))


@pytest.mark.parametrize("mutant", MUTANTS)
@each_model
def test_mutants_are_caught(name: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        run(name, long_ones(3), enable_prefix_caching=False)
