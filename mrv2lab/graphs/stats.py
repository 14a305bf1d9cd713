"""What every step did and why, kept as counts and as the last steps; a step pays for one append and one look-up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from mrv2lab.graphs.descriptor import Decision


class StepGraph(NamedTuple):
    """One step's decision."""

    step: int
    num_tokens: int
    num_reqs: int
    decision: Decision

    @property
    def padding(self) -> int:
        """Padded tokens, which the step computed for nothing."""
        return (self.decision.padded_tokens or self.num_tokens) - self.num_tokens


@dataclass(slots=True)
class Tally:
    """Steps of one decision."""

    decision: Decision
    steps: int = 0
    tokens: int = 0
    padding: int = 0
    """Padded tokens, computed for nothing."""


class GraphStats:
    """``keep``: how many of the last steps are kept one by one."""

    def __init__(self, keep: int = 4096) -> None:
        if keep < 1:
            raise ValueError(f"keep at least one step, got keep={keep}")
        self.recent: deque[StepGraph] = deque(maxlen=keep)
        self._tallies: dict[int, Tally] = {}
        """By the decision's identity: a table makes each once, and hashing its sentence would cost more than all."""

    def note(self, step: int, num_tokens: int, num_reqs: int, decision: Decision) -> None:
        """A step of ``num_tokens`` tokens over ``num_reqs`` requests takes ``decision``."""
        self.recent.append(StepGraph(step, num_tokens, num_reqs, decision))
        tally = self._tallies.get(id(decision))
        if tally is None:
            tally = self._tallies[id(decision)] = Tally(decision)
        tally.steps += 1
        tally.tokens += num_tokens
        descriptor = decision.descriptor
        if descriptor is not None:
            tally.padding += descriptor.num_tokens - num_tokens

    def why(self, step: int) -> str:
        """What step number ``step`` did and why. Raises ``KeyError`` if it is not among the last ones kept."""
        for one in reversed(self.recent):
            if one.step == step:
                graph = "eager" if one.decision.descriptor is None else str(one.decision.descriptor)
                return f"{graph}: {one.decision.reason}"
        raise KeyError(f"step {step} is not among the last {len(self.recent)} steps kept")

    def tallies(self) -> list[Tally]:
        """One a decision, the most frequent first."""
        return sorted(self._tallies.values(), key=lambda tally: -tally.steps)

    def reset(self) -> None:
        """Forget every step."""
        self.recent.clear()
        self._tallies.clear()
