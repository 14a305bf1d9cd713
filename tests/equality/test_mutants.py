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
import mrv2lab.runner.model_runner as model_runner
import mrv2lab.runner.prepare as prepare
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.model.load import LoadedModel, load_model
from mrv2lab.protocol import RequestData, SamplingParams
from mrv2lab.runtime.base import DeviceError
from mrv2lab.sample.sampler import Sampler
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.state.block_tables import BlockTables
from mrv2lab.state.request_state import RequestState
from tests.equality.compare import compare_exact, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.models import CONFIGS, hf_model

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
    except (AssertionError, DeviceError, IndexError):
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


def test_a_pool_of_one_slot_is_caught() -> None:
    assert caught(pool_depth=1)
    run(pool_depth=1, async_scheduling=False)


def test_a_lost_publish_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(UvaBackedTensor, "publish", lambda self: None)
    assert caught()


# -- state -------------------------------------------------------------------------------------------------------------


def after_add(change: Callable[[RequestState, int, RequestData], None]) -> Callable[..., int]:
    add = RequestState.add_request

    def mutant(self: RequestState, request: RequestData) -> int:
        row = add(self, request)
        change(self, row, request)
        return row

    return mutant


def test_a_resume_boundary_at_prompt_len_is_caught(monkeypatch: Patch) -> None:
    def boundary(state: RequestState, row: int, request: RequestData) -> None:
        state.prefill_len.np[row] = request.prompt_len

    monkeypatch.setattr(RequestState, "add_request", after_add(boundary))
    assert caught()


@pytest.mark.parametrize("table", ["num_computed_tokens", "all_token_ids"])
def test_a_table_that_is_not_overwritten_is_caught(monkeypatch: Patch, table: str) -> None:
    def forget(state: RequestState, row: int, request: RequestData) -> None:
        getattr(state, table).pending.pop()

    monkeypatch.setattr(RequestState, "add_request", after_add(forget))
    assert caught()


@pytest.mark.parametrize("table", ["seeds", "temperature"])
def test_a_forgotten_sampling_row_is_caught(monkeypatch: Patch, table: str) -> None:
    add = SamplingState.add_request

    def forget(self: SamplingState, row: int, request: RequestData) -> None:
        kept = getattr(self, table).np[row].copy()
        add(self, row, request)
        getattr(self, table).np[row] = kept

    monkeypatch.setattr(SamplingState, "add_request", forget)
    assert caught()


def test_a_former_owners_first_block_is_caught(monkeypatch: Patch) -> None:
    append = BlockTables.append_block_ids

    def mutant(self: BlockTables, row: int, ids: Any, *, overwrite: bool) -> None:
        append(self, row, ids, overwrite=overwrite)
        if overwrite:
            whole = self.row_tables[0].pending.pop()
            self.row_tables[0].stage_write(row, 1, whole.values[1:])

    monkeypatch.setattr(BlockTables, "append_block_ids", mutant)
    assert caught()


def test_a_wrong_batch_order_is_caught(monkeypatch: Patch) -> None:
    """Rows of the batch turned round behind the scheduler's back."""
    gather = model_runner.gather_host_batch

    def mutant(*args: Any) -> Any:
        host = gather(*args)
        return dataclasses.replace(host, rows=host.rows[::-1].copy())

    monkeypatch.setattr(model_runner, "gather_host_batch", mutant)
    assert caught()


def test_last_tokens_that_are_not_combined_are_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(prepare.combine_tokens, "spec", lambda *args: None)
    assert caught()


def test_noise_of_another_position_is_caught(monkeypatch: Patch) -> None:
    """Position of the sampled token instead of the input token's."""
    sample = Sampler.sample

    def mutant(self: Sampler, out: Any, logits: Any, rows: Any, mapping: Any, positions: Any, indices: Any) -> None:
        sample(self, out, logits, rows, mapping, indices, indices)

    monkeypatch.setattr(Sampler, "sample", mutant)
    assert caught()


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
