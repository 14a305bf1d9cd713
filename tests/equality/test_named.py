"""The cases that have names: each once in plain sight, with the numbers that make it that case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check.workloads import transport
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload, burst
from mrv2lab.protocol import SamplingParams
from tests.equality.compare import compare_exact, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.models import MODELS, hf_model, source
from tests.slow import mostly_slow

each_model = pytest.mark.parametrize("model", mostly_slow(MODELS, 2))
STREAMS = ("deferred", "lag0", "lag1", "lag2", "threaded")


def run(
    model: str,
    workload: Workload,
    *,
    near: bool = True,
    between: Callable[[Engine], None] | None = None,
    **options: Any,
) -> Trace:
    """On a fresh engine; against Hugging Face unless ``near`` is False."""
    options = {"max_num_reqs": 16, "num_blocks": 200, "max_model_len": 96, "block_size": 8} | options
    with Engine(source(model), device="cpu", **options) as engine:
        trace = run_workload(engine, workload, between=between)
    if near:
        report = compare_near(trace, reference_logits(hf_model(model), trace))
        assert report.excused <= 1 + 0.005 * report.rows
    return trace


def mixed(count: int, *, seed: int = 0, prompt_len: tuple[int, int] = (3, 20), max_tokens: int = 16) -> Workload:
    """A burst, every second request sampled with a seed of its own."""
    rng = np.random.default_rng(seed)
    arrivals = tuple(
        Arrival(
            0,
            int(rng.integers(prompt_len[0], prompt_len[1] + 1)),
            SamplingParams(
                max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=int(rng.integers(99)), ignore_eos=True
            ),
        )
        for i in range(count)
    )
    return Workload(arrivals, "mixed", seed)


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", mostly_slow([3, 1, 16], 1))
@each_model
def test_chunked_prefill(model: str, chunk: int) -> None:
    workload = mixed(5, prompt_len=(20, 40), max_tokens=6)
    trace = run(model, workload, long_prefill_token_threshold=chunk)
    assert max(count for step in trace.steps[:2] for count in step.counts) == chunk
    assert any(sampled == () for step in trace.steps for sampled in step.sampled)


@each_model
def test_prefix_hits(model: str) -> None:
    """Three heads of 24 tokens; whoever comes later finds the head's three blocks."""
    rng = np.random.default_rng(3)
    heads = [rng.integers(0, 300, 24).tolist() for _ in range(3)]
    arrivals = tuple(
        Arrival(
            i,
            (*heads[i % 3], *rng.integers(0, 300, 1 + i % 5).tolist()),
            SamplingParams(max_tokens=8, temperature=0.7 * (i % 2), ignore_eos=True),
        )
        for i in range(12)
    )
    trace = run(model, Workload(arrivals))
    assert trace.stats.prefix_hit_tokens == 9 * 24
    cold = run(model, Workload(arrivals), enable_prefix_caching=False)
    assert cold.stats.prefix_hit_tokens == 0
    assert cold.tokens == trace.tokens


@pytest.mark.parametrize("loop", mostly_slow(["async", "sync"], 1))
@each_model
def test_preemption_storm(model: str, loop: str) -> None:
    """A pool for 3 of 12 requests: 3 x 5 blocks of 8."""
    workload = mixed(12, prompt_len=(8, 16), max_tokens=24)
    options = {"async_scheduling": loop == "async", "enable_prefix_caching": False}
    trace = run(model, workload, num_blocks=1 + 3 * 5, **options)
    assert trace.stats.num_preemptions >= 8
    assert run(model, workload, near=False, **options).tokens == trace.tokens


@each_model
def test_64_random_arrivals(model: str) -> None:
    """Into 12 rows, so that every row has several owners."""
    rng = np.random.default_rng(5)
    steps = np.sort(rng.integers(0, 60, 64))
    arrivals = tuple(
        Arrival(
            step,
            int(rng.integers(1, 24)),
            SamplingParams(max_tokens=int(rng.integers(1, 10)), temperature=float(rng.choice([0.0, 0.6, 1.2]))),
        )
        for step in steps.tolist()
    )
    trace = run(model, Workload(arrivals, seed=5), max_num_reqs=12)
    assert len(trace.outputs) == 64


# -- the exact class ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
@each_model
def test_streams_lags_and_policies_are_exact(model: str, policy: str) -> None:
    workload = mixed(6, max_tokens=8)
    traces = [run(model, workload, near=False, **transport(stream, policy)) for stream in STREAMS]
    for trace in traces[1:]:
        compare_exact(traces[0], trace)
    compare_exact(traces[0], run(model, workload, near=False))


@pytest.mark.parametrize("stream", STREAMS)
@each_model
def test_sync_and_async_are_exact_on_one_burst(model: str, stream: str) -> None:
    workload = mixed(6, max_tokens=12)
    options = transport(stream, "uva_pool")
    one = run(model, workload, async_scheduling=True, **options)
    compare_exact(one, run(model, workload, near=False, async_scheduling=False, **options))


# -- named bugs of the field -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["sync", "async"])
@each_model
def test_the_resume_boundary_is_prefill_len(model: str, loop: str) -> None:
    """mrv2.md 4.2 #12: prompt 3, 5 outputs, preempted, resumed in chunks of 4: the first chunk samples nothing."""
    workload = burst(1, prompt_len=3, max_tokens=12, seed=4)
    options = {"async_scheduling": loop == "async", "max_num_batched_tokens": 4, "enable_prefix_caching": False}
    whole = run(model, workload, **options)
    done: list[int] = []

    def preempt(engine: Engine) -> None:
        if len(engine.output("w0").token_ids) == 5 and not done:
            engine.scheduler.preempt("w0")
            done.append(engine.num_steps)

    trace = run(model, workload, between=preempt, **options)
    assert trace.stats.num_preemptions == 1
    assert trace.tokens == whole.tokens
    known = 3 + 5 + (loop == "async")  # a token was in flight, and still counts
    resumed = [step for step in trace.steps if step.counts[0] > 1][1:]  # the first is the prompt
    assert [step.counts[0] for step in resumed] == [4, 4]
    assert [len(step.sampled[0]) for step in resumed] == ([0, 1] if known == 8 else [0, 0])


@each_model
def test_same_seed_same_text_in_any_batch(model: str) -> None:
    """mrv2.md 4.4 #43: {seed 7, none, seed 7} with one prompt; rows 0 and 2 agree, and with a run alone."""
    prompt = (5, 6, 7, 8)

    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)

    def texts(*seeds: int | None, **options: Any) -> list[list[int]]:
        workload = Workload(tuple(Arrival(0, prompt, params(seed)) for seed in seeds))
        return list(run(model, workload, **options).tokens.values())

    together = texts(7, None, 7)
    assert together[0] == together[2] != together[1]
    assert texts(7) == [together[0]]
    assert texts(None, None, 3, 7, num_blocks=1 + 3 * 3)[3] == together[0]
    assert len(set(map(tuple, texts(None, None, None)))) == 3


@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_a_recycled_row_is_as_good_as_new(policy: str) -> None:
    """PB2: rows are never cleared, so a new owner's bits must not depend on the old one's."""
    second = mixed(4, seed=2, max_tokens=12)
    options = {"max_num_reqs": 4, "num_blocks": 40, "block_size": 8, "max_model_len": 96, "transfer": policy}
    with Engine(source("llama"), device="cpu", **options) as engine:
        first = [
            engine.submit(
                list(range(9 * i, 9 * i + 30)), SamplingParams(max_tokens=60, temperature=2.0, seed=i, ignore_eos=True)
            )
            for i in range(4)
        ]
        for _ in range(20):
            engine.step()
        for request_id in first:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()
        used = run_workload(engine, second)
    with Engine(source("llama"), device="cpu", **options) as engine:
        compare_exact(run_workload(engine, second), used)


@each_model
def test_a_pool_full_of_nan_changes_no_bit(model: str) -> None:
    """mrv2.md 4.3 #27: what was never written is never read, partial last blocks and wasted rows included."""
    workload = mixed(6, max_tokens=10)
    options = {"max_num_reqs": 6, "num_blocks": 60, "block_size": 8, "max_model_len": 96}
    traces = []
    for fill in (float("nan"), 0.0):
        with Engine(source(model), device="cpu", **options) as engine:
            for pair in engine.worker.kv_caches:
                for cache in pair:
                    engine.rt.raw(cache).fill_(fill)
            traces.append(run_workload(engine, workload))
    assert all(bool(torch.isfinite(step.logits).all()) for step in traces[0].steps)
    compare_exact(*traces)
