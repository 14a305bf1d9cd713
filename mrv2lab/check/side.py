"""One of a twin's two runners, with everything that belongs to it alone: machine, worker, message, capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mrv2lab.check.capture import Capture
from mrv2lab.check.compare import Captured
from mrv2lab.config import EngineConfig, ModelConfig
from mrv2lab.engine.options import threads_for
from mrv2lab.engine.projections import V1Projection, project_mrv2
from mrv2lab.engine.request import Request
from mrv2lab.engine.worker import Worker
from mrv2lab.model.load import load_model
from mrv2lab.protocol import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
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

    def launch(self, message: Any, forced: Mapping[str, int]) -> Launched | None:
        """Queue a step; None if it has no tokens. ``forced`` tokens replace those of their requests."""
        with self.around():
            self.capture.force(forced)
            if not self.worker.execute_model(message):
                return None
            return Launched(self.worker.sample_tokens(), bool(forced))

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
