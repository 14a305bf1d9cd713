"""Custom processors in V1: what they get, who fails, and how long they are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runner_v1.sampling import SamplingBench


def push(token: int) -> Any:
    def fn(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits[token] += 100
        return logits

    return fn


def test_a_function_sees_its_outputs_and_its_row() -> None:
    seen = []

    def fn(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append((ids.dtype, ids.tolist(), logits.dtype, logits.tolist()))
        return logits + 1

    bench = SamplingBench(3)
    bench.add()
    bench.add([9, 9], [2, 1], processors=(fn, push(0)), logit_bias={2: 1.0})
    made, tokens = bench.step([[0.0, 1, 0], [3.0, 4, 5]])
    assert seen == [(torch.int32, [2, 1], torch.float32, [3, 4, 6])]
    assert made.tolist() == [[0, 1, 0], [104, 5, 7]] and tokens == [1, 0]


def fail(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    logits.fill_(7.0)
    raise RuntimeError("no")


WRONG = {
    "raises": (fail, "RuntimeError: no"),
    "shape": (lambda ids, x: x[:2], "TypeError: it returned torch.float32[2] on cpu, not torch.float32[3] on cpu"),
    "dtype": (lambda ids, x: x.double(), "TypeError: it returned torch.float64[3] on cpu, not torch.float32[3] on cpu"),
    "nothing": (lambda ids, x: None, "TypeError: it returned NoneType, not a tensor float32[3]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_fails_fails_its_row_alone(name: str) -> None:
    fn, reason = WRONG[name]
    bench = SamplingBench(3)
    bench.add(processors=(push(2),))
    bench.add(processors=(push(1), fn))
    bench.add()
    custom = bench.sampler.stages.custom
    for errors in ({1: f"custom processor {fn.__qualname__} failed: {reason}"}, {}):
        made, tokens = bench.step([[0.0, 1, 2]] * 3)
        assert made[1].tolist() == [0, 1, 2], "its logits stay as they were"
        assert tokens == [2, 2, 2] and made[0, 2] == 102
        launch = bench.sampler.stages.custom_launch
        assert launch is not None
        # Not called again in the step that is in flight by then.
        assert custom.take_errors(launch) == errors
        assert custom.take_errors(launch) == {}


def test_discarded_rows_call_nobody() -> None:
    bench = SamplingBench(3)
    calls: list[int] = []

    def note(row: int, logits: torch.Tensor) -> torch.Tensor:
        calls.append(row)
        return logits

    bench.add(processors=(lambda ids, x: note(0, x),))
    bench.add(processors=(lambda ids, x: note(1, x),))
    bench.step([[0.0, 1, 2]] * 2, discarded=(0,))
    bench.step([[0.0, 1, 2]] * 2, discarded=(0, 1))
    assert calls == [1]
    assert bench.sampler.stages.custom_launch is None


def test_a_nan_that_a_function_makes_counts_as_minus_infinity() -> None:
    bench = SamplingBench(3)
    bench.add(temperature=1.0, min_p=0.01, processors=(lambda ids, x: x.log(),))
    assert bench.step([[-1.0, 0.0, 3.0]])[1] == [2]


def test_functions_are_kept_until_the_calls_that_are_queued() -> None:
    bench = SamplingBench(3)
    state = bench.add(processors=(push(0),))
    bench.set_logits([[0.0, 1, 2]])
    bench.refresh()
    custom = bench.sampler.stages.custom
    bench.sampler.sample(bench.sampled[:1], bench.logits[:1], bench.batch)
    custom.forget(state.processors)
    assert len(custom._functions) == 1
    assert bench.rt.read(bench.sampled)[0].tolist() == [0]
    assert not custom._functions
