"""What is checked at submit, because it needs the vocabulary, the tokenizer or the model; and custom processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.submit import Intake
from mrv2lab.model.load import load_model
from mrv2lab.model.tokenizer import Tokenizer
from mrv2lab.protocol import SamplingParams, SchedulerOutput, StructuredOutput
from tests.engine.small import MODEL, VOCAB, sampled, small_engine

MANY = tuple(range(60))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stop id": ({"stop_token_ids": (VOCAB,)}, r"stop_token_ids: token id 61 is outside the vocabulary of 61 \(ids 0"),
    "allowed id": ({"allowed_token_ids": (3, 99)}, "allowed_token_ids: token id 99 is outside the vocabulary"),
    "biased id": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id 61 is outside the vocabulary"),
    "bad word id": ({"bad_words": ((3, 77),)}, "bad_words: token id 77 is outside the vocabulary"),
    "logprobs": ({"logprobs": 21}, "logprobs must be at most max_logprobs = 20, got 21; make the engine with a higher"),
    "all logprobs": ({"logprobs": -1}, r"logprobs must be at most max_logprobs = 20, got -1 \(all 61\)"),
    "prompt logprobs": ({"prompt_logprobs": 30}, "prompt_logprobs must be at most max_logprobs = 20, got 30"),
    "stop string": ({"stop": ("a",)}, r"stop strings need a tokenizer, which this model lacks; .*\('a',\)"),
    "bad word": ({"bad_words": ("a",)}, "bad_words given as text need a tokenizer, which this model lacks; .*'a'"),
    "grammar": ({"structured_output": StructuredOutput(regex="a")}, "structured_output needs a tokenizer"),
    "all allowed are bad": (
        {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,), (5, 6))},
        r"allowed_token_ids \[3, 4\] contradicts bad_words: no token is left",
    ),
    "all allowed are held back": (
        {"allowed_token_ids": (7,), "min_tokens": 2},  # 7 ends the text
        r"allowed_token_ids \[7\] contradicts min_tokens 2: no token is left",
    ),
    "bad, or held back": (
        {"allowed_token_ids": (3, 7, 8), "min_tokens": 2, "stop_token_ids": (8,), "bad_words": ((3,),)},
        r"allowed_token_ids \[3, 7, 8\] contradicts bad_words and min_tokens 2: no token is left",
    ),
    "the whole vocabulary is bad": (
        {"bad_words": tuple((token,) for token in range(VOCAB))},
        "bad_words forbid the whole vocabulary: no token is left",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nobody_is_harmed(case: str) -> None:
    more, words = REFUSED[case]
    with small_engine() as engine:
        alone = engine.generate([1, 2], sampled(6, seed=None))[0].token_ids
    with small_engine() as engine:
        name = engine.submit([1, 2], sampled(6, seed=None))
        engine.step()
        with pytest.raises(ValueError, match=words):
            engine.submit([1], SamplingParams(max_tokens=8, **more))
        while engine.has_work():
            engine.step()
        assert engine.output(name).token_ids == alone
        assert list(engine.requests) == [name]


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_token_ids": (3, 4)},  # no end of text among them: the length ends it
        {"allowed_token_ids": (7,)},
        {"allowed_token_ids": (7,), "min_tokens": 1, "ignore_eos": True},  # then 7 is a token like others
        {"bad_words": ((3,), (4, 4)), "allowed_token_ids": (3, 4)},
        {"logprobs": 20},
    ],
)
def test_accepted(more: dict[str, Any]) -> None:
    with small_engine() as engine:
        engine.submit([1], SamplingParams(max_tokens=8, **more))


@pytest.mark.parametrize(
    ("cap", "asked", "words"),
    [
        (-1, -1, None),
        (-1, VOCAB, None),
        (-1, VOCAB + 1, "logprobs must be at most the vocabulary's 61, or -1 for all; got 62"),
        (100, -1, None),
        (100, 62, "must be at most the vocabulary's 61"),
        (0, 0, None),
        (0, 1, "max_logprobs = 0, got 1"),
    ],
)
def test_max_logprobs(cap: int, asked: int, words: str | None) -> None:
    with small_engine(max_logprobs=cap) as engine:
        for name in ("logprobs", "prompt_logprobs"):
            params = SamplingParams(max_tokens=8, **{name: asked})  # type: ignore[arg-type]
            if words is None:
                engine.submit([1], params)
            else:
                with pytest.raises(ValueError, match=words):
                    engine.submit([1], params)


@pytest.mark.parametrize("cap", [-2, 1.5, True, None])
def test_a_bad_cap(cap: Any) -> None:
    with pytest.raises(ValueError, match="max_logprobs must be an integer >= 0, or -1"):
        small_engine(max_logprobs=cap)


def test_more_stop_ids_than_min_tokens_can_hold_back() -> None:
    with Engine("tiny", device="cpu", num_blocks=16) as engine:
        stops = tuple(range(1, 129))
        with pytest.raises(ValueError, match=r"hold back 128 stop tokens at most, EOS included; got 129"):
            engine.submit("Once", SamplingParams(stop_token_ids=stops, min_tokens=1))
        engine.submit("Once", SamplingParams(stop_token_ids=stops))
        engine.submit("Once", SamplingParams(stop_token_ids=stops, min_tokens=1, ignore_eos=True))


# -- bad words ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = load_model("tiny").tokenizer
    assert made is not None
    return made


def sent(engine: Engine, params: SamplingParams) -> SamplingParams:
    """The parameters as the runner gets them."""
    engine.submit("Once", params)
    engine.step()
    assert isinstance(engine.core.last_schedule, SchedulerOutput)
    return engine.core.last_schedule.new[0].sampling


def test_a_bad_word_is_banned_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    with Engine("tiny", device="cpu", num_blocks=16) as engine:
        found = sent(engine, SamplingParams(bad_words=("owl", " owl", (5, 6), " ")))
        assert found.bad_words == (ids("owl"), ids(" owl"), (5, 6), ids(" "))
        assert ids("owl")[0] != ids(" owl")[0]


def test_bad_words_that_become_too_many() -> None:
    with Engine("tiny", device="cpu", num_blocks=16) as engine:
        words = tuple(f"word{number}" for number in range(65))
        with pytest.raises(ValueError, match=r"128 token sequences at most, got 130; a text makes two, with and"):
            engine.submit("Once", SamplingParams(bad_words=words))
        with pytest.raises(ValueError, match=r"bad_words may have 1024 tokens together, got \d{4}"):
            engine.submit("Once", SamplingParams(bad_words=("x" * 3000,)))


# -- what the runner is told -------------------------------------------------------------------------------------------


def test_the_runner_is_told_every_stop_id() -> None:
    def told(**more: Any) -> tuple[int, ...]:
        with small_engine() as engine:
            engine.submit([1], SamplingParams(max_tokens=8, **more))
            engine.step()
            assert engine.core.last_schedule is not None
            return engine.core.last_schedule.new[0].stop_token_ids

    assert told() == (7,)
    assert told(stop_token_ids=(9, 3)) == (3, 7, 9)
    assert told(stop_token_ids=(9,), ignore_eos=True) == (9,)


class Adder:
    """A processor for requests that name a token to favour."""

    def make(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        if "favour" not in params.extra_args:
            return None
        token = int(params.extra_args["favour"])

        def add(output_token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            logits[token] += 1
            return logits

        return add


def test_processors_are_made_at_submit_and_kept_through_preemption() -> None:
    with small_engine(logits_processors=[Adder(), Adder()]) as engine:
        engine.submit([1, 2], SamplingParams(max_tokens=20, ignore_eos=True, extra_args={"favour": 3}), request_id="a")
        engine.submit([1, 2], SamplingParams(max_tokens=20, ignore_eos=True), request_id="b")
        engine.step()
        assert engine.core.last_schedule is not None
        new = {data.req_id: data for data in engine.core.last_schedule.new}
        assert len(new["a"].processors) == 2 and new["b"].processors == ()
        engine.step()
        engine.scheduler.preempt("a")
        for _ in range(6):
            engine.step()
            if resumed := engine.core.last_schedule.resumed:
                assert resumed[0].processors == new["a"].processors
                return
        raise AssertionError("it was not resumed")


def test_a_processor_that_refuses() -> None:
    with small_engine(logits_processors=[Adder()]) as engine:
        with pytest.raises(ValueError, match="logits processor Adder refused the request: ValueError: invalid literal"):
            engine.submit([1], SamplingParams(extra_args={"favour": "red"}))
        assert len(engine.generate([1], sampled(3))[0].token_ids) == 3


def test_a_processor_that_makes_no_function() -> None:
    class Wrong:
        def make(self, params: SamplingParams) -> Any:
            return 5

    with (
        small_engine(logits_processors=[Wrong()]) as engine,
        pytest.raises(ValueError, match=r"processor Wrong: make\(\) must return a function or None, got 5"),
    ):
        engine.submit([1])


@pytest.mark.parametrize(
    ("processors", "words"),
    [
        ([lambda ids, logits: logits], r"an object with a method make\(params\), got <function"),
        ([Adder], r"an object with a method make\(params\), got <class"),
        (Adder(), "logits_processors must be a list of logits processors, got"),
    ],
)
def test_what_is_no_processor(processors: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Intake(MODEL, 20, processors)
