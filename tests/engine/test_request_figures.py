"""What a step brings beside tokens: log-probabilities, NaN counts, failures; from a runner's output to the user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import Logprobs, ModelRunnerOutput, SamplingParams
from tests.engine.small import sampled, small_engine
from tests.engine.worker_stub import WorkerStub

each_loop = pytest.mark.parametrize("loop", ["sync", "async"])
K = 2


def engine_of(loop: str, edit: Any, **options: Any) -> Engine:
    engine = small_engine(async_scheduling=loop == "async", **options)
    WorkerStub(engine, edit)
    return engine


def rows_for(tokens: list[int], width: int = 1 + K) -> Logprobs:
    """A row a token: its value is -token/100, its rank token + 1, its alternatives 1 and 2."""
    ids = np.tile(np.arange(width, dtype=np.int32), (len(tokens), 1))
    ids[:, 0] = tokens
    values = np.tile(-np.arange(width, dtype=np.float32), (len(tokens), 1))
    values[:, 0] = np.array(tokens, np.float32) / -100
    return Logprobs(ids, values, np.array(tokens, np.int32) + 1)


def with_logprobs(output: ModelRunnerOutput) -> ModelRunnerOutput:
    return replace(output, logprobs=rows_for([token for tokens in output.sampled_token_ids for token in tokens]))


def asked(max_tokens: int = 5, seed: int = 1, **more: Any) -> SamplingParams:
    return replace(sampled(max_tokens, seed), **more)


# -- log-probabilities of outputs --------------------------------------------------------------------------------------


@each_loop
def test_each_token_has_its_own_row(loop: str) -> None:
    """Batches of several requests in the runner's own order, chunks of prompts in between that sample nothing."""
    with engine_of(loop, with_logprobs, max_num_batched_tokens=8, long_prefill_token_threshold=3) as engine:
        prompts = [[1, 2], list(range(8, 20)), [3, 4, 5, 6], [9] * 5]
        wants = [asked(seed=1, logprobs=K), asked(seed=2, logprobs=0), asked(seed=3), asked(7, 4, logprobs=K)]
        outputs = engine.generate(prompts, wants)
        for output, want in zip(outputs, wants, strict=True):
            if want.logprobs is None:
                assert output.logprobs is None
                continue
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == want.max_tokens
            for token, row in zip(output.token_ids, output.logprobs, strict=True):
                assert row is not None and next(iter(row)) == token
                assert row[token] == (pytest.approx(-token / 100), token + 1)


@each_loop
def test_rows_are_trimmed_where_a_stop_string_cuts(loop: str) -> None:
    with Engine("tiny", device="cpu", num_blocks=32, async_scheduling=loop == "async") as engine:
        WorkerStub(engine, with_logprobs)
        text = engine.generate("Once upon a time", SamplingParams(16))[0].text
        stop = text[8:11]
        output = engine.generate("Once upon a time", SamplingParams(16, stop=(stop,), logprobs=K))[0]
        assert output.stop_reason == stop and output.logprobs is not None
        assert [next(iter(row or {})) for row in output.logprobs] == output.token_ids


def test_accepted_drafts_behind_a_stop_have_no_row() -> None:
    """Rows of a request with several tokens a step: those behind the stop token are left out, the next one's found."""
    from mrv2lab.engine.output_processor import OutputProcessor
    from mrv2lab.engine.outputs import RequestOutput
    from mrv2lab.engine.records import RequestUpdate

    processor = OutputProcessor(8)
    for name in "ab":
        processor.add(RequestOutput(name, None, [1]), SamplingParams(logprobs=K), None, 0)
    produced = with_logprobs(ModelRunnerOutput(0, ["b", "gone", "a"], [[10, 11, 12], [13], [14]]))
    updates = [RequestUpdate("a", [14], None), RequestUpdate("b", [10, 11], "stop")]
    a, b = processor.step(updates, produced, 1)
    assert a.logprobs is not None and b.logprobs is not None
    assert [next(iter(row or {})) for row in a.logprobs] == [14]
    assert [next(iter(row or {})) for row in b.logprobs] == [10, 11]
    assert b.stop_reason == 11


def test_a_runner_that_leaves_rows_out_is_told() -> None:
    def short(output: ModelRunnerOutput) -> ModelRunnerOutput:
        return replace(output, logprobs=rows_for([1]))

    def without(output: ModelRunnerOutput) -> ModelRunnerOutput:
        return replace(output, logprobs=None)

    with engine_of("sync", without) as engine, pytest.raises(RuntimeError, match="left out the logprobs"):
        engine.generate([1, 2], asked(logprobs=1))
    with engine_of("sync", short) as engine, pytest.raises(RuntimeError, match="2 tokens, but 1 rows of logprobs"):
        engine.generate([[1], [2]], asked(logprobs=1))


# -- of prompts --------------------------------------------------------------------------------------------------------


def with_prompt_logprobs(prompts: dict[str, list[int]]) -> Any:
    """Rows of a prompt with the step that samples its first token, once."""
    owed = dict(prompts)

    def edit(output: ModelRunnerOutput) -> ModelRunnerOutput:
        done = [r for r, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True) if tokens and r in owed]
        return replace(output, prompt_logprobs={r: rows_for(owed.pop(r)[1:]) for r in done})

    return edit


@each_loop
def test_prompt_rows_come_once_and_whole(loop: str) -> None:
    prompts = {"a": [5, 6, 8, 9, 10, 11], "b": [20]}
    with engine_of(loop, with_prompt_logprobs(prompts), max_num_batched_tokens=4) as engine:
        for name, prompt in prompts.items():
            engine.submit(prompt, asked(prompt_logprobs=1), request_id=name)
        assert engine.output("a").prompt_logprobs is None
        while engine.has_work():
            engine.step()
        a, b = (engine.output(name).prompt_logprobs for name in prompts)
        assert a is not None and b is not None
        assert a[0] is None and [next(iter(row or {})) for row in a[1:]] == [6, 8, 9, 10, 11]
        assert list(b) == [None]


def test_a_prompt_with_rows_missing_is_told() -> None:
    with (
        engine_of("sync", lambda output: replace(output, prompt_logprobs={})) as engine,
        pytest.raises(RuntimeError, match=r"gave 0 prompt logprobs of 'r0', whose prompt has 3 tokens"),
    ):
        engine.generate([1, 2, 3], asked(prompt_logprobs=1))


@each_loop
def test_such_a_prompt_takes_no_prefix_hit_but_may_give_one(loop: str) -> None:
    prompt = list(range(10, 24))
    edit = with_prompt_logprobs({"a": prompt, "c": prompt})
    with engine_of(loop, edit) as engine:
        hits: dict[str, int] = {}
        for name, more in (("a", {"prompt_logprobs": 1}), ("b", {}), ("c", {"prompt_logprobs": 1})):
            engine.submit(prompt, asked(**more), request_id=name)
            request = engine.scheduler.requests[name]
            while engine.has_work():
                engine.step()
            hits[name] = request.num_cached_tokens
        assert hits == {"a": 0, "b": 12, "c": 0}
        assert len({tuple(engine.output(name).token_ids) for name in hits}) == 1


@each_loop
def test_a_preempted_prompt_is_computed_again_from_its_start(loop: str) -> None:
    """In the middle of its prompt: no hit on its own blocks. Behind its first token: hits as everybody."""
    prompt = list(range(10, 24))
    edit = with_prompt_logprobs({"a": prompt})
    with engine_of(loop, edit, max_num_batched_tokens=8) as engine:
        engine.submit(prompt, asked(8, prompt_logprobs=1), request_id="a")
        request = engine.scheduler.requests["a"]
        engine.step()
        engine.scheduler.preempt("a")
        while not request.num_output_tokens:
            engine.step()
        assert request.num_cached_tokens == 0
        engine.scheduler.preempt("a")
        while engine.has_work():
            engine.step()
        assert request.num_cached_tokens == 12
        rows = engine.output("a").prompt_logprobs
        assert rows is not None and len(rows) == 14


# -- failures and NaNs -------------------------------------------------------------------------------------------------


@each_loop
def test_a_failed_request_ends_alone(loop: str) -> None:
    with engine_of(loop, lambda output: output) as engine:
        alone = engine.generate([7, 8], sampled(8, seed=2))[0].token_ids

    def fail(output: ModelRunnerOutput) -> ModelRunnerOutput:
        if output.step != 3 or "bad" not in output.req_ids:
            return output
        return replace(output, errors={"bad": "ValueError: no such thing"})

    with engine_of(loop, fail) as engine:
        engine.submit([1, 2, 3], sampled(20), request_id="bad")
        engine.submit([7, 8], sampled(8, seed=2), request_id="good")
        told = []
        while engine.has_work():
            told += [output.request_id for output in engine.step() if output.finish_reason == "error"]
        bad, good = engine.output("bad"), engine.output("good")
        assert told == ["bad"]
        assert (bad.finish_reason, bad.error, len(bad.token_ids)) == ("error", "ValueError: no such thing", 3)
        assert (good.token_ids, good.finish_reason, good.error) == (alone, "length", "")
        assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
        assert sorted(engine.worker.runner.req_states.free_indices) == [0, 1, 2, 3]
        assert engine.scheduler.stats.wasted_rows == (1 if loop == "async" else 0)


def test_a_request_that_fails_in_its_prompt() -> None:
    """In a chunk that samples nothing."""
    edit = lambda output: replace(output, errors={"r0": "boom"} if output.step == 0 else {})  # noqa: E731
    with engine_of("sync", edit, max_num_batched_tokens=4) as engine:
        output = engine.generate([list(range(8, 18))], sampled())[0]
        assert (output.finish_reason, output.error, output.token_ids) == ("error", "boom", [])


def test_a_failure_of_an_earlier_life_is_nobodys() -> None:
    """Aborted, its id used again, and then the step in flight says that it failed."""
    edit = lambda output: replace(output, errors={"x": "boom"} if output.step == 2 else {})  # noqa: E731
    with engine_of("async", edit) as engine:
        engine.submit([1, 2, 3], sampled(20), request_id="x")
        for _ in range(3):
            engine.step()
        engine.abort("x")
        engine.submit([1, 2, 3], sampled(4), request_id="x")
        while engine.has_work():
            engine.step()
        assert (engine.output("x").finish_reason, engine.output("x").error) == ("length", "")


def test_nans_are_counted() -> None:
    edit = lambda output: replace(output, num_nans={"r1": 5} if output.step in (1, 2) else {})  # noqa: E731
    with engine_of("async", edit) as engine:
        outputs = engine.generate([[1], [2]], sampled(6))
        assert [output.num_nans for output in outputs] == [0, 10]
