"""Synthetic runs of steps: phases on the host, one copy and one kernel a step, by hand-made numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import Lane, Trace, TraceInfo

STEPS = Lane("1", "steps")
HOST = Lane("1", "host")
STREAM = Lane("GPU 0", "7", role="stream", device=0, stream=7)
GAP = 1_000
"""ns between two steps."""
COUNT = 16
BATCH = [(4, 4)] * COUNT


def run_of_steps(
    host_ns: Sequence[int],
    phases: Mapping[str, Sequence[int]] | None = None,
    *,
    title: str = "run",
    start: int = 0,
    first_number: int = 0,
    names: Sequence[str] | None = None,
    batches: Sequence[tuple[int, int]] | None = None,
    gpu_ns: Sequence[int] | None = None,
    barrier: bool = False,
    device_late_ns: int = 500,
    **info: Any,
) -> Trace:
    """Steps one after the other from ``start``; of each, its phases one after the other, and where ``gpu_ns`` is given
    a launch at its start that owns one kernel, ``device_late_ns`` later. ``batches``: (requests, tokens) a step."""
    builder = TraceBuilder()
    at = start
    for row, length in enumerate(host_ns):
        arg = -1
        if batches is not None:
            arg = builder.arg(orjson.dumps({"requests": batches[row][0], "tokens": batches[row][1]}))
        name = names[row] if names is not None else f"mrv2lab.step#{first_number + row}"
        builder.add(at, length, name, "annotation", STEPS, arg=arg)
        inside = at
        for phase, lengths in (phases or {}).items():
            if lengths[row]:
                builder.add(inside, lengths[row], f"mrv2lab.phase.{phase}", "phase", HOST)
            inside += lengths[row]
        if gpu_ns is not None:
            builder.add(at + 1, 10, "cudaLaunchKernel", "runtime", HOST, correlation=row)
            builder.add(at + device_late_ns, gpu_ns[row], "gemm", "kernel", STREAM, correlation=row)
        if barrier:
            builder.add(at + 12, 20, "cudaEventSynchronize", "runtime", HOST)
        at += length + GAP
    return builder.build(TraceInfo(**({"producer": "chrome", "title": title} | info)))


def noisy(seed: int, median: int = 100_000, noise: float = 0.05, count: int = COUNT) -> list[int]:
    """Lengths in ns around a median."""
    return np.rint(np.random.default_rng(seed).normal(median, noise * median, count)).astype(int).tolist()


def verdicts(found: Any) -> dict[str, str]:
    """Of a comparison: phase -> verdict."""
    return dict(zip(found.frame["phase"], found.frame["verdict"], strict=True))
