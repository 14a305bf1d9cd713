"""One of a twin's two runners, with everything that belongs to it alone: machine, worker, message, capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mrv2lab.check.capture import Capture
from mrv2lab.check.compare import Captured, Equality
from mrv2lab.config import EngineConfig, ModelConfig
from mrv2lab.engine.options import threads_for
from mrv2lab.engine.projections import V1Projection, project_mrv2
from mrv2lab.engine.request import Request
from mrv2lab.engine.worker import Worker
from mrv2lab.model.load import load_model
from mrv2lab.protocol import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SamplingParams, SchedulerOutput
from mrv2lab.runtime import make_runtime
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime

Weights = dict[str, torch.Tensor]
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Launched:
    """A step in flight; ``forced``: whether tokens are written over the runner's own."""

    future: AsyncModelRunnerOutput
    forced: bool


class Side:
    """A worker of one runner. ``around`` is entered around all host work of it, its making included."""

    def __init__(
        self, config: EngineConfig, rt: Runtime, worker: Worker, name: str, around: Around = nullcontext
    ) -> None:
        self.config, self.rt, self.worker, self.name, self.around = config, rt, worker, name, around
        self.capture = Capture(rt, worker.runner, config.scheduler.max_num_reqs)

    @property
    def kind(self) -> str:
        """``"v1"`` or ``"mrv2"``."""
        return self.config.runner.runner

    @property
    def batch_order(self) -> str:
        """Two sides with one word here put the requests of a step into the same order."""
        return "mrv2" if self.kind == "mrv2" else str(self.config.runner.reorder)

    def projection(self, requests: Mapping[str, Request]) -> Callable[[SchedulerOutput], Any]:
        """What makes this runner's message; ``requests`` are the scheduler's."""
        return project_mrv2 if self.kind == "mrv2" else V1Projection(requests)

    def execute(self, message: Any) -> bool:
        """Queue a step up to the hidden states; False if it has no tokens."""
        with self.around():
            return self.worker.execute_model(message)

    def sample(self, forced: Mapping[str, int], grammar: GrammarOutput | None = None) -> Launched:
        """Queue the rest of it. ``forced`` tokens replace those of their requests."""
        with self.around():
            self.capture.force(forced)
            return Launched(self.worker.sample_tokens(grammar), bool(forced))

    def fetch(self, launched: Launched) -> tuple[ModelRunnerOutput, Captured]:
        """Wait for the oldest step in flight: its output, and what the device had."""
        with self.around():
            output = launched.future.get_output()
            return output, self.capture.take(output, launched.forced)

    def close(self) -> None:
        """Give back the runtime's threads."""
        self.rt.close()


def make_side(config: EngineConfig, weights: Weights, name: str, around: Around = nullcontext) -> Side:
    """A fresh machine and worker as ``config`` asks for. Raises as ``make_runtime`` and the runner do."""
    with around():
        rt = make_runtime(config.runner)
        try:
            if isinstance(rt, CpuRuntime):
                rt.threads = threads_for(config.runner, weights)
            return Side(config, rt, Worker(config, rt, weights), name, around)
        except BaseException:
            rt.close()  # its threads would outlive it
            raise


def weights_of(model: ModelConfig) -> Weights:
    """The seeded random weights of ``model``, the same at every call."""
    return load_model(model).weights


def refuse_unlike(a: EngineConfig, b: EngineConfig) -> None:
    """Raises ``ValueError`` for two configs whose runners could not follow one schedule with one set of weights."""
    for part in ("model", "cache", "scheduler", "spec"):
        one, other = getattr(a, part), getattr(b, part)
        for name in (part_field.name for part_field in dataclasses.fields(one)):
            left, right = getattr(one, name), getattr(other, name)
            if left != right:
                raise ValueError(
                    f"a twin has one schedule and one model: {part}.{name} is {left!r} in a and {right!r} in b; "
                    "give both the same, only RunnerConfig may differ"
                )


def equality_of(a: Side, b: Side) -> Equality:
    """The class of DESIGN.md: exact where both form the same batch order on the same kind of machine."""
    machines = [(side.rt.device.type, side.rt.backend, getattr(side.rt, "threads", None)) for side in (a, b)]
    return "exact" if machines[0] == machines[1] and a.batch_order == b.batch_order else "near"


def side_names(a: EngineConfig, b: EngineConfig) -> tuple[str, str]:
    """Short names that tell the two apart: the runner, and whatever else of RunnerConfig differs."""
    differing = [
        name.name
        for name in dataclasses.fields(a.runner)
        if name.name != "runner" and getattr(a.runner, name.name) != getattr(b.runner, name.name)
    ]
    made = []
    for config in (a, b):
        extra = ", ".join(f"{name}={getattr(config.runner, name)}" for name in differing)
        made.append(f"{config.runner.runner}({extra})" if extra else config.runner.runner)
    return ("a", "b") if made[0] == made[1] else (made[0], made[1])


def refuse_tokens(vocab: int, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raises ``ValueError`` for a token id of a request that is outside the vocabulary, or a bad word in letters."""
    words = [token for word in params.bad_words for token in word]
    if any(isinstance(token, str) for token in words):
        raise ValueError(f"a twin has no tokenizer; give bad_words as token ids, not {params.bad_words!r}")
    ids = (*prompt, *params.stop_token_ids, *params.logit_bias, *(params.allowed_token_ids or ()), *words)
    for token in ids:
        if not 0 <= int(token) < vocab:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab} (ids 0..{vocab - 1})")
