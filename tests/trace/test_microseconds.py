"""Microseconds to nanoseconds, exactly."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace.microseconds import BAD, EXACT_US, column, is_exact, nanoseconds, of_texts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (5, 5000),
        (1.5, 1500),
        ("1.5", 1500),
        ("-0.5", -500),
        ("-12.004", -12004),
        ("1661203462598738.123", 1661203462598738123),
        ("1.661203462598738125e15", 1661203462598738125),
        ("2.0005", 2000),
        ("2.0015", 2002),
        (" 7 ", 7000),
        ("", None),
        ("x", None),
        ("nan", None),
        ("1e999999", None),
        ("1_0", None),
        (None, None),
        (True, None),
        (float("inf"), None),
        (float("nan"), None),
        (2**62, None),
        ([1], None),
    ],
)
def test_one_time(value: object, expected: int | None) -> None:
    assert nanoseconds(value) == expected
    assert column([value, "1"]).tolist() == [BAD if expected is None else expected, 1000]


@given(st.integers(0, 2**41 * 1000 - 1))
def test_doubles_below_the_limit_are_exact(ns: int) -> None:
    value = float(f"{ns // 1000}.{ns % 1000:03}")
    assert is_exact([value])
    assert column([value]).tolist() == [ns]


def test_doubles_above_the_limit_are_not_trusted() -> None:
    assert is_exact([EXACT_US - 1])
    assert not is_exact([1.0, EXACT_US])
    # And rightly: three neighbours of one nanosecond become fewer.
    texts = [f"1661203462598738.{part:03}" for part in (1, 2, 3)]
    assert len({float(text) for text in texts}) < 3
    assert column(texts).tolist() == [int(Decimal(text) * 1000) for text in texts]


def test_whole_numbers_are_exact_whatever_their_size() -> None:
    assert is_exact([1661203462598738])
    assert column([1661203462598738, -(2**62)]).tolist() == [1661203462598738000, BAD]
    assert not is_exact(["1", 2])
    assert not is_exact([2**70])
    assert is_exact([])


@pytest.mark.parametrize("text", ["--5", "-", "9" * 5000, "-" + "9" * 5000, "9" * 25])
def test_texts_that_are_no_time(text: str) -> None:
    assert nanoseconds(text) is None


NS = st.integers(0, 10**16 - 1).map(lambda value: f"{value}") | st.integers(0, 10**19 - 1).map(
    lambda value: f"{value // 1000}.{value % 1000:03}"
)


@given(
    st.lists(NS | st.sampled_from(["0", "-0", "-0.5", "-12.004", "0.25", "7.5", "999999999999999.999"]), max_size=5),
    st.lists(st.sampled_from(["-", ""]), min_size=5, max_size=5),
)
def test_texts_by_columns_are_texts_one_by_one(texts: list[str], signs: list[str]) -> None:
    """Or are refused: the nonsense that int64 does not hold."""
    spelled = [sign + text.removeprefix("-") for sign, text in zip(signs, texts, strict=False)]
    found = of_texts([text.encode() for text in spelled])
    one_by_one = [nanoseconds(text) for text in spelled]
    if found is None:
        assert any(ns is None or abs(ns) >= 10**18 for ns in one_by_one)
    else:
        assert found.tolist() == one_by_one


@pytest.mark.parametrize(
    "text",
    [
        "1e3",
        "1.0005",
        '"1"',
        "null",
        "[1]",
        "true",
        "9" * 17,
        "9999999999999999.999",
        "-9999999999999999.999",
        "9" * 40,
    ],
)
def test_texts_that_are_not_plain_are_refused(text: str) -> None:
    assert of_texts([b"1.5", text.encode()]) is None


def test_unix_times_are_plain() -> None:
    found = of_texts([b"1661203462598738.123", b"1661203462598738", b"-166120346259873.12"])
    assert found is not None
    assert found.tolist() == [1661203462598738123, 1661203462598738000, -166120346259873120]
