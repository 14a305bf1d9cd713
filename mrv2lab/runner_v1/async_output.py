"""V1's outputs: tokens that were waited for already (synchronous loop), or that are still on their way.

Counterpart in vLLM: ``AsyncGPUModelRunnerOutput`` in ``v1/worker/gpu_model_runner.py``. The output keeps its own copy
of the batch's ids and discarded rows, since the batch has changed by the time somebody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import ModelRunnerOutput
from mrv2lab.runtime.base import Event, Runtime


@dataclass(slots=True)
class _Slot:
    """Device and pinned buffers of one step in flight."""

    # [R, 1] int64, device
    sampled: torch.Tensor
    # its pinned copy
    sampled_host: torch.Tensor
    sampled_np: np.ndarray[Any, np.dtype[np.int64]]
    ready: Event
    copied: Event
    owner: AsyncOutput | None = None

    def tokens(self, count: int, discarded: list[int]) -> list[list[int]]:
        """The copied tokens of the first ``count`` rows; nothing for a discarded one."""
        tokens: list[list[int]] = self.sampled_np[:count].tolist()
        for row in discarded:
            tokens[row] = []
        return tokens


class SyncOutput:
    """Tokens that are on the host."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output: ModelRunnerOutput | None = output
        self.step = output.step
        self.req_ids = output.req_ids

    def get_output(self) -> ModelRunnerOutput:
        """The tokens, at once. Raises ``RuntimeError`` when called twice."""
        output, self._output = self._output, None
        if output is None:
            raise RuntimeError(f"the output of step {self.step} was fetched already")
        return output

    def peek(self) -> list[list[int]]:
        """The tokens, for an observer; they stay there."""
        assert self._output is not None
        return self._output.sampled_token_ids


class AsyncOutput:
    """Tokens of one step on their way; ``get_output`` waits for their copy."""

    def __init__(self, rt: Runtime, slot: _Slot, step: int, req_ids: list[str], discarded: list[int]) -> None:
        self._rt = rt
        self._slot: _Slot | None = slot
        self._discarded = discarded
        self.step = step
        self.req_ids = req_ids

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy and return the tokens. Raises ``RuntimeError`` when called twice."""
        slot = self._slot
        if slot is None:
            raise RuntimeError(f"the output of step {self.step} was fetched already")
        with self._rt.observer.span("wait_output"):
            slot.copied.synchronize()
        tokens = slot.tokens(len(self.req_ids), self._discarded)
        self._slot = slot.owner = None
        return ModelRunnerOutput(self.step, self.req_ids, tokens)

    def peek(self) -> list[list[int]]:
        """The tokens of an output that nobody has fetched, for an observer after a synchronisation; it stays there."""
        assert self._slot is not None
        return self._slot.tokens(len(self.req_ids), self._discarded)


class OutputRing:
    """Output buffers for as many steps as may be in flight, used in turn.

    Step N + 1 takes its input tokens from step N's ``sampled``; the slot is written again by step N + depth, in stream
    order behind that.
    """

    def __init__(self, rt: Runtime, *, max_num_reqs: int, depth: int) -> None:
        self.rt = rt
        self._slots = [self._make(i, max_num_reqs) for i in range(depth)]
        self._next = 0

    def _make(self, i: int, rows: int) -> _Slot:
        rt = self.rt
        host = rt.empty((rows, 1), torch.int64, name=f"sampled.{i}.host", place="pinned")
        return _Slot(
            rt.zeros((rows, 1), torch.int64, name=f"sampled.{i}"),
            host,
            host.numpy(),
            rt.event(f"sampled.{i}.ready"),
            rt.event(f"sampled.{i}.copied"),
        )

    def latest(self) -> torch.Tensor:
        """Device buffer of the slot taken last, for observers: sampled [R, 1] int64."""
        return self._slots[(self._next - 1) % len(self._slots)].sampled

    def take(self) -> _Slot:
        """The next slot. Raises ``RuntimeError`` if its last output was never fetched: too many steps in flight."""
        slot = self._slots[self._next % len(self._slots)]
        if slot.owner is not None:
            raise RuntimeError(
                f"{len(self._slots)} steps are in flight; fetch the output of step {slot.owner.step} first"
            )
        self._next += 1
        return slot

    def to_list(self, slot: _Slot, count: int, discarded: list[int]) -> list[list[int]]:
        """Synchronous loop: copy behind the sampler and wait for it; for the event, since ``.tolist()`` on the device
        would wait for all of the device (vLLM #22754)."""
        self.rt.d2h(slot.sampled_host[:count], slot.sampled[:count])
        slot.copied.record(self.rt.main)
        slot.copied.synchronize()
        return slot.tokens(count, discarded)

    def send(self, slot: _Slot, step: int, req_ids: list[str], discarded: list[int]) -> AsyncOutput:
        """Asynchronous loop: start the copy on the copy stream; the main stream goes on."""
        rt = self.rt
        count = len(req_ids)
        slot.ready.record(rt.main)
        rt.copy.wait_event(slot.ready)
        with rt.use(rt.copy):
            rt.d2h(slot.sampled_host[:count], slot.sampled[:count])
            slot.copied.record(rt.copy)
        slot.owner = AsyncOutput(rt, slot, step, req_ids, discarded)
        return slot.owner

    def reset(self) -> None:
        """Forget the outputs in flight."""
        for slot in self._slots:
            slot.owner = None
