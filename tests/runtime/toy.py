"""The first experiment: a toy step of twelve launches on two streams, two steps in flight."""

from __future__ import annotations

import numpy as np
import torch

from mrv2lab.observer import NULL_OBSERVER, Observer
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES

N = 64


def _add(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.add_(src)


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


def run_toy(rt: Runtime, policy: str, steps: int = 30, depth: int = 2, item_at: int | None = None) -> int:
    """Run ``steps`` toy steps and return how many delivered wrong numbers."""
    rt.register("toy.add", _add)
    rt.register("toy.copy", _copy)
    transfers = POLICIES[policy](rt, depth)
    states = transfers.table("states", N, torch.int32)
    ids = transfers.upload("ids", N, torch.int32)
    total = rt.zeros(N, torch.int32, name="total")
    one = rt.zeros(N, torch.int32, name="one")
    rt.raw(one).fill_(1)
    outs = [rt.empty(N, torch.int32, name=f"out{i}", place="pinned") for i in range(2)]
    results = [rt.zeros(N, torch.int32, name=f"result{i}") for i in range(2)]
    flight: list[tuple[int, object]] = []
    wrong = 0

    def finish() -> int:
        step, event = flight.pop(0)
        event.synchronize()  # type: ignore[attr-defined]
        return int(not np.array_equal(outs[step % 2].numpy(), expected(step)))

    def expected(step: int) -> np.ndarray:
        return (np.arange(N) * 3 + step * 7) + (step * 1000 + np.arange(N)) + 8

    for step in range(steps):
        with transfers.prepare():
            states.np[:] = np.arange(N) * 3 + step * 7
            states.publish()
            sent = ids.send((step * 1000 + np.arange(N)).astype(np.int32))
        rt.run("toy.copy", total, states.gpu, reads=(states.gpu,), writes=(total,))
        rt.run("toy.add", total, sent, reads=(sent,), writes=(total,))
        for _ in range(8):
            rt.run("toy.add", total, one, reads=(one,), writes=(total,))
        if step == item_at:
            total[0].item()
        rt.run("toy.copy", results[step % 2], total, reads=(total,), writes=(results[step % 2],))
        ready = rt.event("ready")
        ready.record()
        rt.copy.wait_event(ready)
        with rt.use(rt.copy):
            rt.d2h(outs[step % 2], results[step % 2])
            copied = rt.event("copied")
            copied.record()
        flight.append((step, copied))
        rt.end_step()
        if len(flight) == 2:
            wrong += finish()
    while flight:
        wrong += finish()
    return wrong


def toy_on_cpu(
    policy: str, observer: Observer = NULL_OBSERVER, *, stream: str = "deferred", lag: int | None = None, **options: int
) -> int:
    """:func:`run_toy` on a fresh CPU runtime."""
    rt = CpuRuntime(stream=stream, lag=lag, observer=observer)
    try:
        return run_toy(rt, policy, **options)
    finally:
        rt.close()
