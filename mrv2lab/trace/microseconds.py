"""Microseconds as trace files write them -> integer nanoseconds, without losing one on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

EXACT_US = 2.0**41
"""Below this a double of microseconds still tells a nanosecond from its neighbours (an ulp is 0.24 ns): 25 days."""
LIMIT_NS = 1 << 62
"""Times beyond are nonsense, and their sums would leave int64."""
EARLIEST_NS = -(1 << 60)
"""Starts before are nonsense too: so that times counted from the first event, and their ends, stay within int64."""
LONGEST_NS = 1 << 53
"""104 days. An event that is longer was never ended, whatever its length says; a double still holds this one."""
BAD = -(1 << 63)
"""In a column: no time at all."""
_PLAIN = b"0123456789-.,"
_WHOLE = 17
"""Characters before the decimals of the longest times whose digits int64 may hold: 16 digits and a point, 4.. first."""


def nanoseconds(value: object) -> int | None:
    """One time of a file in ns: an int, a float or a decimal text in microseconds; None where it is no time."""
    if isinstance(value, str):
        found = _of_text(value)
    elif isinstance(value, bool):
        return None
    elif isinstance(value, int):
        found = value * 1000
    elif isinstance(value, float) and math.isfinite(value):
        found = round(value * 1000)
    else:
        return None
    return found if found is not None and -LIMIT_NS < found < LIMIT_NS else None


def _of_text(text: str) -> int | None:
    whole, _, part = text.partition(".")
    digits = whole.removeprefix("-")
    if len(digits) <= 20 and len(part) <= 3 and digits.isdecimal() and (part == "" or part.isdecimal()):
        thousandths = int(part.ljust(3, "0"))
        return int(whole) * 1000 + (-thousandths if whole[0] == "-" else thousandths)
    if "_" in text:  # to Decimal a separator, to a profiler no part of a number
        return None
    try:
        exact = Decimal(text.strip())
        if not exact.is_finite() or exact.adjusted() > 20:  # 10 ** 20 us is no time, and 1e999999 no number to expand
            return None
        return int(exact.scaleb(3).to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, ValueError):
        return None


def column(values: Sequence[object]) -> Array:
    """[n] int64: ns of each, ``BAD`` where there is no time. Floats must be below ``EXACT_US`` to come out exact."""
    try:
        numbers = np.array(values)
    except (ValueError, OverflowError):
        numbers = np.empty(0, object)
    if numbers.ndim == 1 and len(numbers) == len(values):
        if numbers.dtype.kind == "i":
            inside = (numbers < LIMIT_NS // 1000) & (numbers > -LIMIT_NS // 1000)
            return np.where(inside, numbers, 0) * 1000 + np.where(inside, 0, BAD)
        if numbers.dtype.kind == "f":
            return of_doubles(numbers)
    found = (nanoseconds(value) for value in values)
    return np.fromiter((BAD if one is None else one for one in found), np.int64, len(values))


def of_doubles(numbers: Array) -> Array:
    """[n] int64: ns of float64[n] microseconds, ``BAD`` where there is no time. Exact below ``EXACT_US``."""
    scaled = numbers * 1000.0
    inside = np.abs(scaled) < LIMIT_NS  # false for nan
    return np.where(inside, np.rint(np.where(inside, scaled, 0)).astype(np.int64), BAD)


def of_texts(values: Sequence[bytes]) -> Array | None:
    """[n] int64: ns of JSON values; None unless all are plain numbers of whole nanoseconds within ``LIMIT_NS``."""
    if not values:
        return np.empty(0, np.int64)
    joined = b",".join(values) + b","
    if joined.translate(None, _PLAIN):
        return None
    letters = np.frombuffer(joined, np.uint8)
    ends, points = np.flatnonzero(letters == ord(",")), np.flatnonzero(letters == ord("."))
    decimals = np.zeros(len(ends), np.int64)
    pointed = np.searchsorted(ends, points)
    decimals[pointed] = ends[pointed] - points - 1
    whole = np.diff(ends, prepend=-1) - 1 - decimals  # digits in front of the point, with it and a sign at most
    longest = letters[np.append(-1, ends[:-1])[whole == _WHOLE] + 1]
    if decimals.max() > 3 or whole.max() > _WHOLE or (longest > ord("4")).any():
        return None
    numbers = np.fromstring(joined.replace(b".", b"")[:-1], np.int64, sep=",")
    scale = 10 ** (3 - decimals)
    return numbers * scale if bool((np.abs(numbers) < LIMIT_NS // scale).all()) else None


def is_exact(values: Sequence[object]) -> bool:
    """Whether ``column`` loses nothing: whole numbers, or floats small enough."""
    try:
        numbers = np.array(values)
    except (ValueError, OverflowError):
        return False
    if numbers.ndim != 1 or numbers.dtype.kind not in "if":
        return False
    return numbers.dtype.kind == "i" or not len(numbers) or bool(np.nanmax(np.abs(numbers)) < EXACT_US)
