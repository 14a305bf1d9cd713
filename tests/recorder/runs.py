"""Runs that recorder tests share: arrivals, ends, aborts, preemptions, chunks and prefix hits on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import Mark
from mrv2lab.protocol import SamplingParams
from mrv2lab.recording.schema import MarkRecord
from tests.engine.small import MODEL

OPTIONS: dict[str, Any] = {
    "max_num_reqs": 6,
    "num_blocks": 14,
    "block_size": 4,
    "max_model_len": 40,
    "max_num_batched_tokens": 24,
    "device": "cpu",
}
TRANSPORTS: list[dict[str, Any]] = [
    {},
    {"lag": 0},
    {"stream": "threaded"},
    {"transfer": "barrier"},
    {"transfer": "pinned_copy", "lag": 1},
    {"async_scheduling": False},
]


@contextmanager
def busy_engine(**options: Any) -> Iterator[Engine]:
    """Six rows and a tight pool."""
    with Engine(MODEL, **OPTIONS | options) as engine:
        yield engine


def work(engine: Engine, steps: int = 40, seed: int = 0, after: Callable[[int], None] = lambda i: None) -> None:
    """``steps`` turns of a run that has everything in it; ``after(i)`` is called behind each."""
    rng = np.random.default_rng(seed)
    for i in range(steps):
        if rng.random() < 0.4 and len([o for o in engine.requests.values() if not o.finished]) < 9:
            shared = [1, 2, 3, 4, 5, 6, 8, 9] if rng.random() < 0.5 else []
            prompt = [*shared, *rng.integers(10, 61, int(rng.integers(1, 12))).tolist()]
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 14)),
                temperature=float(rng.integers(0, 2)),
                ignore_eos=rng.random() < 0.7,
            )
            engine.submit(prompt, params)
        if rng.random() < 0.05:
            live = [o.request_id for o in engine.requests.values() if not o.finished]
            if live:
                engine.abort(live[int(rng.integers(len(live)))])
        engine.step()
        after(i)


def tokens(engine: Engine) -> dict[str, list[int]]:
    """What came out."""
    return {req_id: output.token_ids for req_id, output in engine.requests.items()}


def device_work(marks: list[Mark] | list[MarkRecord]) -> list[tuple[Any, ...]]:
    """What the device was asked to do, in order: every mark without its times, the recorder's own left out."""
    return [
        (mark.kind, mark.name, mark.stream, mark.nbytes, mark.reads, mark.writes)
        for mark in marks
        if not getattr(mark, "added", False)
    ]
