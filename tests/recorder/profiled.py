"""Profiles that several test files look at."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import Observer
from mrv2lab.recorder.profile import Profile, profile
from mrv2lab.trace.trace import Trace
from tests.recorder.runs import busy_engine, work


def profiled(options: dict[str, Any], steps: int = 12, **how: Any) -> tuple[Engine, Profile]:
    """A closed engine after ``steps`` turns under a profile."""
    with busy_engine(**options) as engine, profile(engine, **how) as p:
        work(engine, steps)
    return engine, p


def step_numbers(trace: Trace) -> list[int]:
    names = [trace.name_of(i) for i in np.flatnonzero(trace.named(lambda name: name.startswith("mrv2lab.step#")))]
    return [int(name.removeprefix("mrv2lab.step#")) for name in names]


def phase_counts(trace: Trace) -> Counter[str]:
    phases = trace.select(trace.mask("phase"))
    return Counter(phases.name_of(i).removeprefix("mrv2lab.phase.") for i in range(len(phases)))


def assert_untouched(engine: Engine, observer: Observer) -> None:
    assert engine.observer is observer
    assert engine.core.observer is observer
    assert "step" not in vars(engine)
