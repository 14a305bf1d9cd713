"""V1's outputs: tokens that were waited for already (synchronous loop), or that are still on their way.

Counterpart in vLLM: ``AsyncGPUModelRunnerOutput`` in ``v1/worker/gpu_model_runner.py``. The output keeps its own copy
of the batch's ids and discarded rows, since the batch has changed by the time somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import Logprobs, ModelRunnerOutput
from mrv2lab.runner_v1.logprobs import LogprobsBuffers
from mrv2lab.runtime.base import Event, Runtime


@dataclass(frozen=True, slots=True)
class Extras:
    """What a step's output holds besides tokens, where the batch asked for it."""

    num_logprobs: tuple[int, ...] | None = None
    """Of each row, as ``LogprobsBuffers.take`` wants them; None: nothing was put into the slot's buffers."""
    counts_nans: bool = False
    """Whether the slot's ``num_nans`` were written."""
    prompt_logprobs: Mapping[str, Logprobs] = field(default_factory=dict)
    errors: Callable[[], dict[int, str]] | None = None
    """Row -> reason; called once, behind the wait."""
    repairs: bool = False
    """Whether the next step will want these tokens on the host, to put them in place of placeholders."""


NO_EXTRAS = Extras()


@dataclass(slots=True)
class Slot:
    """Device and pinned buffers of one step in flight."""

    # [R, 1] int64, device
    sampled: torch.Tensor
    # its pinned copy
    sampled_host: torch.Tensor
    sampled_np: np.ndarray[Any, np.dtype[np.int64]]
    ready: Event
    copied: Event
    repair: Event
    """At the same point as ``copied``, for the next step's output repair: a wait with a name of its own."""
    logprobs: LogprobsBuffers
    # [R] int32, device, and its pinned copy
    num_nans: torch.Tensor
    num_nans_host: torch.Tensor
    owner: AsyncOutput | None = None

    def copy(self, rt: Runtime, count: int, extras: Extras) -> None:
        """Queue the copies to the host on the current stream."""
        rt.d2h(self.sampled_host[:count], self.sampled[:count])
        if extras.num_logprobs is not None:
            self.logprobs.copy_to_host()
        if extras.counts_nans:
            rt.d2h(self.num_nans_host[:count], self.num_nans[:count])

    def output(self, step: int, req_ids: list[str], discarded: list[int], extras: Extras) -> ModelRunnerOutput:
        """Everything that was copied, after the wait."""
        logprobs, num_nans, errors = None, {}, {}
        if extras.num_logprobs is not None:
            logprobs = self.logprobs.take(extras.num_logprobs, discarded)
        if extras.counts_nans:
            counts = zip(req_ids, self.num_nans_host[: len(req_ids)].tolist(), strict=True)
            num_nans = {req_id: count for req_id, count in counts if count}
        if extras.errors is not None:
            errors = {req_ids[row]: reason for row, reason in extras.errors().items()}
        tokens = self.tokens(len(req_ids), discarded)
        return ModelRunnerOutput(
            step, req_ids, tokens, logprobs, dict(extras.prompt_logprobs), num_nans=num_nans, errors=errors
        )

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

    def peek(self) -> Sequence[list[int]]:
        """The tokens, for an observer; they stay there."""
        assert self._output is not None
        return self._output.sampled_token_ids


class AsyncOutput:
    """Tokens of one step on their way; ``get_output`` waits for their copy."""

    def __init__(
        self, rt: Runtime, slot: Slot, step: int, req_ids: list[str], discarded: list[int], extras: Extras = NO_EXTRAS
    ) -> None:
        self._rt = rt
        self._slot: Slot | None = slot
        self._extras = extras
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
        output = slot.output(self.step, self.req_ids, self._discarded, self._extras)
        self._slot = slot.owner = None
        return output

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

    def _make(self, i: int, rows: int) -> Slot:
        rt = self.rt
        host = rt.empty((rows, 1), torch.int64, name=f"sampled.{i}.host", place="pinned")
        return Slot(
            rt.zeros((rows, 1), torch.int64, name=f"sampled.{i}"),
            host,
            host.numpy(),
            rt.event(f"sampled.{i}.ready"),
            rt.event(f"sampled.{i}.copied"),
            rt.event(f"sampled.{i}.output_repair"),
            LogprobsBuffers(rt, f"logprobs.{i}"),
            rt.zeros(rows, torch.int32, name=f"num_nans.{i}"),
            rt.empty(rows, torch.int32, name=f"num_nans.{i}.host", place="pinned"),
        )

    def latest(self) -> torch.Tensor:
        """Device buffer of the slot taken last, for observers: sampled [R, 1] int64."""
        return self._slots[(self._next - 1) % len(self._slots)].sampled

    def take(self) -> Slot:
        """The next slot. Raises ``RuntimeError`` if its last output was never fetched: too many steps in flight."""
        slot = self._slots[self._next % len(self._slots)]
        if slot.owner is not None:
            raise RuntimeError(
                f"{len(self._slots)} steps are in flight; fetch the output of step {slot.owner.step} first"
            )
        self._next += 1
        return slot

    def wait(
        self, slot: Slot, step: int, req_ids: list[str], discarded: list[int], extras: Extras = NO_EXTRAS
    ) -> ModelRunnerOutput:
        """Synchronous loop: copy behind the sampler and wait for it; for the event, since ``.tolist()`` on the device
        would wait for all of the device (vLLM #22754)."""
        slot.copy(self.rt, len(req_ids), extras)
        slot.copied.record(self.rt.main)
        slot.copied.synchronize()
        return slot.output(step, req_ids, discarded, extras)

    def send(
        self, slot: Slot, step: int, req_ids: list[str], discarded: list[int], extras: Extras = NO_EXTRAS
    ) -> AsyncOutput:
        """Asynchronous loop: start the copies on the copy stream; the main stream goes on."""
        rt = self.rt
        slot.ready.record(rt.main)
        rt.copy.wait_event(slot.ready)
        with rt.use(rt.copy):
            slot.copy(rt, len(req_ids), extras)
            slot.copied.record(rt.copy)
            if extras.repairs:
                slot.repair.record(rt.copy)
        slot.owner = AsyncOutput(rt, slot, step, req_ids, discarded, extras)
        return slot.owner

    def reset(self) -> None:
        """Forget the outputs in flight."""
        for slot in self._slots:
            slot.owner = None
