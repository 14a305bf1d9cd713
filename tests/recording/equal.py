"""Equality of records field by field, dtypes and shapes too: dataclasses with arrays in them have none of their own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def difference(one: Any, other: Any, where: str = "value") -> str | None:
    """Where the two first differ, or None. Types count, NaNs are equal to themselves, floats are compared by bits."""
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} against {type(other).__name__}"
    if is_dataclass(one):
        pairs = ((getattr(one, f.name), getattr(other, f.name), f"{where}.{f.name}") for f in fields(one))
    elif isinstance(one, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return None if same else f"{where}: {one!r} against {other!r}"
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{where}: keys {list(one)} against {list(other)}"
        pairs = ((one[key], other[key], f"{where}[{key!r}]") for key in one)
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} against {len(other)} entries"
        pairs = ((a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    else:
        same = repr(one) == repr(other) if isinstance(one, float) else one == other
        return None if same else f"{where}: {one!r} against {other!r}"
    return next((found for a, b, place in pairs if (found := difference(a, b, place))), None)
