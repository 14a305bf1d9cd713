"""Whether a JSON value has the shape it should have; said in one sentence with the path to the first that has not.

Shapes are plain values: ``str`` or ``bool``; ``Int(low, high)``; ``NUMBER``; ``[shape]`` a list of any length;
``(a, b)`` a list of exactly these; ``{"key": shape}`` an object with exactly these keys; ``Map(shape)`` an object with
any keys; ``Maybe(shape)`` or null; ``ANY``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mrv2lab.recording.schema import RecordingError

ANY = object()
NUMBER = float
"""An integer or a float; JSON has no infinities and no NaN, so those travel as strings, see :func:`finite`."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Int:
    """An integer within ``low..high``, both included."""

    low: int = -(2**63)
    high: int = 2**63 - 1


@dataclass(frozen=True)
class Map:
    """An object with any keys."""

    values: Any


@dataclass(frozen=True)
class Maybe:
    """The shape, or null."""

    shape: Any


def finite(value: float) -> float | str:
    """``value`` as JSON can hold it: what is not finite becomes the string that ``NUMBER`` reads back."""
    return value if math.isfinite(value) else str(float(value))


def conform(value: Any, shape: Any, where: str) -> Any:
    """``value`` with tuples where ``shape`` has them. Raises ``RecordingError`` where it differs from ``shape``."""
    if shape is ANY:
        return value
    if isinstance(shape, Maybe):
        return None if value is None else conform(value, shape.shape, where)
    if isinstance(shape, Int):
        if type(value) is not int or not shape.low <= value <= shape.high:
            raise RecordingError(f"{where} is {_short(value)}, expected an integer in {shape.low}..{shape.high}")
        return value
    if shape is NUMBER:
        value = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        if type(value) not in (int, float):
            raise RecordingError(f"{where} is {_short(value)}, expected a number")
        return value
    if isinstance(shape, type):
        if type(value) is not shape:
            raise RecordingError(f"{where} is {_short(value)}, expected {shape.__name__}")
        return value
    if isinstance(shape, (Map, dict)):
        if type(value) is not dict:
            raise RecordingError(f"{where} is {_short(value)}, expected an object")
        if isinstance(shape, Map):
            return {key: conform(item, shape.values, f"{where}.{_short(key)}") for key, item in value.items()}
        if value.keys() != shape.keys():
            raise RecordingError(f"{where} has the keys {_short(sorted(value))}, expected {sorted(shape)}")
        return {key: conform(value[key], item, f"{where}.{key}") for key, item in shape.items()}
    if type(value) is not list:
        raise RecordingError(f"{where} is {_short(value)}, expected a list")
    if isinstance(shape, tuple):
        if len(value) != len(shape):
            raise RecordingError(f"{where} has {len(value)} entries, expected {len(shape)}")
        return tuple(conform(value[i], item, f"{where}[{i}]") for i, item in enumerate(shape))
    return [conform(item, shape[0], f"{where}[{i}]") for i, item in enumerate(value)]


def _short(value: Any) -> str:
    """A repr that stays within a sentence, whatever the file holds."""
    if isinstance(value, (dict, list)):
        if isinstance(value, list) and len(value) <= 40 and all(isinstance(item, str) for item in value):
            text = repr(value)
        else:
            text = f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
