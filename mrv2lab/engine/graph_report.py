"""What an engine's graphs cost, and what its steps did with them, as one value that reads well in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrv2lab.graphs import GraphStats
from mrv2lab.graphs.descriptor import count
from mrv2lab.graphs.report import CaptureReport
from mrv2lab.graphs.stats import StepGraph, find_step


@dataclass(frozen=True, slots=True)
class GraphReport:
    """``capture``: the graphs there are, their memory and time (None: none were asked for). The rest counts the steps
    with a forward since the engine was made or reset; an ``Engine.step`` without any token runs none."""

    capture: CaptureReport | None
    steps: int
    tokens: int
    padding: int
    """Tokens that were computed for nothing."""
    by_reason: tuple[tuple[str, str, int, int, int], ...]
    """(full, piecewise or eager; why; steps; tokens; padding), the most frequent first."""
    recent: Sequence[StepGraph]
    """The last steps one by one."""

    def why(self, step: int) -> str:
        """What step number ``step``, as a recording numbers them, did, and why.

        Raises ``KeyError`` if it ran no forward or is no longer among ``recent``, and ``TypeError`` for no integer.
        """
        return find_step(self.recent, self.steps, step).why

    def rows(self) -> list[dict[str, Any]]:
        """``by_reason`` as records: mode, reason, steps, tokens, padding."""
        return [dict(zip(("mode", "reason", "steps", "tokens", "padding"), row, strict=True)) for row in self.by_reason]

    def __str__(self) -> str:
        lines = [str(self.capture) if self.capture is not None else "no graphs"]
        if self.steps:
            share = self.padding / (self.tokens + self.padding)
            lines.append(
                f"{count(self.steps, 'step')} with a forward, {count(self.tokens, 'token')}, "
                f"{self.padding:,} more of padding ({share:.1%})"
            )
        lines += [f"  {steps:,} {mode}: {reason}" for mode, reason, steps, _, _ in self.by_reason[:12]]
        if len(self.by_reason) > 12:
            lines.append(f"  and {len(self.by_reason) - 12} reasons more, in by_reason")
        return "\n".join(lines)

    __repr__ = __str__


def graph_report(capture: CaptureReport | None, stats: GraphStats) -> GraphReport:
    """The report of what ``stats`` has counted so far."""
    tallies = stats.tallies()
    return GraphReport(
        capture=capture,
        steps=sum(tally.steps for tally in tallies),
        tokens=sum(tally.tokens for tally in tallies),
        padding=sum(tally.padding for tally in tallies),
        by_reason=tuple(
            (tally.decision.mode, tally.decision.reason, tally.steps, tally.tokens, tally.padding) for tally in tallies
        ),
        recent=tuple(stats.recent),
    )
