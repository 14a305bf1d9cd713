"""Small engines with the V1 runner."""

from __future__ import annotations

from typing import Any

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from tests.engine.small import small_engine


def v1(**options: Any) -> Engine:
    """A small engine with the V1 runner."""
    return small_engine(**{"runner": "v1"} | options)


def greedy(max_tokens: int = 8) -> SamplingParams:
    """Text of a fixed length."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
