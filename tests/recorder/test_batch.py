"""A capture names the batch of each step: the one being executed, whoever runs it, and as the runner sees it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from mrv2lab.protocol import ContinuedData, RequestData, SamplingParams, SchedulerOutput
from mrv2lab.recorder import annotate as annotate_module
from mrv2lab.recorder.annotate import Annotator
from mrv2lab.recorder.batch import batch_of
from mrv2lab.recorder.profile import Profile, profile
from mrv2lab.trace.annotations import Batch, parse_batch
from mrv2lab.trace.from_recording import SETTLING
from mrv2lab.trace.recorded_batches import recorded_batches
from mrv2lab.trace.step_batches import PARTS
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Trace
from tests.recorder.runs import busy_engine, work
from tests.recorder.test_profile import CPU

GRAPHS: dict[str, Any] = {
    "cudagraph_mode": "full_decode_only",
    "cudagraph_capture_sizes": (1, 2, 4, 6),
    "warm_up": False,
}
RUNNERS: list[dict[str, Any]] = [
    {"runner": "v1"},
    {"runner": "mrv2"},
    {"runner": "v1", "async_scheduling": False, **GRAPHS},
    {"runner": "mrv2", "async_scheduling": False},
    {"runner": "mrv2", **GRAPHS},
]


def request(req_id: str, known: int) -> RequestData:
    return RequestData(req_id, known, [1] * known, SamplingParams(), 0, False, ([1],), 0)


def schedule(counts: dict[str, int], outputs: dict[str, int], **more: Any) -> SchedulerOutput:
    """``outputs``: of the continued requests."""
    continued = ContinuedData(list(outputs), np.zeros(len(outputs), np.int32), np.array([*outputs.values()], np.int32))
    total = sum(counts.values())
    return SchedulerOutput(
        3, continued=continued, num_scheduled_tokens=counts, total_num_scheduled_tokens=total, **more
    )


def test_who_is_in_prefill() -> None:
    new, resumed = [request("n", 5)], [request("r", 9)]
    counts = {"d": 1, "n": 5, "r": 4, "last chunk": 1, "again": 3}
    outputs = {"d": 2, "last chunk": 0, "again": 6}
    assert batch_of(schedule(counts, outputs, new=new, resumed=resumed)) == Batch(4, 13, 1, 1)


def test_drafts_are_decode() -> None:
    drafts = {"d": [-1, -1], "e": [7]}
    made = schedule({"d": 3, "e": 3, "f": 1}, {"d": 4, "e": 4, "f": 1}, scheduled_draft_tokens=drafts)
    assert batch_of(made) == Batch(1, 3, 2, 4)


def test_a_step_without_tokens() -> None:
    assert batch_of(SchedulerOutput(0)) == Batch(0, 0, 0, 0)


def as_on_a_gpu(options: dict[str, Any], turns: int = 14) -> Profile:
    """All of a GPU's capture but the device."""
    with busy_engine(**options) as engine:
        p = profile(engine, warmup=3, activities=[CPU], record=False)
        p._on_gpu = True
        with p:
            work(engine, turns)
    return p


@functools.cache
def captured(runner: int) -> Profile:
    return as_on_a_gpu(RUNNERS[runner])


def without_facts(trace: Trace) -> Trace:
    return dataclasses.replace(trace, info=dataclasses.replace(trace.info, extra={}))


def executed(p: Profile) -> list[list[int]]:
    return [[t.schedule.step, *batch_of(t.schedule)] for t in p.log.turns if t.schedule is not None]


def check_names(p: Profile) -> None:
    frame = steps(without_facts(p.trace))
    assert frame[["number", *PARTS]].to_numpy().tolist() == executed(p)
    assert {"mixed", "decode"} <= set(frame["kind"])
    assert not any("batch" in said for said in frame.attrs["cannot_say"])


@pytest.mark.parametrize(
    "runner", range(len(RUNNERS)), ids=["v1", "mrv2", "v1-sync-graphs", "mrv2-sync", "mrv2-graphs"]
)
def test_a_capture_names_the_step_that_is_executed(runner: int) -> None:
    check_names(captured(runner))


def test_mutant_the_batch_of_the_step_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the engine had scheduled when the turn began."""
    begin = Annotator.begin_turn

    def early(self: Annotator, step: int) -> None:
        begin(self, step)
        batch = batch_of(self._engine.core.last_schedule or SchedulerOutput(0))
        monkeypatch.setattr(annotate_module, "batch_of", lambda schedule: batch)

    monkeypatch.setattr(Annotator, "begin_turn", early)
    with pytest.raises(AssertionError):
        check_names(as_on_a_gpu(RUNNERS[1], 10))


@pytest.mark.parametrize("runner", [0, 1], ids=["v1", "mrv2"])
def test_nothing_of_another_step_lies_within_the_range(runner: int) -> None:
    """Under asynchronous scheduling the turn settles the step before, behind the range."""
    trace = captured(runner).trace
    ranges = [event for event in range(len(trace)) if parse_batch(trace.name_of(event)) is not None]
    phases = np.flatnonzero(trace.mask("phase"))
    seen = set()
    for event in ranges:
        inside = phases[(trace.start[phases] >= trace.start[event]) & (trace.end[phases] <= trace.end[event])]
        seen |= {trace.name_of(int(one)).removeprefix("mrv2lab.phase.") for one in inside}
    assert {"update_states", "prepare_inputs", "forward", "sample"} <= seen
    assert not seen & {"schedule", *SETTLING}
    assert len(ranges) > 5


@pytest.mark.parametrize("options", [RUNNERS[0], RUNNERS[1]], ids=lambda one: one["runner"])
def test_a_software_streams_trace_says_it_too(options: dict[str, Any]) -> None:
    with busy_engine(**options) as engine, profile(engine, warmup=3, record=False) as p:
        work(engine, 24)
    frame = steps(p.trace)
    assert frame[["number", *PARTS]].dropna().to_numpy().tolist() == executed(p)


def test_schedule_and_runner_agree() -> None:
    """The schedule's view, as named, and the recorded rows' own, which knows where every prefill ends."""
    with busy_engine() as engine, profile(engine, warmup=0) as p:
        work(engine)
    recording = p.recording
    assert recording is not None
    rows = [
        [step.step, *batch] for step, batch in zip(recording.steps, recorded_batches(recording), strict=True) if batch
    ]
    assert len(rows) >= len(executed(p)) - 1 > 20
    named = {row[0]: row for row in executed(p)}
    assert rows == [named[row[0]] for row in rows]
    assert any(step.new and step.new[0].resumed for step in recording.steps)
