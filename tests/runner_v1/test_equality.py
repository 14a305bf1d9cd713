"""V1 against MRV2 in the exact class: the same schedule, batch order, tokens and logits, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mrv2lab.check.workloads import draw
from mrv2lab.protocol import SamplingParams
from tests.engine.small import VOCAB, small_engine
from tests.equality.compare import compare_exact
from tests.runner_v1.runs import MANY_ROWS, SAME_BATCHES, Idle, greedy_case, run
from tests.runner_v1.test_sampling_params import some_params
from tests.slow import mostly_slow

QUICK = 2


@cache
def draws() -> int:
    return len(draw(200, 11))


@pytest.mark.parametrize("index", [pytest.param(i, marks=[] if i < QUICK else [pytest.mark.slow]) for i in range(100)])
def test_v1_equals_mrv2(index: int) -> None:
    """Each on its own stream, lag and policy, over arrivals, aborts, preemption, chunks, prefix hits and early ends."""
    case = greedy_case(index)
    mrv2 = run(case)
    v1 = run(case, **SAME_BATCHES, **case.other_transport())
    compare_exact(mrv2, v1)
    assert mrv2.batches == v1.batches


@pytest.mark.parametrize("index", mostly_slow(range(4), 1))
@pytest.mark.parametrize("loop", mostly_slow(["async", "sync"], 1))
def test_requests_that_sit_out_steps(loop: str, index: int) -> None:
    """MRV2's rows stay untouched; V1's are evicted and come back, with tokens that the host knows by then."""
    case = greedy_case(index, loop=loop, aborts="no", pool="roomy")
    idle = Idle(index), Idle(index)
    mrv2 = run(case, idle[0], **MANY_ROWS)
    v1 = run(case, idle[1], **SAME_BATCHES, **MANY_ROWS, **case.other_transport())
    compare_exact(mrv2, v1)
    assert mrv2.batches == v1.batches
    assert idle[0].returns == idle[1].returns > 20


# -- sampling parameters -----------------------------------------------------------------------------------------------

BOTH: dict[str, dict[str, Any]] = {
    "async": {"num_blocks": 12},
    "sync": {"num_blocks": 12, "async_scheduling": False},
    "chunks": {"num_blocks": 16, "long_prefill_token_threshold": 2},
    "processed": {"num_blocks": 30, "logprobs_mode": "processed_logprobs"},
}


class Lift:
    """A processor: the token that is as old as the output is long becomes more likely."""

    def make(self, params: SamplingParams) -> Any:
        return self.call if params.min_tokens else None

    def call(self, ids: Any, logits: Any) -> Any:
        logits[len(ids)] += 1.5
        return logits


@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
@pytest.mark.parametrize("way", BOTH)
def test_greedy_tokens_with_every_parameter_equal_mrv2s(way: str, seed: int) -> None:
    """Only the means differ: the same schedule, batch order, parameters; tokens, logprobs, ranks and ends."""
    made = []
    for runner in ({"runner": "v1", "reorder": "mrv2"}, {"runner": "mrv2"}):
        rng = np.random.default_rng(seed)
        with small_engine(**runner, **BOTH[way], logits_processors=[Lift()]) as engine:
            for _ in range(14):
                params = replace(some_params(rng), temperature=0.0, prompt_logprobs=2 if rng.random() < 0.3 else None)
                engine.submit(rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist(), params)
            while engine.has_work():
                engine.step()
            made.append(list(engine.requests.values()))
    for v1, mrv2 in zip(*made, strict=True):
        assert (v1.token_ids, v1.finish_reason) == (mrv2.token_ids, mrv2.finish_reason), v1
        for mine, theirs in ((v1.logprobs, mrv2.logprobs), (v1.prompt_logprobs, mrv2.prompt_logprobs)):
            assert (mine is None) == (theirs is None)
            for one, other in zip(mine or (), theirs or (), strict=True):
                assert (one is None) == (other is None)
                for token in one or ():
                    assert one[token].rank == other[token].rank
                    assert one[token].logprob == pytest.approx(other[token].logprob, rel=1e-5, abs=1e-5)
                assert list(one or ()) == list(other or ())
