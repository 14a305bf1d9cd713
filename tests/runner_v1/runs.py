"""Whole workloads on either runner, with the logits behind every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mrv2lab.check.workloads import MODEL, Case, draw, make_case
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.request import Request
from tests.equality.harness import Trace, run_workload

SAME_BATCHES: dict[str, Any] = {"runner": "v1", "reorder": "mrv2"}
"""V1 in MRV2's batch order, so that even a matrix product's rows are the same."""

MANY_ROWS: dict[str, Any] = {"max_num_reqs": 64}
"""For :class:`Idle`: a hidden request has its row all the same."""


def greedy_case(index: int, *, sampling: str = "greedy", seed: int = 11, **setting: str) -> Case:
    """Draw ``index`` of 200 that cover every pair of settings, but for its sampling and what ``setting`` says."""
    chosen = draw(200, seed)[index] | {"sampling": sampling} | setting
    return make_case(index, chosen, vocab_size=MODEL.vocab_size, max_requests=24, seed=seed)


def run(case: Case, between: Callable[[Engine], None] | None = None, **options: Any) -> Trace:
    """On a fresh engine; ``options`` go before the case's own. ``between`` is called after every step."""
    with Engine(MODEL, device="cpu", **case.options | case.transport | options) as engine:
        return run_workload(engine, case.workload, aborts=case.aborts, between=between)


class Idle:
    """Called after every step: some running requests sit out the next one, hidden from the scheduler.

    Ours leaves a running request out only to let it end; vLLM's has more reasons, and V1 pays for each with a row that
    is evicted and filled again.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.hidden: list[Request] = []
        self.returns = 0

    def __call__(self, engine: Engine) -> None:
        running = engine.scheduler.running
        back = [request for request in self.hidden if not request.finished]
        running += back
        self.returns += len(back)
        keep = self.rng.random(len(running)) < 0.7
        self.hidden = [request for request, kept in zip(running, keep, strict=True) if not kept]
        running[:] = [request for request, kept in zip(running, keep, strict=True) if kept]
