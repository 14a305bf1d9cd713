"""Requests with every sampling parameter, whole lives long: every token of MRV2, its log-probabilities and those of the
prompt against the float64 oracle, on raw logits that were captured where the device's work runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check import workloads
from mrv2lab.check.workloads import SAMPLING_FACTORS, Case
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.teach import mutants
from mrv2lab.teach.mutants import Mutant
from tests.equality.compare import compare_exact
from tests.equality.harness import Trace
from tests.equality.models import CONFIGS, hf_model
from tests.equality.settings import run_case
from tests.sample import oracle
from tests.slow import mostly_slow

MODELS = ("qwen3", "llama-tied")
COUNT = 60
QUICK = 1
DRAWS = workloads.draw(COUNT, 7, SAMPLING_FACTORS)
CASES = [pytest.param(i, marks=[] if i < QUICK else [pytest.mark.slow]) for i in range(COUNT)]


def case(index: int, **setting: str) -> Case:
    drawn = DRAWS[index] | {"model": MODELS[index % 2]} | setting
    return workloads.make_case(index, drawn, vocab_size=331, max_requests=14)


def run(made: Case, **options: Any) -> Trace:
    return run_case(made, **{"max_logprobs": -1} | options)


def oracle_row(trace: Trace, req_id: str, index: int, eos: tuple[int, ...]) -> oracle.Row:
    """Whose row is behind output ``index``."""
    params, output = trace.params[req_id], trace.outputs[req_id]
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    return oracle.Row(params, output.prompt_token_ids, output.token_ids[:index], (), sorted(stop))


def check_tokens(trace: Trace, eos: tuple[int, ...]) -> tuple[int, int]:
    """Each token is the oracle's choice, unless it is by less than float32 resolves, or a cut's edge lies between them;
    how many there were, and how many of these exceptions."""
    count = excused = 0
    for req_id, logits in trace.logits.items():
        output = trace.outputs[req_id]
        for index, token in enumerate(output.token_ids):
            row = oracle_row(trace, req_id, index, eos)
            p, position, raw = row.params, row.position, logits[index].numpy()
            want = oracle.process(raw, row)
            count += 1
            best = oracle.choose(want, p.temperature, trace.seeds[req_id], position)
            if token == best:
                continue
            where = f"output {index} of {req_id}: {token}, the oracle chooses {best}; {p}"
            noise = oracle.noise_spec(trace.seeds[req_id], position, len(want)).astype(np.float64)
            scores = want if p.temperature == 0 else want + noise
            near = scores[token] >= scores[best] - 1e-5 * max(1.0, abs(scores[best]))
            edge = oracle.excused(oracle.process(raw, row, "top_k"), p.top_p)
            edge |= oracle.excused(oracle.process(raw, row, "temperature"), 1.0, p.min_p)
            assert near or edge[token] or edge[best], where
            excused += 1
    return count, excused


def check_logprobs(trace: Trace) -> int:
    """Of outputs, exactly as asked for; how many."""
    count = 0
    for req_id, logits in trace.logits.items():
        output, wanted = trace.outputs[req_id], trace.params[req_id].logprobs
        if wanted is None:
            assert output.logprobs is None
            continue
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        for index, token in enumerate(output.token_ids):
            compare_row(output.logprobs, index, logits[index].double().numpy(), token, wanted, 0.0)
            count += 1
    return count


def compare_row(rows: Any, index: int, logits: Any, token: int, wanted: int, off: float) -> None:
    """One entry against the oracle's of ``logits``, which are ``off`` by so much."""
    found = rows[index]
    ids, values = oracle.top_logprobs(logits, token, wanted)
    assert next(iter(found)) == token
    assert len(found) == len(set(ids))
    got = [entry.logprob for entry in found.values()]
    if off == 0:
        want = dict(zip(ids, values, strict=True))
        assert set(found) == set(want)
        np.testing.assert_allclose(got, [want[one] for one in found], rtol=1e-5, atol=1e-5)
        assert found[token].rank == oracle.rank(logits, token)
    else:
        assert abs(found[token].logprob - values[0]) <= 2 * off + 1e-5
        np.testing.assert_allclose(sorted(got)[1:], sorted(values[len(ids) - len(got) :])[1:], atol=2 * off + 1e-4)
        low, high = (int(np.sum(logits >= logits[token] + by)) for by in (2 * off + 1e-6, -2 * off - 1e-6))
        assert low <= found[token].rank <= high


@torch.inference_mode()
def check_prompts(trace: Trace, model: Any) -> int:
    """Of prompts, near Hugging Face's; how many tokens."""
    count = 0
    for req_id, output in trace.outputs.items():
        wanted = trace.params[req_id].prompt_logprobs
        if wanted is None or not output.token_ids:
            assert wanted is not None or output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None, req_id
        count += check_prompt(output, wanted, model)
    return count


def check_prompt(output: RequestOutput, wanted: int, model: Any) -> int:
    rows, prompt = output.prompt_logprobs, output.prompt_token_ids
    assert rows is not None and len(rows) == len(prompt) and rows[0] is None
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].double().numpy()
    for index in range(1, len(prompt)):
        want = logits[index - 1]
        compare_row(rows, index, want, prompt[index], wanted, 1e-3 * float(np.abs(want).max()))
    return len(prompt) - 1


@pytest.mark.parametrize("index", CASES)
def test_mrv2(index: int) -> None:
    made = case(index)
    trace = run(made)
    tokens, excused = check_tokens(trace, CONFIGS[MODELS[index % 2]].eos_token_ids)
    assert tokens > 60 and excused <= max(1, tokens // 200)
    assert check_logprobs(trace) > 30
    assert check_prompts(trace, hf_model(MODELS[index % 2])) > 30
    compare_exact(trace, run(made, **made.other_transport()))


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 12))])
def test_v1(index: int) -> None:
    """Its greedy requests, and everybody's logprobs."""
    made = case(index, sampling="all-greedy")
    trace = run(made, runner="v1")
    tokens, excused = check_tokens(trace, CONFIGS[MODELS[index % 2]].eos_token_ids)
    assert tokens > 60 and excused <= max(1, tokens // 200)
    assert check_logprobs(trace) > 30
    assert check_prompts(trace, hf_model(MODELS[index % 2])) > 30


def test_both_loops_make_the_same_tokens() -> None:
    """Where both form the same batches; whatever the loop knows of outputs on the host."""
    same = {"arrivals": "burst", "stop": "length", "pool": "roomy", "aborts": "no", "chunk": "none", "prefix": "off"}
    for sampling in workloads.ALL:
        made = case(0, sampling=sampling, **same)
        traces = [run(made, async_scheduling=on) for on in (True, False)]
        compare_exact(*traces)
        for req_id, output in traces[0].outputs.items():
            other = traces[1].outputs[req_id]
            for one, two in ((output.logprobs, other.logprobs), (output.prompt_logprobs, other.prompt_logprobs)):
                assert (one is None) == (two is None)
                assert one is None or list(one) == list(two)  # type: ignore[arg-type]


# -- the checks themselves ---------------------------------------------------------------------------------------------

SHOWN_BY_TEXT = [one for one in mutants.SAMPLING if one.runner == "mrv2" and "twin" in one.caught_by]


def oracle_finds(index: int) -> bool:
    trace = run(case(index, sampling="all", stop="eos", chunk="3", arrivals="random", prefix="off"))
    try:
        _, excused = check_tokens(trace, CONFIGS[MODELS[index % 2]].eos_token_ids)
        check_logprobs(trace)
        check_prompts(trace, hf_model(MODELS[index % 2]))
    except AssertionError:
        return True
    return excused > 2


def test_the_oracle_is_quiet_without_a_mutant() -> None:
    assert not any(oracle_finds(index) for index in range(2))


@pytest.mark.parametrize("mutant", mostly_slow(SHOWN_BY_TEXT, 3), ids=lambda one: one.name)
def test_what_a_twin_finds_is_caught_here_too(mutant: Mutant) -> None:
    """By the oracle alone, with no second runner."""
    with mutant():
        assert any(oracle_finds(index) for index in range(24)), mutant.breaks


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_on_a_gpu(index: int) -> None:
    made = case(index)
    trace = run(made, device="cuda")
    tokens, excused = check_tokens(trace, CONFIGS[MODELS[index % 2]].eos_token_ids)
    assert tokens > 60 and excused <= max(1, tokens // 200)
    assert check_logprobs(trace) > 30
    assert check_prompts(trace, hf_model(MODELS[index % 2])) > 30
    compare_exact(trace, run(made, device="cuda", **made.other_transport()))
