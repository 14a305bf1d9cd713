"""Marks for what `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: int) -> list[Any]:
    """The values of a parameter, those behind the first ``quick`` ones marked slow."""
    return [
        value if place < quick else pytest.param(*_all(value), marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]


def _all(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
