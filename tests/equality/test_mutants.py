"""The harness's own test: deliberate bugs in the engine, each of which its comparisons must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mrv2lab.engine.engine as engine_module
import mrv2lab.engine.request as request_module
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.model.load import LoadedModel, load_model
from mrv2lab.protocol import SamplingParams
from mrv2lab.teach import mutants
from mrv2lab.teach.mutants import Mutant
from tests.equality.compare import compare_exact, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.models import CONFIGS, hf_model
from tests.slow import mostly_slow

Patch = pytest.MonkeyPatch


def everything_at_once() -> Workload:
    """20 arrivals: chunks, preemptions, prefix hits, recycled rows, greedy and sampled."""
    rng = np.random.default_rng(11)
    heads = [rng.integers(0, 331, 16).tolist() for _ in range(2)]
    arrivals = []
    for i in range(20):
        prompt = rng.integers(0, 331, int(rng.integers(3, 20))).tolist()
        if i % 3 == 0:
            prompt = heads[i % 2] + prompt[:3]
        params = SamplingParams(max_tokens=20, temperature=0.9 * (i % 2), ignore_eos=True)
        arrivals.append(Arrival(i // 3, tuple(prompt), params))
    return Workload(tuple(arrivals))


OPTIONS: dict[str, Any] = {
    "max_num_reqs": 5,
    "num_blocks": 1 + 15,
    "block_size": 8,
    "max_model_len": 96,
    "long_prefill_token_threshold": 7,
    "max_num_batched_tokens": 40,
}


def run(model: str = "llama-tied", **options: Any) -> Trace:
    with Engine(CONFIGS[model], device="cpu", **OPTIONS | options) as engine:
        trace = run_workload(engine, everything_at_once(), max_steps=600)
    assert trace.stats.num_preemptions and trace.stats.prefix_hit_tokens
    compare_near(trace, reference_logits(hf_model(model), trace)).check()
    return trace


def caught(**options: Any) -> bool:
    """Whether the comparison finds something. An engine that breaks down is no silent bug, but was found too."""
    try:
        run(**options)
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False


# -- transport ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_right_policies_pass(policy: str) -> None:
    run(transfer=policy)


@pytest.mark.parametrize("lag", [None, 1])
def test_unsafe_is_caught(lag: int | None) -> None:
    assert caught(transfer="unsafe", lag=lag)


def test_unsafe_is_right_while_the_device_keeps_up() -> None:
    run(transfer="unsafe", lag=0)
    run(transfer="unsafe", async_scheduling=False)


def test_a_pool_of_one_slot_is_right_while_nobody_is_ahead() -> None:
    assert caught(pool_depth=1)
    run(pool_depth=1, async_scheduling=False)


# -- state -------------------------------------------------------------------------------------------------------------

SILENT = [one for one in mutants.ALL if one.runner == "mrv2" and "twin" in one.caught_by]


@pytest.mark.parametrize("mutant", mostly_slow(SILENT, 6), ids=lambda one: one.name)
def test_what_a_twin_finds_is_caught_here_too(mutant: Mutant) -> None:
    with mutant():
        assert caught(**mutant.needs), mutant.breaks


def test_a_prefix_hit_on_other_tokens_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(request_module, "hash_block", lambda parent, tokens: bytes(31) + bytes([parent[-1] + 1]))
    assert caught()


# -- model -------------------------------------------------------------------------------------------------------------


def change_weights(monkeypatch: Patch, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    def load(*args: Any, **kwargs: Any) -> LoadedModel:
        made = load_model(*args, **kwargs)
        change(made.weights)
        return made

    monkeypatch.setattr(engine_module, "load_model", load)


@pytest.mark.parametrize("part", ["q", "k"])
def test_swapped_heads_are_caught(monkeypatch: Patch, part: str) -> None:
    def swap(weights: dict[str, torch.Tensor]) -> None:
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        weights[name] = weights[name].unflatten(0, (-1, 16)).flip(0).flatten(0, 1)

    change_weights(monkeypatch, swap)
    assert caught()


@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_a_forgotten_head_norm_is_caught(monkeypatch: Patch, part: str) -> None:
    def forget(weights: dict[str, torch.Tensor]) -> None:
        weights[f"model.layers.0.self_attn.{part}.weight"].fill_(1.0)

    change_weights(monkeypatch, forget)
    assert caught(model="qwen3")


def test_one_weight_one_percent_off_is_caught(monkeypatch: Patch) -> None:
    change_weights(monkeypatch, lambda weights: weights["model.norm.weight"][3:4].mul_(1.01))
    assert caught()


# -- the comparisons themselves ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> tuple[Trace, dict[str, torch.Tensor]]:
    trace = run()
    return trace, reference_logits(hf_model("llama-tied"), trace)


def test_near_sees_two_thousandths(right: tuple[Trace, dict[str, torch.Tensor]]) -> None:
    trace, reference = right
    shift = 2e-3 * reference["w3"][5].abs().max()
    reference = reference | {"w3": reference["w3"].clone()}
    reference["w3"][5, 17] += shift
    with pytest.raises(AssertionError, match=r"w3: logits of outputs \[5\] of 20"):
        compare_near(trace, reference)


def test_near_sees_nan(right: tuple[Trace, dict[str, torch.Tensor]]) -> None:
    trace, reference = right
    with pytest.raises(AssertionError, match="w3"):
        compare_near(trace, reference | {"w3": torch.full_like(reference["w3"], float("nan"))})


@pytest.mark.parametrize("req_id", ["w2", "w3"])
def test_near_sees_one_wrong_token(right: tuple[Trace, dict[str, torch.Tensor]], req_id: str) -> None:
    """Of a greedy and of a sampled request."""
    trace, reference = right
    output = trace.outputs[req_id]
    wrong = dataclasses.replace(output, token_ids=[*output.token_ids[:-1], (output.token_ids[-1] + 1) % 331])
    with pytest.raises(AssertionError, match="but the reference's is"):
        compare_near(_with(trace, outputs=trace.outputs | {req_id: wrong}), reference)


def test_near_counts_what_it_excuses(right: tuple[Trace, dict[str, torch.Tensor]]) -> None:
    """Two equal best logits in the reference: nobody can say, so it is counted, and too many fail."""
    trace, reference = right
    tied = reference["w2"].clone()
    top = tied.topk(2).indices
    tied[:, :] = tied.scatter(1, top[:, 1:], tied.gather(1, top[:, :1]))
    report = compare_near(_with(trace, logits=trace.logits | {"w2": tied}), reference | {"w2": tied})
    assert report.excused == 20
    with pytest.raises(AssertionError, match="20 of 400 excused"):
        report.check()


def test_exact_sees_one_bit(right: tuple[Trace, dict[str, torch.Tensor]]) -> None:
    trace, _ = right
    step = trace.steps[30]
    logits = step.logits.clone()
    logits[0, 0] = torch.nextafter(logits[0, 0], torch.tensor(10.0))
    steps = [*trace.steps[:30], dataclasses.replace(step, logits=logits), *trace.steps[31:]]
    with pytest.raises(AssertionError, match="step 30: logits differ"):
        compare_exact(trace, _with(trace, steps=steps))


def test_exact_wants_the_same_batches(right: tuple[Trace, dict[str, torch.Tensor]]) -> None:
    trace, _ = right
    with pytest.raises(AssertionError, match="batch"):
        compare_exact(trace, run(long_prefill_token_threshold=6))


def _with(trace: Trace, **changes: Any) -> Trace:
    """A copy that is not checked again."""
    made = object.__new__(Trace)
    made.__dict__.update(trace.__dict__ | changes)
    return made
