"""A decoder small enough to be checked by hand: its attention adds to every token the length of its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from mrv2lab.config import GraphConfig, GraphMode, SchedulerConfig
from mrv2lab.graphs import BatchDescriptor, CudaGraphManager, DispatchTable
from mrv2lab.runtime.base import Runtime

LAYERS = 2


def table(mode: GraphMode = "full_and_piecewise", sizes: tuple[int, ...] = (2, 4, 8), reqs: int = 8) -> DispatchTable:
    """A table of those sizes over ``reqs`` requests and 64 tokens a step."""
    scheduler = SchedulerConfig(max_num_reqs=reqs, max_num_batched_tokens=64)
    return DispatchTable(GraphConfig(mode, sizes), scheduler)


class Toy:
    """Segments named like the decoder's, over buffers of ``size`` tokens and requests."""

    def __init__(self, rt: Runtime, size: int = 8) -> None:
        self.rt = rt
        self.size = size
        # [T] int32
        self.ids = rt.zeros(size, torch.int32, name="ids")
        # [R] int32 and [R + 1] int32
        self.seq_lens = rt.zeros(size, torch.int32, name="seq_lens")
        self.query_start_loc = rt.zeros(size + 1, torch.int32, name="query_start_loc")
        # [T] float32
        self.hidden = rt.empty(size, torch.float32, name="hidden")
        self.out = rt.empty(size, torch.float32, name="out")
        # [T] float32, what attention saw of each token, counted
        self.seen = rt.zeros(size, torch.float32, name="seen")
        rt.register("embed", _embed)
        for layer in range(LAYERS):
            rt.register(f"layer.{layer}.before_attention", _before)
            rt.register(f"layer.{layer}.attention", _attention)
            rt.register(f"layer.{layer}.after_attention", _after)
        rt.register("final_norm", _final)

    def write(self, ids: Sequence[int], seq_lens: Sequence[int], query_lens: Sequence[int]) -> None:
        """A step's inputs; padding rows are 0 and query_start_loc's tail is flat."""
        starts = np.zeros(self.size + 1, np.int32)
        starts[1 : len(query_lens) + 1] = np.cumsum(query_lens)
        starts[len(query_lens) + 1 :] = sum(query_lens)
        full = [np.array([*ids, *[0] * (self.size - len(ids))], np.int32)]
        full += [np.array([*seq_lens, *[0] * (self.size - len(seq_lens))], np.int32), starts]
        for buffer, values in zip((self.ids, self.seq_lens, self.query_start_loc), full, strict=True):
            pinned = self.rt.empty(len(values), torch.int32, name="values.tmp", place="pinned")
            pinned.numpy()[:] = values
            self.rt.h2d(buffer, pinned)

    def forward(self, tokens: int, reqs: int) -> torch.Tensor:
        """Queue every segment over ``tokens`` tokens, attention over ``reqs`` requests."""
        rt, hidden, out = self.rt, self.hidden[:tokens], self.out[:tokens]
        ids, lens, starts = self.ids[:tokens], self.seq_lens[:reqs], self.query_start_loc[: reqs + 1]
        rt.run("embed", hidden, ids, reads=(ids,), writes=(hidden,))
        for layer in range(LAYERS):
            name = f"layer.{layer}."
            rt.run(name + "before_attention", hidden, reads=(hidden,), writes=(hidden,))
            rt.run(
                name + "attention", out, hidden, lens, starts, self.seen,
                reads=(hidden, lens, starts), writes=(out, self.seen),
            )  # fmt: skip
            rt.run(name + "after_attention", hidden, out, reads=(hidden, out), writes=(hidden,))
        rt.run("final_norm", hidden, reads=(hidden,), writes=(hidden,))
        return hidden

    def prepare(self, descriptor: BatchDescriptor) -> Callable[[], object]:
        """For ``CudaGraphManager.capture``: a dummy batch that has no tokens in attention's eyes."""
        self.write([], [], [])
        tokens, reqs = descriptor.num_tokens, descriptor.num_reqs
        return lambda: self.forward(tokens, tokens if reqs is None else reqs)


def captured(toy: Toy, made: DispatchTable) -> CudaGraphManager:
    """A manager with every graph of ``made``."""
    manager = CudaGraphManager(toy.rt, made)
    manager.capture(toy.prepare, progress=False)
    return manager


def expected(ids: Sequence[int], seq_lens: Sequence[int], query_lens: Sequence[int]) -> list[float]:
    """What ``forward`` makes of a batch."""
    owners = np.repeat(seq_lens, query_lens)
    values = np.array(ids, np.float64) * 2
    for _ in range(LAYERS):
        values = (values + 1) + (values + 1 + owners) * 3
    return [float(value) for value in values - 5]


def _embed(hidden: torch.Tensor, ids: torch.Tensor) -> None:
    hidden.copy_(ids)
    hidden.mul_(2)


def _before(hidden: torch.Tensor) -> None:
    hidden.add_(1)


def _attention(
    out: torch.Tensor, hidden: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, seen: torch.Tensor
) -> None:
    """Without a branch on a device value, so that a GPU can capture it."""
    token = torch.arange(out.shape[0], device=out.device)
    inside = (starts[:-1, None] <= token) & (token < starts[1:, None])
    owned = inside.any(0)
    out.copy_(torch.where(owned, hidden + (inside * lens[:, None]).sum(0), float("nan")))
    seen[: out.shape[0]].add_(owned)


def _after(hidden: torch.Tensor, out: torch.Tensor) -> None:
    hidden.add_(out, alpha=3)


def _final(hidden: torch.Tensor) -> None:
    hidden.sub_(5)
