"""What every step of V1 did about graphs and why, what the graphs cost, and both as one value to read.

Counterparts in vLLM: ``CUDAGraphStat`` and ``CUDAGraphLogging`` in ``compilation/cuda_graph.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mrv2lab.graphs.descriptor import count
from mrv2lab.graphs.report import token_counts
from mrv2lab.graphs.stats import find_step
from mrv2lab.runner_v1.graph_dispatcher import Decision, GraphKey, Mode


class StepGraph(NamedTuple):
    """One step's decision."""

    step: int
    num_tokens: int
    num_reqs: int
    decision: Decision

    @property
    def padding(self) -> int:
        """Tokens that were computed for nothing."""
        return (self.decision.padded_tokens or self.num_tokens) - self.num_tokens

    @property
    def why(self) -> str:
        """What it did, and why."""
        return f"{self.decision.mode}: {self.decision.reason}"


@dataclass(slots=True)
class Tally:
    """Steps of one decision."""

    decision: Decision
    steps: int = 0
    tokens: int = 0
    padding: int = 0
    """Tokens that were computed for nothing."""


class GraphStats:
    """``keep``: how many of the last steps are kept one by one."""

    def __init__(self, keep: int = 4096) -> None:
        self.recent: deque[StepGraph] = deque(maxlen=keep)
        self._tallies: dict[int, Tally] = {}
        """By the decision's identity, which the dispatcher makes once."""

    def note(self, step: int, num_tokens: int, num_reqs: int, decision: Decision) -> None:
        """A step of ``num_tokens`` tokens over ``num_reqs`` requests took ``decision``."""
        one = StepGraph(step, num_tokens, num_reqs, decision)
        self.recent.append(one)
        tally = self._tallies.get(id(decision))
        if tally is None:
            tally = self._tallies[id(decision)] = Tally(decision)
        tally.steps += 1
        tally.tokens += num_tokens
        tally.padding += one.padding

    def tallies(self) -> list[Tally]:
        """One a decision, the most frequent first."""
        return sorted(self._tallies.values(), key=lambda tally: -tally.steps)

    def why(self, step: int) -> str:
        """What step number ``step`` did and why. Raises as :func:`find_step` does."""
        return find_step(self.recent, sum(tally.steps for tally in self._tallies.values()), step).why

    def reset(self) -> None:
        """Forget every step."""
        self.recent.clear()
        self._tallies.clear()


@dataclass(frozen=True, slots=True)
class Cost:
    """What one key's graphs cost."""

    mode: Mode
    key: GraphKey
    graphs: int
    """1 for a FULL key, the number of pieces otherwise."""
    launches: int
    """Launches of the runtime that they hold."""
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class V1GraphReport:
    """The graphs there are, and what the steps with a forward since the engine was made or reset did with them."""

    captured: tuple[Cost, ...] = ()
    dropped: dict[tuple[Mode, GraphKey], str] = field(default_factory=dict)
    """Keys without a graph after all, and why."""
    tallies: tuple[Tally, ...] = ()
    recent: tuple[StepGraph, ...] = ()
    """The last steps one by one."""

    @property
    def nbytes(self) -> int:
        """Memory of all graphs, in bytes."""
        return sum(cost.nbytes for cost in self.captured)

    @property
    def seconds(self) -> float:
        """Time of all captures, their dummy runs included."""
        return sum(cost.seconds for cost in self.captured)

    @property
    def steps(self) -> int:
        """Steps with tokens."""
        return sum(tally.steps for tally in self.tallies)

    @property
    def tokens(self) -> int:
        """Tokens that these steps had."""
        return sum(tally.tokens for tally in self.tallies)

    @property
    def padding(self) -> int:
        """Tokens that they computed for nothing."""
        return sum(tally.padding for tally in self.tallies)

    def why(self, step: int) -> str:
        """What step number ``step``, as a recording numbers them, did, and why.

        Raises ``KeyError`` if it ran no forward or is no longer among ``recent``, and ``TypeError`` for no integer.
        """
        return find_step(self.recent, self.steps, step).why

    def rows(self) -> list[dict[str, Any]]:
        """A record a reason, the most frequent first: mode, reason, steps, tokens, padding."""
        return [
            {
                "mode": tally.decision.mode,
                "reason": tally.decision.reason,
                "steps": tally.steps,
                "tokens": tally.tokens,
                "padding": tally.padding,
            }
            for tally in self.tallies
        ]

    def __str__(self) -> str:
        lines = ["no graphs"]
        if self.captured or self.dropped:
            kib = f"{self.nbytes / 2**10:,.1f} KiB"
            lines = [f"V1: {count(len(self.captured), 'key')} in {self.seconds:.2f} s, {kib} of graph memory"]
            lines += _by_mode(self.captured)
            lines += [f"  not captured: {line}" for line in dropped_lines(self.dropped)]
        if self.steps:
            share = self.padding / (self.tokens + self.padding)
            lines.append(
                f"{count(self.steps, 'step')} with a forward, {count(self.tokens, 'token')}, "
                f"{self.padding:,} more of padding ({share:.1%})"
            )
        lines += [f"  {tally.steps:,} {tally.decision.mode}: {tally.decision.reason}" for tally in self.tallies[:12]]
        if len(self.tallies) > 12:
            lines.append(f"  and {len(self.tallies) - 12} reasons more, in rows()")
        return "\n".join(lines)

    __repr__ = __str__


def _by_mode(captured: Iterable[Cost]) -> list[str]:
    lines = []
    for kind, keys in _kinds((cost.mode, cost.key) for cost in captured).items():
        some = [cost for cost in captured if (cost.mode, cost.key) in keys]
        graphs, launches = sum(cost.graphs for cost in some), sum(cost.launches for cost in some)
        lines.append(f"  {kind}: {_sizes(keys)}; {count(graphs, 'graph')}, {launches:,} launches")
    return lines


def dropped_lines(dropped: dict[tuple[Mode, GraphKey], str]) -> list[str]:
    """A line a kind of what has no graph: its sizes, and the reason of the smallest."""
    return [f"{kind}: {_sizes(keys)} ({dropped[min(keys, key=_size)]})" for kind, keys in _kinds(dropped).items()]


def _kinds(keys: Iterable[tuple[Mode, GraphKey]]) -> dict[str, list[tuple[Mode, GraphKey]]]:
    """``FULL, uniform`` -> its keys."""
    found: dict[str, list[tuple[Mode, GraphKey]]] = {}
    for mode, key in keys:
        kind = mode if mode == "PIECEWISE" else f"{mode}, {'uniform' if key.uniform else 'any lengths'}"
        found.setdefault(kind, []).append((mode, key))
    return found


def _sizes(keys: Iterable[tuple[Mode, GraphKey]]) -> str:
    return token_counts(sorted(map(_size, keys)))


def _size(key: tuple[Mode, GraphKey]) -> int:
    return key[1].num_tokens
