"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(ValueError):
    """Weights, configuration or tokenizer cannot be used. The message says which file, what is wrong and what to do."""


def listed(items: Iterable[str], limit: int = 8) -> str:
    """``a, b, c`` with at most ``limit`` items and a count of the rest."""
    names = list(items)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
