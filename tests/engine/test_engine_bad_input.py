"""Bad input: a clear error at the boundary, and the other requests go on to the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine, UnknownRequest
from mrv2lab.protocol import SamplingParams
from tests.engine.small import VOCAB, sampled, small_engine

BAD: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "empty prompt": (lambda e: e.submit([]), "the prompt is empty; it needs at least one token"),
    "too long": (
        lambda e: e.submit([1] * 40, sampled(9)),
        "prompt of 40 . max_tokens 9 = 49 exceeds max_model_len 48; shorten the prompt, lower max_tokens or raise",
    ),
    "token id too large": (
        lambda e: e.submit([1, VOCAB]),
        r"token id 61 is outside the vocabulary of 61 \(ids 0..60\)",
    ),
    "token id beyond int64": (lambda e: e.submit([2**70]), f"token id {2**70} is outside the vocabulary"),
    "token id negative": (lambda e: e.submit([-1, 3]), "token id -1 is outside the vocabulary"),
    "token id no integer": (lambda e: e.submit([1.5]), "sequence of integer token ids, got 1.5 in it"),  # type: ignore[list-item]
    "token id a truth value": (lambda e: e.submit([True]), "got True in it"),
    "prompt a number": (lambda e: e.submit(5), "a prompt is text or a sequence of integer token ids, got 5"),  # type: ignore[arg-type]
    "prompt of bytes": (lambda e: e.submit(b"abc"), "got b'abc'"),
    "text without a tokenizer": (lambda e: e.submit("hello"), "no tokenizer: give the prompt as token ids"),
    "stop id outside": (
        lambda e: e.submit([1], SamplingParams(stop_token_ids=(99,))),
        "token id 99 is outside the vocabulary",
    ),
    "temperature negative": (
        lambda e: e.submit([1], SamplingParams(temperature=-0.5)),
        "temperature must be >= 0 and finite, as float32, got -0.5",
    ),
    "temperature nan": (
        lambda e: e.submit([1], SamplingParams(temperature=float("nan"))),
        "temperature must be >= 0 and finite, as float32, got nan",
    ),
    "temperature infinite": (
        lambda e: e.submit([1], SamplingParams(temperature=float("inf"))),
        "temperature must be >= 0 and finite, as float32, got inf",
    ),
    "max_tokens 0": (
        lambda e: e.submit([1], SamplingParams(max_tokens=0)),
        "max_tokens must be an integer >= 1, got 0",
    ),
    "max_tokens negative": (lambda e: e.submit([1], SamplingParams(max_tokens=-3)), "max_tokens .* got -3"),
    "max_tokens nan": (
        lambda e: e.submit([1], SamplingParams(max_tokens=float("nan"))),  # type: ignore[arg-type]
        "max_tokens must be an integer >= 1, got nan",
    ),
    "temperature beyond float": (
        lambda e: e.submit([1], SamplingParams(temperature=10**400)),
        "temperature must be >= 0 and finite, as float32, got 1000",
    ),
    "temperature beyond float32": (
        lambda e: e.submit([1], SamplingParams(temperature=1e39)),
        "temperature must be >= 0 and finite, as float32, got 1e.39",
    ),
    "params no params": (
        lambda e: e.submit([1], {"max_tokens": 3}),  # type: ignore[arg-type]
        "params must be SamplingParams or None, got {'max_tokens': 3}",
    ),
    "stop ids a number": (
        lambda e: e.submit([1], SamplingParams(stop_token_ids=5)),  # type: ignore[arg-type]
        "stop_token_ids must be a sequence of token ids, got 5",
    ),
    "prompts a number": (lambda e: e.generate(5, sampled()), "sequence of integer token ids, got 5"),  # type: ignore[arg-type]
    "prompts of bytes": (lambda e: e.generate(b"\1\2", sampled()), "sequence of integer token ids, got b"),
    "stream without a tokenizer": (lambda e: next(e.stream([1], sampled())), "no tokenizer, so no text comes"),
    "seed too large": (lambda e: e.submit([1], SamplingParams(seed=2**63)), "seed must be None or a 64-bit integer"),
    "stop id negative": (lambda e: e.submit([1], SamplingParams(stop_token_ids=(-1,))), "ids >= 0, got -1"),
    "duplicate id": (lambda e: e.submit([1], sampled(), request_id="a"), "request id 'a' is in use; give another one"),
    "id no text": (lambda e: e.submit([1], sampled(), request_id="a\ud800"), r"request id 'a\\ud800' holds half of a"),
    "id no string": (lambda e: e.submit([1], sampled(), request_id=5), "a request id is a string, got 5"),  # type: ignore[arg-type]
    "priority no number": (
        lambda e: e.submit([1], sampled(), priority=None),  # type: ignore[arg-type]
        r"priority must be an integer \(lower goes first\), got None",
    ),
    "never fits": (
        lambda e: e.submit([1] * 20, sampled(20)),
        "may need 39 KV slots, the pool has 32; lower max_tokens or raise CacheConfig.num_blocks",
    ),
    "one bad prompt of many": (
        lambda e: e.generate([[1, 2], [3], [VOCAB + 5]], sampled()),
        "token id 66 is outside the vocabulary",
    ),
    "one prompt of many no prompt": (lambda e: e.generate([[1, 2], 3], sampled()), "integer token ids, got 3"),  # type: ignore[list-item]
}


def start(engine: Engine) -> None:
    """Two requests in the middle of their decoding, one of them with a seed that the engine draws."""
    engine.submit([1, 2, 3], sampled(12, seed=4), request_id="a")
    engine.submit([4, 5], sampled(12, seed=None), request_id="b")
    for _ in range(4):
        engine.step()


def finish(engine: Engine) -> list[list[int]]:
    """Those two to the end, and a third one behind them, whose seed the engine draws too."""
    engine.submit([6], sampled(6, seed=None), request_id="c")
    while engine.has_work():
        engine.step()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    assert sorted(engine.worker.runner.req_states.free_indices) == [0, 1, 2, 3]
    return [engine.output(name).token_ids for name in "abc"]


@cache
def undisturbed() -> list[list[int]]:
    with small_engine(num_blocks=9) as engine:
        start(engine)
        return finish(engine)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_harms_nobody(case: str) -> None:
    call, words = BAD[case]
    expected = undisturbed()
    with small_engine(num_blocks=9) as engine:
        start(engine)
        with pytest.raises(ValueError, match=words):
            call(engine)
        if case.startswith("one "):  # requests that were accepted before the bad one drew their seeds
            assert finish(engine)[:2] == expected[:2]
        else:
            assert finish(engine) == expected


@pytest.mark.parametrize("call", ["abort", "output"])
def test_unknown_request(call: str) -> None:
    with small_engine() as engine:
        start(engine)
        with pytest.raises(UnknownRequest, match="'nobody'") as caught:
            getattr(engine, call)("nobody")
        assert not str(caught.value).startswith('"'), "a sentence, not its repr"
        finish(engine)
        if call == "abort":
            with pytest.raises(UnknownRequest, match=r"cannot abort 'a': it finished already \(length\)"):
                engine.abort("a")


def test_numpy_numbers_are_welcome() -> None:
    with small_engine() as engine:
        name = engine.submit([1, 2], SamplingParams(4, np.float32(0.5)), priority=np.int64(1))  # type: ignore[arg-type]
        engine.abort(name)
        assert (
            engine.generate(np.array([1, 2, 3]), sampled())[0].token_ids  # type: ignore[arg-type]
            == engine.generate([1, 2, 3], sampled())[0].token_ids
        )


def test_stop_ids_may_come_from_any_iterable() -> None:
    """A generator would be empty by the time that a request looks for its stop ids."""
    assert SamplingParams(stop_token_ids=(token for token in (3, 5))).stop_token_ids == (3, 5)  # type: ignore[arg-type]
