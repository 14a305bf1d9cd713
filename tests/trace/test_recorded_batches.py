"""What was prefill in a recording: from where each request began, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import NewRequest, StepRecord
from mrv2lab.trace.annotations import Batch
from mrv2lab.trace.from_recording import from_recording
from mrv2lab.trace.recorded_batches import recorded_batches
from mrv2lab.trace.steps import steps
from tests.trace.test_from_recording import header

TRACES = Path(__file__).parents[2] / "traces"


def step(
    number: int, counts: dict[str, int], has_prefill: bool, new: dict[str, tuple[int, int]] | None = None
) -> StepRecord:
    """``new``: request -> (tokens known, computed)."""
    made = [
        NewRequest(name, 0, known, known, done, [[1]], 0.0, 0, False, 9) for name, (known, done) in (new or {}).items()
    ]
    scheduled = np.array([*counts.values()], np.int32)
    return StepRecord(number, req_ids=list(counts), num_scheduled=scheduled, has_prefill=has_prefill, new=made)


def batches(*records: StepRecord) -> list[Batch | None]:
    return recorded_batches(Recording(header(), list(records), title="run"))


def test_chunks_a_last_chunk_of_one_token_and_decode() -> None:
    found = batches(
        step(0, {"a": 4, "b": 4}, True, {"a": (4, 0), "b": (9, 0)}),
        step(1, {"a": 1, "b": 4}, True),
        step(2, {"a": 1, "b": 1}, True),
        step(3, {"a": 1, "b": 1}, False),
        step(4, {}, False),
    )
    assert found == [Batch(2, 8, 0, 0), Batch(1, 4, 1, 1), Batch(1, 1, 1, 1), Batch(0, 0, 2, 2), Batch(0, 0, 0, 0)]


def test_a_prefix_that_was_cached_is_not_prefilled() -> None:
    assert batches(step(0, {"a": 2, "b": 1}, True, {"a": (10, 8), "b": (1, 0)})) == [Batch(2, 3, 0, 0)]


def test_a_recording_that_begins_in_the_middle_says_what_it_knows() -> None:
    found = batches(step(7, {"a": 1, "b": 5}, True), step(8, {"b": 5}, True), step(9, {"a": 1, "b": 1}, False))
    assert found == [None, Batch(1, 5, 0, 0), Batch(0, 0, 2, 2)]


def test_a_keyframe_says_where_its_requests_are() -> None:
    first = step(7, {"a": 1, "b": 5}, True)
    first.keyframe = {"prefill_len": np.array([3, 20]), "num_computed_tokens": np.array([8, 10])}
    first.owners = {"a": 0, "b": 1}
    assert batches(first, step(8, {"a": 1, "b": 5}, False)) == [Batch(1, 5, 1, 1), Batch(0, 0, 2, 6)]


@pytest.mark.parametrize("name", ["h200_stories", "h200_mrv2_pinned_copy"])
def test_the_steps_of_shipped_recordings(name: str) -> None:
    recording = Recording.load(TRACES / f"{name}.mrv2rec")
    for record, batch in zip(recording.steps, recorded_batches(recording), strict=True):
        assert batch is not None
        assert batch.context_requests + batch.generation_requests == len(record.req_ids)
        assert (batch.context_requests > 0) == record.has_prefill
    frame = steps(from_recording(recording))
    assert ((frame["kind"] == "unknown") == (frame["requests"] == 0)).all()
    assert (frame["requests"] == frame["context_requests"] + frame["generation_requests"]).all()
