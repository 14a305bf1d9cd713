"""Matchers, masks, and what is refused; the grammar library is the real one."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.grammar import GrammarCompiler, Grammars, Matcher
from mrv2lab.engine.request import Request
from mrv2lab.model.load import load_model
from mrv2lab.model.tokenizer import Tokenizer
from mrv2lab.protocol import SchedulerOutput, StructuredOutput

pytest.importorskip("llguidance")
VOCAB, EOS = 2048, 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = load_model("tiny").tokenizer
    assert made is not None
    return made


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCAB, (EOS,))


def allowed(matcher: Matcher, vocab: int = VOCAB) -> set[int]:
    return set(matcher.allowed(vocab).tolist())


def texts(matcher: Matcher, tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.decode([token], skip_special_tokens=False) for token in allowed(matcher)}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_choice_ends_by_the_end_of_text_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(StructuredOutput(choice=("yes", "no")), tokenizer)
    assert texts(matcher, tokenizer) == {"y", "n", "no"}
    assert matcher.accept(ids(tokenizer, "no")) is None
    assert allowed(matcher) == {EOS}
    assert matcher.accept([EOS]) is None
    assert matcher.num_accepted == len(ids(tokenizer, "no")) + 1
    assert matcher.accept([5]) is not None


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    wanted = StructuredOutput(regex="(yes|no)")
    first, second = compiler.matcher(wanted, tokenizer), compiler.matcher(wanted, tokenizer)
    first.accept(ids(tokenizer, "yes"))
    assert allowed(first) == {EOS} and texts(second, tokenizer) == {"y", "n", "no"}


@pytest.mark.parametrize(
    "text", ['a "quoted" word', "two\nlines", "tab\t\\ back/slash", "€ and 🦉", "$ ^ . * (", "\x01"]
)
def test_any_text_may_be_a_choice(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    matcher = compiler.matcher(StructuredOutput(choice=(text,)), tokenizer)
    assert matcher.accept(ids(tokenizer, text)) is None
    assert allowed(matcher) == {EOS}


def test_json_is_written_as_json_dumps_writes_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    value = json.dumps({"name": "Ann", "ages": [3, 41]})
    matcher = compiler.matcher(StructuredOutput(json_schema=schema), tokenizer)
    assert matcher.accept(ids(tokenizer, value)) is None
    assert allowed(matcher) == {EOS}
    matcher = compiler.matcher(StructuredOutput(json_schema=schema), tokenizer)
    assert "left its grammar" in str(matcher.accept(ids(tokenizer, '{ "name"')))


def test_padding_of_the_vocabulary_is_never_allowed(tokenizer: Tokenizer) -> None:
    """V = 2,057 with 2,048 tokens in use: the last of 65 words has 9 ids, none of which has a text."""
    matcher = GrammarCompiler(2057, (EOS,)).matcher(StructuredOutput(regex="(?s:.*)"), tokenizer)
    assert max(allowed(matcher, 2057)) < VOCAB
    rows = np.zeros((1, 65), np.int32)
    matcher.fill(rows)
    assert rows[0, -1] == 0


def test_drafts_have_a_row_each(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    wanted = StructuredOutput(regex="(yes|no)")
    yes, fresh = ids(tokenizer, "yes"), compiler.matcher(wanted, tokenizer)
    assert len(yes) == 2
    rows = np.zeros((4, VOCAB // 32), np.int32)
    fresh.fill(rows, [*yes, yes[0]])  # the third draft does not fit
    expected = []
    for count in range(3):
        other = compiler.matcher(wanted, tokenizer)
        other.accept(yes[:count])
        one = np.zeros((1, VOCAB // 32), np.int32)
        other.fill(one)
        expected.append(one[0])
    np.testing.assert_array_equal(rows, [*expected, np.full(VOCAB // 32, -1)])
    assert texts(fresh, tokenizer) == {"y", "n", "no"}, "drafts were taken back"
    fresh.fill(rows, [-1, -1, -1])
    np.testing.assert_array_equal(rows[1:], -1)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "(unclosed"}, "structured_output.regex is invalid: .*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_output.regex is invalid: .*look-around"),
        ({"regex": r"[^\s\S]"}, "structured_output.regex allows nothing: no text satisfies it"),
        ({"regex": r"a[^\s\S]"}, "structured_output.regex allows nothing"),
        ({"json_schema": "false"}, "structured_output.json_schema allows nothing: .*schema is false"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, r"allows nothing: .*minimum \(5\)"),
        ({"json_schema": {"enum": []}}, "json_schema allows nothing"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema is invalid: Invalid type: nonsense"),
        ({"json_schema": {"not": {}}}, "json_schema is invalid: Unimplemented keys"),
        ({"json_schema": {"$ref": "http://nowhere.invalid/schema"}}, "json_schema is invalid: .*not present"),
        ({"json_schema": "[1]"}, "json_schema is invalid: schema must be an object or boolean"),
    ],
)
def test_refused_with_the_librarys_reason(
    compiler: GrammarCompiler, tokenizer: Tokenizer, wanted: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        compiler.matcher(StructuredOutput(**wanted), tokenizer)
    assert "\n" not in str(caught.value) and "<state>" not in str(caught.value)


def test_a_model_without_an_end_of_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="needs a model with an end-of-text token"):
        GrammarCompiler(VOCAB, ()).matcher(StructuredOutput(regex="a"), tokenizer)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"needs llguidance: pip install -e '\.\[grammar\]'"):
        GrammarCompiler(VOCAB, (EOS,)).matcher(StructuredOutput(regex="a"), tokenizer)


# -- a batch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(compiler: GrammarCompiler, tokenizer: Tokenizer) -> tuple[Grammars, list[Request]]:
    grammars, requests = Grammars(VOCAB, depth=2), [Request(name, [1, 2]) for name in "ab"]
    for request, choice in zip(requests, ("yes", "no"), strict=True):
        grammars.add(request, compiler.matcher(StructuredOutput(choice=(choice,)), tokenizer))
    return grammars, requests


def bits(row: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def test_masks_are_those_of_the_steps_sampling_requests(
    batch: tuple[Grammars, list[Request]], tokenizer: Tokenizer
) -> None:
    grammars, (a, b) = batch
    step = SchedulerOutput(0, num_scheduled_tokens={"plain": 1, "b": 2, "a": 2})
    a.is_prefill_chunk = True  # it does not reach the end of its prompt
    assert [request for request, _ in grammars.sampling(step)] == [b]
    a.is_prefill_chunk = False
    made = grammars.output(grammars.sampling(step), step)
    assert made is not None and made.bitmask.shape == (2, 1, 64) and made.bitmask.dtype == np.int32
    assert made.req_ids == ["a", "b"]
    assert bits(made.bitmask[1, 0]) == ids(tokenizer, "no"), "where one text is left, its own tokens are"
    assert grammars.sampling(SchedulerOutput(1, num_scheduled_tokens={"plain": 1})) == []


def test_a_mask_outlives_the_next_step(batch: tuple[Grammars, list[Request]], tokenizer: Tokenizer) -> None:
    """Two steps in flight: the first one's mask may be copied when the second's is made."""
    grammars, (a, _) = batch
    step = SchedulerOutput(0, num_scheduled_tokens={"a": 2})
    first = grammars.output(grammars.sampling(step), step)
    assert first is not None
    kept = first.bitmask.copy()
    a.append_output(ids(tokenizer, "yes")[0])
    assert grammars.follow() == {}
    second = grammars.output(grammars.sampling(step), step)
    assert second is not None
    np.testing.assert_array_equal(first.bitmask, kept)
    assert bits(second.bitmask[0, 0]) != bits(kept[0, 0])


def test_requests_that_ended_meanwhile_have_no_mask(batch: tuple[Grammars, list[Request]]) -> None:
    grammars, (a, b) = batch
    step = SchedulerOutput(0, num_scheduled_tokens={"a": 2, "b": 2})
    followers = grammars.sampling(step)
    a.finish("stop")
    made = grammars.output(followers, step)
    assert made is not None and made.req_ids == ["b"]
    b.finish("abort")
    assert grammars.output(followers, step) is None
    assert grammars.follow() == {} and grammars.sampling(step) == []


def test_a_misfit_is_reported_even_with_the_last_token(
    batch: tuple[Grammars, list[Request]], tokenizer: Tokenizer
) -> None:
    grammars, (a, b) = batch
    for request in (a, b):
        request.append_output(ids(tokenizer, "#")[0])
    b.finish("length")
    found = grammars.follow()
    assert set(found) == {"a", "b"}
    assert "the output left its grammar" in found["a"] and "'#'" in found["a"]


def test_tokens_come_late_and_in_any_portion(batch: tuple[Grammars, list[Request]], tokenizer: Tokenizer) -> None:
    """A preempted request's stale tokens are appended while it waits; its matcher follows what is known."""
    grammars, (a, _) = batch
    for token in ids(tokenizer, "yes"):
        a.append_output(token)
    a.preempted()
    assert grammars.follow() == {}
    step = SchedulerOutput(0, num_scheduled_tokens={"a": 4})
    made = grammars.output(grammars.sampling(step), step)
    assert made is not None and bits(made.bitmask[0, 0]) == [EOS]


def test_waiting_counts_the_tokens_still_owed(batch: tuple[Grammars, list[Request]]) -> None:
    grammars, (a, _) = batch
    step = SchedulerOutput(0, num_scheduled_tokens={"a": 3}, scheduled_draft_tokens={"a": [-1, -1]})
    followers = grammars.sampling(step)
    for placeholders, waits in ((0, False), (3, False), (4, True)):
        a.num_output_placeholders = placeholders
        assert Grammars.waiting(followers, step) is waits
    a.finish("stop")
    assert not Grammars.waiting(followers, step)


def test_every_end_of_text_ends_it(tokenizer: Tokenizer) -> None:
    """A model may have several, in a vocabulary larger than its tokenizer's."""
    compiler = GrammarCompiler(2100, (EOS, 5))
    for end in (EOS, 5):
        matcher = compiler.matcher(StructuredOutput(choice=("yes", "no")), tokenizer)
        assert allowed(matcher, 2100).isdisjoint({EOS, 5})
        assert matcher.accept(ids(tokenizer, "yes")) is None
        assert allowed(matcher, 2100) == {EOS, 5}
        assert matcher.accept([end]) is None
