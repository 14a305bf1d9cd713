"""What every engine of the race is given: requests, prompts and ways to choose tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SAMPLINGS = ("greedy", "seeded")
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
"""How seeded requests choose; each has the number of its request as its seed."""


@dataclass(frozen=True)
class RaceWorkload:
    """``requests`` prompts of ``prompt_len`` random tokens, submitted together, each going on for ``output_len``."""

    name: str
    requests: int
    prompt_len: int
    output_len: int
    samplings: tuple[str, ...] = ("greedy",)

    @property
    def output_tokens(self) -> int:
        """Tokens that one repetition brings."""
        return self.requests * self.output_len

    def prompts(self, repetition: int, vocab_size: int) -> list[list[int]]:
        """The prompts of one repetition: the same for every engine, others in every repetition."""
        random = np.random.default_rng([repetition, self.requests, self.prompt_len])
        return random.integers(0, vocab_size, (self.requests, self.prompt_len)).tolist()  # type: ignore[no-any-return]

    def message(self, sampling: str, repetition: int) -> dict[str, Any]:
        """What a child process is asked to run."""
        return {"do": "run", "workload": asdict(self), "sampling": sampling, "repetition": repetition}


LARGE = {
    "A": RaceWorkload("A", 256, 128, 256, SAMPLINGS),
    "B": RaceWorkload("B", 1, 128, 256),
    "C": RaceWorkload("C", 64, 1024, 128),
}
"""On a GPU: many decodes, one decode, long prompts."""
SMALL = {
    "A": RaceWorkload("A", 8, 12, 8, SAMPLINGS),
    "B": RaceWorkload("B", 1, 12, 8),
    "C": RaceWorkload("C", 4, 48, 4),
}
"""On a CPU: only shows that the race runs."""


def chosen(names: Sequence[str], on_gpu: bool) -> list[tuple[RaceWorkload, str]]:
    """Workloads and how they choose tokens, in the order of the race. Raises ``ValueError`` for an unknown name."""
    known = LARGE if on_gpu else SMALL
    for name in names:
        if name not in known:
            raise ValueError(f"workload {name!r} is unknown; there are {', '.join(known)}")
    wanted = [known[name] for name in known if name in (names or known)]
    return [(workload, sampling) for workload in wanted for sampling in workload.samplings]


def sampling_of(sampling: str, number: int) -> dict[str, Any]:
    """Fields of request ``number``'s sampling parameters; vLLM and ours name them alike."""
    return {**SEEDED, "seed": number} if sampling == "seeded" else {"temperature": 0.0}
