"""Stop strings and what is held back because of them, however the text is cut into tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from mrv2lab.engine.text import TextStream
from mrv2lab.model.load import load_model
from mrv2lab.protocol import SamplingParams


class Pieces:
    """A decoder whose tokens are pieces of a text; ``late`` is what its ``flush`` still has."""

    def __init__(self, pieces: Sequence[str], late: str = "") -> None:
        self.pieces, self.late = pieces, late

    def add(self, token_ids: Sequence[int], /) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def flush(self) -> str:
        return self.late


def play(pieces: Sequence[str], late: str = "", **params: object) -> tuple[list[str], int, str | None]:
    """What each token gave (and the flush), how many tokens counted, and the stop string."""
    stream = TextStream(Pieces(pieces, late), SamplingParams(**params))  # type: ignore[arg-type]
    given: list[str] = []
    for token in range(len(pieces)):
        text, kept, stop = stream.add([token])
        given.append(text)
        assert kept == 1
        if stop is not None:
            assert stream.flush() == ""
            return given, token + 1, stop
    given.append(stream.flush())
    return given, len(pieces), None


def test_a_stop_string_across_three_tokens() -> None:
    assert play(["one\n", "\nE", "ND", "x"], stop=("\n\nEND",)) == (["one", "", ""], 3, "\n\nEND")


def test_the_stop_string_may_be_kept() -> None:
    assert play(["ab", "cd", "e"], stop="bc", include_stop_str_in_output=True) == (["a", "bc"], 2, "bc")


def test_what_no_longer_can_be_a_stop_string_comes_out() -> None:
    """Only as much as could still begin one is held back, and it is given out when the text goes another way."""
    assert play(["a", "<", "|", "x", "<"], stop="<|end|>") == (["a", "", "", "<|x", "", "<"], 5, None)


def test_held_text_begins_anew_inside_itself() -> None:
    assert play(list("aaab"), stop="aab") == (["", "", "a", ""], 4, "aab")


def test_without_stop_strings_nothing_is_held_and_tokens_go_together() -> None:
    stream = TextStream(Pieces(["a", "b"], "late"), SamplingParams())
    assert stream.add([0, 1]) == ("ab", 2, None)
    assert stream.flush() == "late"


def test_an_unfinished_character_comes_with_the_flush_and_is_no_stop_string() -> None:
    assert play(["a", "<"], late="\ufffd", stop="<\ufffd") == (["a", "", "<\ufffd"], 2, None)


def test_several_tokens_at_once_are_cut_at_the_one_that_completes_it() -> None:
    """Accepted drafts: tokens behind the stop string do not count."""
    stream = TextStream(Pieces(["a", "b", "c", "d"]), SamplingParams(stop=("bc",)))
    assert stream.add([0, 1, 2, 3]) == ("a", 3, "bc")


@pytest.mark.parametrize(
    ("stops", "end", "stop"),
    [
        (("cd", "bc"), "a", "bc"),  # the one that ends first, whatever the order of the list
        (("c", "abc"), "", "abc"),  # of two that end together, the longest
        (("abcd", "b"), "a", "b"),
    ],
)
def test_of_several_the_first_to_end(stops: tuple[str, ...], end: str, stop: str) -> None:
    for pieces in (["abcd"], list("abcd"), ["ab", "cd"], ["a", "bcd"]):
        given, _, found = play(pieces, stop=stops)
        assert ("".join(given), found) == (end, stop), pieces


def cuts(text: str) -> list[list[str]]:
    places = range(1, len(text))
    return [
        [text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))]
        for size in range(len(text))
        for cut in itertools.combinations(places, size)
    ]


@pytest.mark.parametrize("stops", [("ab",), ("aba", "bb"), ("b", "abab"), ("xx",), ("bab", "ba")])
@pytest.mark.parametrize("text", ["abab", "aabbab", "bbaaba", "aaaa"])
def test_every_cut_gives_the_same_text(text: str, stops: tuple[str, ...]) -> None:
    """The oracle: the earliest end of any stop string in the whole text, then the longest."""
    ends = [
        (i + len(s), i, s) for s in stops for i in range(len(text)) if text.startswith(s, i)
    ]  # of the same end, the lowest start is the longest
    end, start, stop = min(ends, default=(0, len(text), None))
    for pieces in cuts(text):
        given, count, found = play(pieces, stop=stops)
        assert ("".join(given), found) == (text[:start], stop), pieces
        if stop is not None:
            assert sum(map(len, pieces[: count - 1])) < end <= sum(map(len, pieces[:count]))


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    """With 2 tokens at least: one that ends in the third token's text counts, one that ended before does not."""
    assert play(["ab", "ab", "ab"], stop="ab", min_tokens=2) == (["ab", "ab", ""], 3, "ab")
    assert play(["x", "a", "b", "c"], stop="ab", min_tokens=2) == (["x", "", ""], 3, "ab")
    assert play(["x", "a", "b", "c"], stop="ab", min_tokens=3) == (["x", "", "ab", "c", ""], 4, None)


def test_min_tokens_and_a_stop_string_inside_what_is_held() -> None:
    """``b`` came in time to be ignored; it is still held back as the beginning of ``bc``, and stays ignored."""
    assert play(["b", "x"], stop=("b", "bc"), min_tokens=1) == (["", "bx", ""], 2, None)


def test_mutant_a_search_that_starts_at_the_held_text_would_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = TextStream._find
    monkeypatch.setattr(TextStream, "_find", lambda self, text, before: find(self, text, 0))
    with pytest.raises(AssertionError):
        test_min_tokens_and_a_stop_string_inside_what_is_held()


def test_mutant_without_holding_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextStream, "_longest_beginning", lambda self, text: 0)
    for test in (test_a_stop_string_across_three_tokens, test_held_text_begins_anew_inside_itself):
        with pytest.raises(AssertionError):
            test()


def test_real_tokens_of_a_character_in_pieces() -> None:
    """A stop string whose character comes in three tokens is found when the last byte is there, not before."""
    tokenizer = load_model("tiny").tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("so €5 more", add_special_tokens=False)
    whole = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    first = next(count for count, text in enumerate(whole) if "€" in text)
    assert "\ufffd" in whole[first - 1], "the character is in pieces here"
    stream = TextStream(tokenizer.stream(), SamplingParams(stop=("€",)))
    given = [stream.add([token]) for token in ids[:first]]
    assert [new.stop for new in given] == [None] * (first - 1) + ["€"]
    assert "".join(new.text for new in given) == "so "
