"""Cutting a stream of JSON: the same events wherever blocks end, and wrong cuts noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mrv2lab.trace import json_chunks
from mrv2lab.trace.json_chunks import EventStream


def read(text: bytes, block_bytes: int = 1 << 20) -> tuple[EventStream, list[Any], list[str]]:
    told: list[str] = []
    blocks = [text[place : place + block_bytes] for place in range(0, len(text), block_bytes)]
    stream = EventStream(blocks, lambda reason, **_: told.append(reason), "test")
    events: list[Any] = []
    for piece in stream:
        assert json.loads(b"[" + piece.text + b"]") == piece.events
        events += piece.events
    return stream, events, told


TRICKY = [
    {"name": 'a}, {"ph": "X"', "ph": "X"},
    {"name": "},{", "args": {"list": [{"ph": "X"}, {"name": "y"}, {"z": [{"ph": 1}, {"ph": 2}]}]}},
    {"name": '\\"}],"x":[{', "args": [",", ":", "},{", ",", ":"]},
    {"name": "\u00e9}]", "args": {}},
    {"name": "last", "args": {"deep": [[{"a": []}, {"b": {}}]]}},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 17, 64, 1000])
def test_names_and_arguments_that_look_like_the_ends_of_events(block_bytes: int, indent: int | None) -> None:
    around = {"before": [{"a": 1}, {"b": 2}], "traceEvents": TRICKY, "behind": [{"c": 1}, {"d": 2}]}
    stream, events, told = read(json.dumps(around, indent=indent).encode(), block_bytes)
    assert events == TRICKY
    assert told == []
    assert json.loads(b"{" + stream.tail.strip().removeprefix(b",")) == {"behind": [{"c": 1}, {"d": 2}]}
    assert stream.closed


def test_a_cut_that_is_not_proved_would_tear_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes every cut for right: nested objects are torn apart and said to be broken."""
    monkeypatch.setattr(json_chunks, "MAX_OPEN_BYTES", 0)
    monkeypatch.setattr(json_chunks, "_object_end", lambda *_: -1)
    _, events, told = read(json.dumps([TRICKY[1], TRICKY[0]]).encode(), 20)
    assert events != [TRICKY[1], TRICKY[0]] or told


PLAIN = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='{}[],:" \\phé', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ph{}"', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(st.dictionaries(st.sampled_from(["ph", "name", "args", "}"]), PLAIN, max_size=3), max_size=6),
    block_bytes=st.integers(1, 60),
)
@example(events=[{"ph": [[{}, {"h": None}], "}}"]}], block_bytes=1)  # a text that is cut where it looks like an end
@example(events=[{"ph": [{}, {"h": None}]}], block_bytes=1)
def test_any_events_in_any_blocks(events: list[Any], block_bytes: int) -> None:
    stream, found, told = read(json.dumps({"traceEvents": events, "x": [{}, {"y": 1}]}).encode(), block_bytes)
    assert found == events
    assert told == []
    assert json.loads(b"{" + stream.tail.strip().removeprefix(b",")) == {"x": [{}, {"y": 1}]}


@pytest.mark.parametrize("block_bytes", [50, 999, 1 << 20])
@pytest.mark.parametrize("last", ['{"a": 2, "b": [{"c": "]}"}]}', '{"a": 2, "b": inf}'])
def test_a_long_text_behind_the_array(monkeypatch: pytest.MonkeyPatch, block_bytes: int, last: str) -> None:
    monkeypatch.setattr(json_chunks, "MAX_EVENT_BYTES", 4000)
    monkeypatch.setattr(json_chunks, "MAX_OPEN_BYTES", 2000)
    tail = ', "log": [' + ", ".join(['"line"'] * 1000) + "]}"
    stream, events, _ = read(f'{{"traceEvents": [{{"a": 1}}, {last}]{tail}'.encode(), block_bytes)
    assert [event["a"] for event in events] == [1, 2]
    assert stream.tail == tail.encode()


def test_long_blanks_between_events() -> None:
    text = b'[{"a": 1}' + b" " * 300_000 + b',{"a": 2}' + b"\n" * 300_000 + b"x" + b" " * 300_000 + b',{"a": 3}]'
    _, events, told = read(text, 50_000)
    assert [event["a"] for event in events] == [1, 2, 3]
    assert told == ["events that are not JSON"]


def test_places_are_bytes_of_the_whole_text() -> None:
    text = json.dumps([{"ph": "X", "n": number} for number in range(50)]).encode()
    for block_bytes in (60, 4000):
        blocks = [text[place : place + block_bytes] for place in range(0, len(text), block_bytes)]
        for piece in EventStream(blocks, lambda *_, **__: None, "test"):
            for index, event in enumerate(piece.events):
                place = piece.offset_of(index)
                assert json.loads(text[place : text.index(b"}", place) + 1]) == event


def test_one_bad_event_costs_its_neighbours_nothing() -> None:
    texts = [json.dumps({"ph": "X", "n": number}) for number in range(200)]
    texts[100] = '{"ph": "X", "n": oops}'
    _, events, told = read(f"[{','.join(texts)}]".encode(), 700)
    assert [event["n"] for event in events] == [number for number in range(200) if number != 100]
    assert told == ["events that are not JSON"]


def test_a_missing_comma_is_no_loss() -> None:
    _, events, _ = read(b'[{"a": 1} {"a": 2}\n{"a": 3}]')
    assert [event["a"] for event in events] == [1, 2, 3]


def test_an_event_that_never_closes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_chunks, "MAX_OPEN_BYTES", 300)
    texts = ['{"a": [1, {"b": 1'] + [json.dumps({"ph": "X", "n": number}) for number in range(100)]
    _, events, told = read(f"[{','.join(texts)}]".encode(), 64)
    # The one that begins before any object has ended goes with it.
    assert [event["n"] for event in events] == list(range(1, 100))
    assert told == ["events that are not JSON"]
