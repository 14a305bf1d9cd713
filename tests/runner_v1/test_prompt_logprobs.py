"""Prompt logprobs in V1: whole, once, and equal however the prompt was cut or preempted; and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import Logprobs, SamplingParams
from mrv2lab.runner_v1.prompt_logprobs import PromptLogprobs
from tests.engine.small import VOCAB
from tests.runner_v1.small import greedy, v1
from tests.runner_v1.watched import watched
from tests.sample import oracle

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 3, 2]


def asking(k: int = 3, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=k, **fields)


def reference() -> list[np.ndarray[Any, Any]]:
    """Raw logits behind each proper prefix of the prompt, each from a request of its own."""
    rows = []
    for length in range(1, len(PROMPT)):
        with watched() as watch:
            watch.engine.generate([PROMPT[:length]], greedy(1))
            rows.append(watch.steps()[0].logits[0].numpy())
    return rows


@pytest.fixture(scope="module", name="rows")
def _rows() -> list[np.ndarray[Any, Any]]:
    return reference()


def results(engine_options: dict[str, Any], k: int = 3, preempt: tuple[int, ...] = ()) -> list[Logprobs]:
    with watched(**engine_options) as watch:
        engine = watch.engine
        engine.submit([5, 4, 3, 2], greedy(12))
        engine.submit(PROMPT, asking(k), request_id="p")
        engine.submit([7], asking(0), request_id="one")
        for step in range(40):
            if step in preempt:
                engine.scheduler.preempt("p")
            engine.step()
        assert len(engine.requests["p"].token_ids) == 4
        empty = [output.prompt_logprobs["one"] for output in watch.outputs if "one" in output.prompt_logprobs]
        assert [one.token_ids.shape for one in empty] == [(0, 1)]
        return [output.prompt_logprobs["p"] for output in watch.outputs if "p" in output.prompt_logprobs]


WAYS: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"async_scheduling": False},
    "chunks of 3": {"long_prefill_token_threshold": 3},
    "chunks of 1": {"long_prefill_token_threshold": 1, "async_scheduling": False},
    "threaded": {"stream": "threaded", "transfer": "barrier", "long_prefill_token_threshold": 4},
    "lag 0": {"lag": 0},
}


def check(made: Logprobs, rows: list[np.ndarray[Any, Any]], k: int) -> None:
    assert made.token_ids.shape == (len(PROMPT) - 1, 1 + k)
    for i, (x, token) in enumerate(zip(rows, PROMPT[1:], strict=True)):
        ids, values = oracle.top_logprobs(oracle.clean(x), token, k)
        assert made.token_ids[i].tolist() == ids
        np.testing.assert_allclose(made.values[i], values, rtol=1e-3, atol=1e-3)
        assert made.ranks[i] == oracle.rank(oracle.clean(x), token)


@pytest.mark.parametrize("way", WAYS)
def test_prompt_logprobs_equal_those_of_the_prefixes(way: str, rows: list[np.ndarray[Any, Any]]) -> None:
    (made,) = results(WAYS[way])
    check(made, rows, 3)


@pytest.mark.parametrize("step", [2, 3, 4, 6])
@pytest.mark.parametrize("loop", [True, False])
def test_preemption_delivers_them_once(loop: bool, step: int, rows: list[np.ndarray[Any, Any]]) -> None:
    """In mid-prompt they begin anew; behind the prompt they were delivered already."""
    options = {"long_prefill_token_threshold": 3, "async_scheduling": loop, "num_blocks": 60}
    (made,) = results(options, preempt=(step,))
    check(made, rows, 3)


def test_the_whole_vocabulary(rows: list[np.ndarray[Any, Any]]) -> None:
    (made,) = results({"max_logprobs": -1}, k=-1)
    check(made, rows, VOCAB)


def test_a_completed_prompt_costs_a_wait_for_the_whole_device() -> None:
    """reference/v1.md 2.10, 11."""
    log = EventLog()
    with v1(observer=log, max_num_batched_tokens=4) as engine:
        engine.submit(PROMPT, asking())
        waits = []
        for _ in range(6):
            log.clear()
            engine.step()
            waits.append({mark.name for mark in log.waits()} >= {"main", "copy"})
    assert waits == [False, False, True, False, False, False]


def test_more_rows_than_the_model_computes_at_once_are_gathered_whole() -> None:
    """Four logits rows a call here, so a chunk of eleven takes three; the log-softmax is one, over all of them."""
    log = EventLog()
    with v1(observer=log) as engine:
        engine.submit(PROMPT, asking())
        engine.step()
    names = [mark.name for mark in log.marks if mark.kind == "run"]
    assert names.count("v1.prompt_logits") == 3 and names.count("v1.logprobs") == 1
    (whole,) = {mark.nbytes for mark in log.marks if mark.name == "v1.logprobs"}
    assert whole > 10 * VOCAB * 4


def test_a_target_shifted_by_one_is_found(monkeypatch: pytest.MonkeyPatch, rows: list[np.ndarray[Any, Any]]) -> None:
    original = PromptLogprobs._chunk

    def shifted(self: Any, progress: Any, start: int, first: int, *rest: Any) -> None:
        original(self, progress, start, max(0, first - 1), *rest)

    monkeypatch.setattr(PromptLogprobs, "_chunk", shifted)
    with pytest.raises(AssertionError):
        test_prompt_logprobs_equal_those_of_the_prefixes("chunks of 3", rows)


def test_reset_forgets_what_is_half_done() -> None:
    def run(engine: Engine) -> list[int]:
        return engine.generate([PROMPT], asking())[0].token_ids

    with v1(long_prefill_token_threshold=3) as engine:
        want = run(engine)
        engine.submit(PROMPT, asking())
        engine.step()
        engine.reset()
        assert run(engine) == want
