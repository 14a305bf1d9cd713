"""The experiment of the design document on the real runner: one transfer policy, a request more every step.

Every step one request of the same shape arrives and, in the steady state, one ends, so that every step sends every
table and array and none is sent twice alike. The same schedule runs once more with a safe policy: its tokens are right.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

import pandas as pd

from mrv2lab.check.races import Hazard, RaceDetector
from mrv2lab.config import TransferName
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import steady
from mrv2lab.runtime.clock import CostModel
from mrv2lab.runtime.cpu import CpuRuntime

Where = Literal["deferred", "threaded", "cuda"]

SLOW_DEVICE = CostModel(launch_ns=1_000_000)
"""A modelled launch of 1 ms makes the deferred stream device-bound beside any host, as the spin makes a GPU. The time
is virtual: nobody waits for it."""
SPIN_MS = 20.0
BUFFERS_SHOWN = 8
"""Buffers that a summary names."""
MAX_STEPS = 200
"""Wrong counters grow; with more steps they would leave the tables."""

_SHAPE: dict[str, Any] = {"max_num_reqs": 16, "max_num_batched_tokens": 128, "max_model_len": 256, "num_blocks": 128}
_PROMPT, _OUTPUT = 8, 6


@dataclass(frozen=True, slots=True, repr=False)
class RaceReport:
    """What one run showed. Its ``repr`` is a summary; ``hazards`` holds every hazard."""

    policy: str
    depth: int
    where: str
    runner: str
    steps: int
    corrupted_steps: list[int]
    """Steps in which the device read other bytes than the host had queued."""
    hazards: list[Hazard]
    wrong_tokens: dict[int, int]
    """Step -> tokens that differ from the safe run's."""
    waits: pd.DataFrame
    """See :func:`mrv2lab.check.waits.waits_by_cause`."""
    wait_ns: int
    """Of all waits but those for the output; modelled on a deferred stream."""
    error: str | None
    """Why the run ended early: corrupt indices can make queued work fail."""

    @property
    def buffers(self) -> list[str]:
        """The buffers that hazards name, in alphabetical order."""
        return sorted({hazard.buffer for hazard in self.hazards})

    @property
    def by_buffer(self) -> dict[str, int]:
        """Buffer -> hazards, most hazards first, then in alphabetical order."""
        counts = Counter(hazard.buffer for hazard in self.hazards)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def buffer_lines(self, at_most: int = BUFFERS_SHOWN) -> list[str]:
        """One line a buffer with its hazards, then how many buffers were left out."""
        lines = [f"{buffer}: {count}" for buffer, count in islice(self.by_buffer.items(), at_most)]
        hidden = len(self.by_buffer) - len(lines)
        return [*lines, f"and {hidden} more"] if hidden else lines

    def __repr__(self) -> str:
        pool = f", {self.depth} slot{'s' * (self.depth != 1)}" if self.policy == "uva_pool" else ""
        waits = ", ".join(f"{cause} {count}" for cause, count in self.waits["waits"].items() if count)
        parts = [
            f"RaceReport: {self.policy}{pool}, {self.runner} on {self.where}, {self.steps} steps",
            f"corrupted steps: {len(self.corrupted_steps)} {self.corrupted_steps}",
            f"wrong tokens: {sum(self.wrong_tokens.values())}",
            f"hazards: {len(self.hazards)}",
            *(f"  {line}" for line in self.buffer_lines()),
            f"waits: {waits or 'none'}",
        ]
        return "\n".join(parts if self.error is None else [*parts, f"ended early: {self.error}"])


def race(
    policy: TransferName,
    *,
    depth: int = 2,
    where: Where = "deferred",
    steps: int = 30,
    runner: str = "mrv2",
    model: str = "tiny",
    spin_ms: float = SPIN_MS,
    **options: Any,
) -> RaceReport:
    """Run ``steps`` turns under a :class:`RaceDetector`. ``depth``: slots of each UVA pool. ``spin_ms``: CUDA only.
    ``options``: further keywords of both runs' :class:`Engine`, ``protected`` of the policy's alone.

    Raises ``ValueError`` for a name or a number out of range and for an option that the experiment sets itself,
    ``DeviceMissing`` for a GPU that is not there.
    """
    if where not in get_args(Where):
        raise ValueError(f"stream must be one of {get_args(Where)}, got {where!r}")
    if not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps must lie between 1 and {MAX_STEPS}, got {steps!r}")
    machine = {"device": "cuda"} if where == "cuda" else {"device": "cpu", "stream": where}
    shared: dict[str, Any] = {"model": model, "runner": runner, **_SHAPE, **machine}
    taken = sorted(options.keys() & {*shared, "device", "stream", "transfer", "pool_depth"})
    if taken:
        raise ValueError(
            f"the experiment sets {taken[0]} itself; leave it out (policy, depth and where say how it is sent)"
        )
    unprotected = {name: value for name, value in options.items() if name != "protected"}
    with Engine(**shared, transfer=policy, pool_depth=depth, **options) as engine:
        if where == "deferred":
            assert isinstance(engine.rt, CpuRuntime)
            engine.rt.costs = SLOW_DEVICE
        error: str | None = None
        tokens: dict[int, dict[str, list[int]]] = {}
        with RaceDetector(engine, spin_ms=spin_ms if where == "cuda" else 0.0) as races:
            try:
                _turns(engine, steps, tokens)
            except Exception as raised:  # whatever corrupt state led to
                error = f"{type(raised).__name__}: {raised}"
        safe: dict[int, dict[str, list[int]]] = {}
        if error is None or where != "cuda":  # after a fatal CUDA error the process has no device any more
            with Engine(**shared, transfer="pinned_copy", **unprotected) as reference:
                _turns(reference, steps, safe)
    wrong = {step: count for step in tokens if (count := _differences(tokens[step], safe.get(step, {})))}
    return RaceReport(
        policy,
        depth,
        where,
        runner,
        engine.num_steps,
        races.corrupted_steps,
        races.hazards,
        wrong,
        races.waits,
        races.wait_ns,
        error,
    )


def _turns(engine: Engine, steps: int, tokens: dict[int, dict[str, list[int]]]) -> None:
    """Fill in step -> request -> its tokens of that step."""
    workload = steady(steps, every=1, prompt_len=_PROMPT, max_tokens=_OUTPUT)
    for arrival in workload.resolve(engine.config.model.vocab_size):
        assert isinstance(arrival.prompt, tuple)
        engine.submit(arrival.prompt, arrival.params)
        engine.step()
        output = engine.core.last_output
        if output is not None:
            tokens[output.step] = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))


def _differences(tokens: dict[str, list[int]], safe: dict[str, list[int]]) -> int:
    return sum(tokens[req_id] != safe[req_id] for req_id in tokens.keys() & safe.keys())
