"""What every step did and why, kept as counts and as the last steps; a step pays for one append and one look-up."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, SupportsIndex, TypeVar

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

    @property
    def why(self) -> str:
        """What it did, and why."""
        return f"{self.decision.descriptor or 'eager'}: {self.decision.reason}"


@dataclass(slots=True)
class Tally:
    """Steps of one decision."""

    decision: Decision
    steps: int = 0
    tokens: int = 0
    padding: int = 0
    """Padded tokens, computed for nothing."""


class Numbered(Protocol):
    """Whatever knows its step's number."""

    @property
    def step(self) -> int:
        """From 0, of every ``Engine.step`` that scheduled something; an engine's reset begins anew."""
        ...


S = TypeVar("S", bound=Numbered)


def find_step(recent: Sequence[S], steps: int, step: SupportsIndex) -> S:
    """Of ``recent``, the last of ``steps`` steps with a forward in their order, the one with the number ``step``.

    Raises ``KeyError`` saying which there are: steps without any token run no forward, and early ones are not kept.
    Raises ``TypeError`` for what is no integer.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"a step is an integer, got {step!r}") from None
    found = next((one for one in reversed(recent) if one.step == number), None)
    if found is not None:
        return found
    if not recent:
        raise KeyError(f"step {number} has run no forward; no step has yet")
    what = "has run no forward"
    if 0 <= number < recent[0].step and steps > len(recent):
        what = f"is not among the last {len(recent):,} of {steps:,} that are kept"
    raise KeyError(f"step {number} {what}; known: {_ranges([one.step for one in recent])}")


def _ranges(numbers: list[int], most: int = 4) -> str:
    """``0..3, 5, 7..9`` of ascending numbers; of more than ``most`` runs the last ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{first}..{last}" if last > first else str(first) for first, last in runs[-most:]]
    return ", ".join(["..."] * (len(runs) > most) + words)


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
        """What step number ``step`` did and why. Raises as :func:`find_step` does."""
        return find_step(self.recent, self.steps, step).why

    @property
    def steps(self) -> int:
        """Steps with a forward since the last reset."""
        return sum(tally.steps for tally in self._tallies.values())

    def tallies(self) -> list[Tally]:
        """One a decision, the most frequent first."""
        return sorted(self._tallies.values(), key=lambda tally: -tally.steps)

    def reset(self) -> None:
        """Forget every step."""
        self.recent.clear()
        self._tallies.clear()
