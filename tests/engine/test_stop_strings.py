"""Stop strings through the whole engine, on the shipped model's real text."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams

PROMPT = "Once upon a time"
LENGTH = 24
each_loop = pytest.mark.parametrize("loop", ["sync", "async"])


def tiny(loop: str = "async", **options: Any) -> Engine:
    fixed = {"device": "cpu", "num_blocks": 64, "max_num_reqs": 4, "max_model_len": 128}
    return Engine("tiny", async_scheduling=loop == "async", **fixed | options)  # type: ignore[arg-type]


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True} | more)


@pytest.fixture(scope="module")
def whole() -> tuple[str, list[int], list[str]]:
    """The text without stop strings, its tokens, and the text behind each of them."""
    with tiny() as engine:
        output = engine.generate(PROMPT, params())[0]
        assert engine.tokenizer is not None
        texts = [engine.tokenizer.decode(output.token_ids[:n]) for n in range(LENGTH + 1)]
        return output.text, output.token_ids, texts


def straddling(texts: list[str], first: int = 6) -> tuple[str, int]:
    """A stop string that begins inside one token and ends inside a later one, and the number of tokens it takes."""
    begin, end = len(texts[first]) - 2, len(texts[first + 1]) + 1
    stop = texts[first + 2][begin:end]
    assert texts[-1].find(stop) == begin, "it is where we think"
    return stop, first + 2


@each_loop
def test_text_ends_where_the_stop_string_begins(loop: str, whole: tuple[str, list[int], list[str]]) -> None:
    text, tokens, texts = whole
    stop, count = straddling(texts)
    with tiny(loop) as engine:
        output = engine.generate(PROMPT, params(stop=stop))[0]
        assert output.text == text[: text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == tokens[:count], "up to the token that completed it"
        while engine.has_work():
            engine.step()
        # The asynchronous loop had the next step in flight; its row is wasted and counted.
        assert engine.scheduler.stats.wasted_rows == (1 if loop == "async" else 0)
        assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
        assert sorted(engine.worker.runner.req_states.free_indices) == [0, 1, 2, 3]


def test_the_stop_string_may_be_kept(whole: tuple[str, list[int], list[str]]) -> None:
    text, _, texts = whole
    stop, _ = straddling(texts)
    with tiny() as engine:
        output = engine.generate(PROMPT, params(stop=(stop, "nowhere"), include_stop_str_in_output=True))[0]
    assert output.text == text[: text.index(stop) + len(stop)]


def test_a_stream_never_shows_what_is_cut_off(whole: tuple[str, list[int], list[str]]) -> None:
    text, _, texts = whole
    stop, _ = straddling(texts)
    with tiny() as engine:
        shown = ""
        for piece in engine.stream(PROMPT, params(stop=stop)):
            assert piece
            shown += piece
            assert text[: text.index(stop)].startswith(shown)
        assert shown == text[: text.index(stop)] == engine.output("r0").text
        # One that never comes holds back its own beginnings only, and all of them come out at the end.
        assert "".join(engine.stream(PROMPT, params(stop=(text[-1] + "nowhere", stop[0] + "never")))) == text


def test_new_text_adds_up(whole: tuple[str, list[int], list[str]]) -> None:
    text, _, texts = whole
    stop, _ = straddling(texts)
    with tiny() as engine:
        name, pieces = engine.submit(PROMPT, params(stop=stop)), []
        while not engine.output(name).finished:
            pieces += [output.new_text for output in engine.step()]
        assert "".join(pieces) == engine.output(name).text == text[: text.index(stop)]


def test_min_tokens(whole: tuple[str, list[int], list[str]]) -> None:
    text, tokens, texts = whole
    stop, count = straddling(texts)
    with tiny() as engine:
        early = engine.generate(PROMPT, params(stop=stop, min_tokens=count - 1))[0]
        late = engine.generate(PROMPT, params(stop=stop, min_tokens=count))[0]
    assert (early.finish_reason, len(early.token_ids)) == ("stop", count)
    assert late.token_ids == tokens or (late.stop_reason == stop and len(late.token_ids) > count)
    assert late.text.startswith(text[: text.index(stop) + len(stop)])


def test_it_wins_over_the_length(whole: tuple[str, list[int], list[str]]) -> None:
    """The last token that max_tokens allows completes it."""
    text, _, texts = whole
    stop, count = straddling(texts)
    with tiny() as engine:
        output = engine.generate(PROMPT, params(stop=stop, max_tokens=count))[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[: text.index(stop)]


def test_others_go_on_to_the_same_text(whole: tuple[str, list[int], list[str]]) -> None:
    text, _, texts = whole
    stop, _ = straddling(texts)
    with tiny() as engine:
        cut, other = engine.generate([PROMPT, PROMPT], [params(stop=stop), params()])
    assert (cut.stop_reason, other.stop_reason) == (stop, None)
    assert other.text == text


def test_an_abort_gives_out_what_was_held_back(whole: tuple[str, list[int], list[str]]) -> None:
    text, _, texts = whole
    stop = texts[3][-3:] + "nowhere"
    with tiny("sync") as engine:
        name = engine.submit(PROMPT, params(stop=stop))
        for _ in range(3):
            engine.step()
        assert engine.output(name).text == text[: len(texts[3]) - 3]
        assert engine.abort(name).text == texts[3]


def test_the_reason_of_a_stop_token_is_its_id(whole: tuple[str, list[int], list[str]]) -> None:
    _, tokens, _ = whole
    token = tokens[5]
    with tiny() as engine:
        output = engine.generate(PROMPT, params(stop_token_ids=(token,)))[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", token)
        assert output.token_ids == tokens[: tokens.index(token) + 1]
        assert engine.generate(PROMPT, params())[0].stop_reason is None


@each_loop
def test_a_preempted_request_stops_by_a_stale_token(loop: str, whole: tuple[str, list[int], list[str]]) -> None:
    """The stop string comes with a token that was in flight when its request lost its blocks."""
    text, _, texts = whole
    stop, count = straddling(texts)
    with tiny(loop) as engine:
        name = engine.submit(PROMPT, params(stop=stop))
        while len(engine.output(name).token_ids) < count - 1:
            engine.step()
        engine.scheduler.preempt(name)
        while engine.has_work():
            engine.step()
        output = engine.output(name)
        assert (output.text, output.stop_reason) == (text[: text.index(stop)], stop)
        assert not engine.scheduler.requests and not engine.scheduler.waiting


def test_mutant_a_request_that_goes_on_behind_its_stop_string(
    whole: tuple[str, list[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler must hear of it."""
    monkeypatch.setattr("mrv2lab.engine.scheduler.Scheduler.finish", lambda self, req_id, reason: None)
    with tiny() as engine:
        engine.generate(PROMPT, params(stop=straddling(whole[2])[0]))
        assert engine.scheduler.requests
        with pytest.raises(KeyError):  # tokens come for a request that has ended
            engine.step()
