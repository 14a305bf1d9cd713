"""One remedy at a time: what it mends, and what it leaves alone."""

from __future__ import annotations

import pytest

from mrv2lab.trace.json_repair import repair, without_args


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"name": "a\x01\n\tb"}', {"name": "a\x01\n\tb"}),
        (b'{"name": "a",\x0b "x": 1}', {"name": "a", "x": 1}),
        (b'{"name": "\xf0\x9f", "x": 1}', {"name": "\ufffd", "x": 1}),
        (b'{"name": "inf -nan NaN", "x": [inf, -inf, NaN, -nan, Infinity]}', {"name": "inf -nan NaN", "x": [None] * 5}),
        (b'{"information": inf}', {"information": None}),
        (b'{"x": 1,}', {"x": 1}),
        (b'{"name": "a,}", "x": [1, 2, ],}', {"name": "a,}", "x": [1, 2]}),
        (rb'{"name": "C:\dir\new \u12 \"q\""}', {"name": 'C:\\dir\new \\u12 "q"'}),
        (rb'{"name": "\ud800x \ud83d\ude00"}', {"name": "\ufffdx \U0001f600"}),
        (b'{"name": "f("a", "b")", "pid": 1}', {"name": 'f("a", "b")', "pid": 1}),
        (b'{"cat": "c"d", "name": "e"f"}', {"cat": 'c"d', "name": 'e"f'}),
        (b'{"name": "a", \ttid": 0}', {"name": "a", "tid": 0}),
        (b'{"name": "a", "tid: 0, "ts": inf}', {"name": "a", "tid": 0, "ts": None}),
    ],
)
def test_mended(text: bytes, value: object) -> None:
    found = repair(text)
    assert found is not None
    assert found[0] == [value]
    assert found[2]


def test_several_defects_are_told_one_by_one() -> None:
    found = repair(b'{"name": "\xff", "x": nan, }')
    assert found is not None
    assert found[2] == [
        "bytes that are not UTF-8, replaced",
        "inf or nan where JSON has no word for it, read as null",
        "commas too many, left out",
    ]


@pytest.mark.parametrize("text", [b"{", b'{"a" 1}', b'{"a": 1', b'{"a": tru}', b"", b"}{"])
def test_not_mended(text: bytes) -> None:
    assert repair(text) is None


def test_the_last_resort_drops_the_arguments() -> None:
    found = without_args(b'{"name": "\xff", "ts": 1, "args": {"a" 1}}')
    assert found is not None
    assert found[0] == [{"name": "\ufffd", "ts": 1}]
    assert found[2] == ["bytes that are not UTF-8, replaced", "arguments that are not valid JSON, left out"]
    assert without_args(b'{"name" 5}') is None
    assert without_args(b'{"name" 5, "args": {}}') is None
