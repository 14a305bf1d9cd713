"""Shapes of JSON values and the sentences about values that differ."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mrv2lab.recording.conform import ANY, NUMBER, Int, Map, Maybe, conform, finite
from mrv2lab.recording.schema import RecordingError

SHAPE = {
    "name": str,
    "row": Int(0, 7),
    "pairs": [(str, Int())],
    "gauges": Map(NUMBER),
    "site": Maybe(str),
    "flag": bool,
    "rest": ANY,
}
VALUE: dict[str, Any] = {
    "name": "a",
    "row": 7,
    "pairs": [["b", 1]],
    "gauges": {"x": 1, "y": 0.5},
    "site": None,
    "flag": True,
    "rest": [{"any": []}],
}


def test_lists_become_tuples_where_the_shape_has_them() -> None:
    assert conform(VALUE, SHAPE, "it") == VALUE | {"pairs": [("b", 1)]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": 3}, "it.name is 3, expected str"),
        ({"row": 8}, "it.row is 8, expected an integer in 0..7"),
        ({"row": True}, "it.row is True, expected an integer in 0..7"),
        ({"row": 1.0}, "it.row is 1.0, expected an integer in 0..7"),
        ({"pairs": [["b"]]}, "it.pairs[0] has 1 entries, expected 2"),
        ({"pairs": {}}, "it.pairs is an object of 0 entries, expected a list"),
        ({"gauges": {"x": "many"}}, "it.gauges.'x' is 'many', expected a number"),
        ({"gauges": []}, "it.gauges is [], expected an object"),
        ({"gauges": {"x": True}}, "it.gauges.'x' is True, expected a number"),
        ({"site": 1}, "it.site is 1, expected str"),
        ({"flag": 1}, "it.flag is 1, expected bool"),
        ({"name": "x" * 1000}, None),
        ({"more": 1}, "it has the keys ['flag', 'gauges', 'more', 'name', 'pairs', 'rest', 'row', 'site'], expected"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], sentence: str | None) -> None:
    if sentence is None:
        conform(VALUE | changes, SHAPE, "it")
        return
    with pytest.raises(RecordingError) as error:
        conform(VALUE | changes, SHAPE, "it")
    assert str(error.value).startswith(sentence)


def test_a_sentence_stays_one_whatever_the_value() -> None:
    with pytest.raises(RecordingError) as error:
        conform("<script>" * 10_000, Int(), "it")
    assert len(str(error.value)) < 200
    with pytest.raises(RecordingError) as error:
        conform({"x" * 10_000: 1}, {"a": str}, "it")
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("value", [0.5, math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks(value: float) -> None:
    assert repr(conform(finite(value), NUMBER, "it")) == repr(value)
    assert math.isfinite(value) or isinstance(finite(value), str)
