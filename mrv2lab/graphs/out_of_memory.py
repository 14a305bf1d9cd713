"""What is said where graphs ran out of memory: one warning, at the caller's line, whose remedy fits the options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from mrv2lab.config import CacheConfig

PACKAGE = str(Path(__file__).resolve().parents[1])
FEWER = "Capture fewer or smaller cudagraph_capture_sizes"


def remedy(cache: CacheConfig) -> str:
    """What leaves graphs more memory: a smaller KV cache, by the option that sized it."""
    if cache.num_blocks is not None:
        return f"{FEWER}, or leave graphs more memory by fewer num_blocks ({cache.num_blocks:,})"
    return f"{FEWER}, or leave graphs more memory by a lower gpu_memory_utilization ({cache.gpu_memory_utilization})"


def warn_dropped(lost: str, instead: str, lines: Sequence[str], advice: str) -> None:
    """Warn that ``lost`` ("2 of 6 shapes") have no graph and what their steps do ``instead``; ``lines``: one a kind."""
    warnings.warn(
        f"{lost} have no graph, so their steps {instead}: {'; '.join(lines)}. {advice}; "
        "engine.graph_report() tells what became of each step",
        stacklevel=_outside(),
    )


def _outside() -> int:
    """``stacklevel`` for :func:`warn_dropped`'s warning that names the first line outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
