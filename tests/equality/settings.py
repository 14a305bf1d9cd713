"""Two hundred workloads, each with one seeded draw from the settings; every pair of settings occurs at least once."""

from __future__ import annotations

from functools import cache
from typing import Any

from mrv2lab.check import workloads
from mrv2lab.check.workloads import Case, Pair, Setting
from mrv2lab.engine.engine import Engine
from tests.equality.harness import Trace, run_workload
from tests.equality.models import MODELS, source

FACTORS: dict[str, tuple[str, ...]] = {"model": MODELS} | workloads.FACTORS

COUNT = 200
QUICK = 12
"""So many of them run in `make test`: the first, which cover the most pairs."""
ON_GPU = 20


def all_pairs() -> set[Pair]:
    """Every pair of values of two different factors."""
    return workloads.all_pairs(FACTORS)


@cache
def settings(count: int = COUNT, seed: int = 2) -> tuple[Setting, ...]:
    """The draws of this folder."""
    return workloads.draw(count, seed, FACTORS)


def label(index: int) -> str:
    """A test's id: what was drawn."""
    return f"{index:03}-" + "-".join(settings()[index].values())


def make_case(index: int, *, vocab_size: int, max_requests: int = 64) -> Case:
    """The workload of draw ``index``, seeded by it."""
    return workloads.make_case(index, settings()[index], vocab_size=vocab_size, max_requests=max_requests)


def run_case(case: Case, device: str = "cpu", **options: Any) -> Trace:
    """Run it on a fresh engine; ``options`` go before the case's own."""
    options = {"dtype": "float32"} | case.options | case.transport | options
    with Engine(source(case.setting["model"]), device=device, **options) as engine:
        return run_workload(engine, case.workload, aborts=case.aborts)
