"""A step's output on its way to the host: the only thing anybody waits for. Counterpart in vLLM: ``async_utils.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import ModelRunnerOutput, OneTokenEach
from mrv2lab.runner.sample_output import StepExtras
from mrv2lab.runtime.base import Event, Runtime
from mrv2lab.state.prefix import Prefix


@dataclass(slots=True)
class OutputSlot:
    """Device and pinned buffers of one step in flight."""

    # [R, K + 1] int64 and [R] int32, device
    sampled: torch.Tensor
    num_sampled: torch.Tensor
    # their pinned copies
    sampled_host: torch.Tensor
    num_sampled_host: torch.Tensor
    sampled_np: np.ndarray[Any, np.dtype[np.int64]]
    num_sampled_np: np.ndarray[Any, np.dtype[np.int32]]
    ready: Event
    copied: Event
    owner: AsyncOutput | None = None
    num_ones: int = 0
    """First rows of ``num_sampled``, on the device and in its copy, that are known to hold 1."""
    first: tuple[Prefix, Prefix, Prefix, Prefix] = field(init=False)
    """The first rows of the four."""
    flat: Prefix = field(init=False)
    """The first elements of ``sampled``, as a vector."""

    def __post_init__(self) -> None:
        self.flat = Prefix(self.sampled.view(-1))
        self.first = (
            Prefix(self.sampled),
            Prefix(self.num_sampled),
            Prefix(self.sampled_host),
            Prefix(self.num_sampled_host),
        )


class AsyncOutput:
    """Tokens of one step; ``get_output`` waits for their copy. Nothing is read on the host before its event."""

    def __init__(self, rt: Runtime, slot: OutputSlot, step: int, req_ids: list[str], extras: StepExtras | None) -> None:
        self._rt = rt
        self._extras = extras
        self._slot: OutputSlot | None = slot
        self.step = step
        self.req_ids = req_ids

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy and return the tokens. Raises ``RuntimeError`` when called twice."""
        slot = self._slot
        if slot is None:
            raise RuntimeError(f"the output of step {self.step} was fetched already")
        with self._rt.observer.span("wait_output"):
            slot.copied.synchronize()
        sampled = self._tokens(slot)
        fields = {} if self._extras is None else self._extras.fields(slot.num_sampled_np[: len(self.req_ids)])
        self._slot = slot.owner = None
        return ModelRunnerOutput(self.step, self.req_ids, sampled, **fields)

    def peek(self) -> Sequence[list[int]]:
        """The tokens of an output that nobody has fetched, for an observer after a synchronisation; it stays there."""
        assert self._slot is not None
        return self._tokens(self._slot)

    def _tokens(self, slot: OutputSlot) -> Sequence[list[int]]:
        count = len(self.req_ids)
        if count <= slot.num_ones and slot.sampled_np.shape[1] == 1:
            return OneTokenEach(slot.sampled_np[:count, 0].copy())
        tokens: list[list[int]] = slot.sampled_np[:count].tolist()
        lengths = slot.num_sampled_np[:count]
        if lengths.min() == slot.sampled_np.shape[1]:  # none is cut short
            return tokens
        return [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]


class OutputRing:
    """Output buffers for as many steps as may be in flight, used in turn, so that a steady step allocates nothing."""

    def __init__(self, rt: Runtime, *, max_num_reqs: int, num_speculative_tokens: int, depth: int) -> None:
        self.rt = rt
        width = num_speculative_tokens + 1
        self._slots = [self._make(i, max_num_reqs, width) for i in range(depth)]
        self._next = 0

    def _make(self, i: int, rows: int, width: int) -> OutputSlot:
        rt = self.rt
        sampled_host = rt.empty((rows, width), torch.int64, name=f"sampled.{i}.host", place="pinned")
        num_host = rt.empty(rows, torch.int32, name=f"num_sampled.{i}.host", place="pinned")
        return OutputSlot(
            rt.zeros((rows, width), torch.int64, name=f"sampled.{i}"),
            rt.zeros(rows, torch.int32, name=f"num_sampled.{i}"),
            sampled_host,
            num_host,
            sampled_host.numpy(),
            num_host.numpy(),
            rt.event(f"sampled.{i}.ready"),
            rt.event(f"sampled.{i}.copied"),
        )

    def latest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Device buffers of the slot taken last, for observers: sampled [R, K + 1] int64, num_sampled [R] int32."""
        slot = self._slots[(self._next - 1) % len(self._slots)]
        return slot.sampled, slot.num_sampled

    def take(self) -> OutputSlot:
        """The next slot. Raises ``RuntimeError`` if its last output was never fetched: too many steps in flight."""
        slot = self._slots[self._next % len(self._slots)]
        if slot.owner is not None:
            raise RuntimeError(
                f"{len(self._slots)} steps are in flight; fetch the output of step {slot.owner.step} first"
            )
        self._next += 1
        return slot

    def send(
        self, slot: OutputSlot, step: int, req_ids: list[str], extras: StepExtras | None = None, num_ones: int = 0
    ) -> AsyncOutput:
        """Start the copy of the slot's tokens, and of ``extras``, on the copy stream; the main stream goes on.

        ``num_ones``: how many rows of ``num_sampled`` the host knows to hold 1. If the slot's copies did so before,
        they are not made again.
        """
        rt = self.rt
        count = len(req_ids)
        known = count <= num_ones <= slot.num_ones
        slot.ready.record(rt.main)
        rt.copy.wait_event(slot.ready)
        with rt.use(rt.copy):
            sampled, num_sampled, sampled_host, num_sampled_host = slot.first
            rt.d2h(sampled_host(count), sampled(count))
            if not known:
                slot.num_ones = 0
                rt.d2h(num_sampled_host(count), num_sampled(count))
            if extras is not None:
                extras.copy(rt)
            slot.copied.record(rt.copy)
        if not known:
            slot.num_ones = num_ones
        slot.owner = AsyncOutput(rt, slot, step, req_ids, extras)
        return slot.owner

    def reset(self) -> None:
        """Forget the outputs in flight, and what their dropped copies would have brought."""
        for slot in self._slots:
            slot.owner = None
            slot.num_ones = 0
