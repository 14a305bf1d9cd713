"""The race detector over requests with every sampling parameter: no policy lets the host overwrite what a stage of the
sampler has yet to read."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.check.races import RaceDetector
from mrv2lab.check.workloads import MODEL, twin_cases
from mrv2lab.engine.engine import Engine
from mrv2lab.teach import mutants
from tests.slow import mostly_slow

CASES = twin_cases(200, max_requests=16, sampling="all")
POLICIES = ["barrier", "pinned_copy", "uva_pool"]


def run(index: int, **options: Any) -> RaceDetector:
    case = CASES[index]
    given = {"device": "cpu", "max_logprobs": -1} | case.options | {"async_scheduling": True} | options
    with Engine(MODEL, **given) as engine, RaceDetector(engine) as races:
        arrivals = list(case.workload)
        while (arrivals or engine.has_work()) and engine.num_steps < 60:
            while arrivals and arrivals[0].step <= engine.num_steps:
                arrival = arrivals.pop(0)
                engine.submit(arrival.prompt, arrival.params, priority=arrival.priority)
            engine.step()
    return races


@pytest.mark.parametrize("stream", mostly_slow([{"stream": "threaded"}, {}, {"lag": 1}], 1), ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_silent(runner: str, policy: str, stream: dict[str, Any]) -> None:
    if runner == "v1":
        stream = stream | {"reorder": "mrv2"}
    races = run(POLICIES.index(policy), runner=runner, transfer=policy, **stream)
    assert races.hazards == [] and races.corrupted_steps == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
@pytest.mark.parametrize("index", range(30))
def test_silent_over_many(index: int, runner: str, policy: str) -> None:
    races = run(index, runner=runner, transfer=policy)
    assert races.hazards == [] and races.corrupted_steps == []


@pytest.mark.slow  # a mutant of teach/ is the same
def test_counting_behind_the_output_is_found() -> None:
    """It was so once: nobody waits for what is queued behind a step's output, and it read a slot of the pool."""
    with mutants.counted_behind_the_output():
        hazards = [hazard for index in range(6) for hazard in run(index, transfer="uva_pool").hazards]
    assert {hazard.buffer.partition(".")[0] for hazard in hazards} <= {
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    }
    assert hazards and {hazard.reader.partition(" at ")[0] for hazard in hazards} == {"kernel count_sampled"}
