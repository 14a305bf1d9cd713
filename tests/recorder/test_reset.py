"""A reset in the middle of a recording: what was queued and dropped is neither believed nor shown."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.recorder.probes import Probes
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.replay import Replay
from mrv2lab.sample.sampling_state import SamplingState
from tests.engine.small import sampled, small_engine

each_transfer = pytest.mark.parametrize("transfer", ["barrier", "pinned_copy", "uva_pool"])


def settle_once(engine: Engine) -> None:
    """Three turns: two steps are in flight by turns, and two are settled."""
    for _ in range(3):
        engine.step()


def reset_with_an_upload_in_the_queue(transfer: str) -> Recording:
    with small_engine(transfer=transfer) as engine, Recorder(engine, check_every=1) as rec:
        engine.submit([1, 2, 3], sampled())
        settle_once(engine)
        engine.submit([4, 5], sampled())  # row 2; its parameters are uploaded by a step that never runs
        engine.step()
        engine.reset()
        engine.submit([6], sampled())
        settle_once(engine)
    return rec.recording


@each_transfer
def test_what_the_device_lacks_after_a_reset_is_recorded_when_it_comes(transfer: str) -> None:
    recording = reset_with_an_upload_in_the_queue(transfer)
    assert recording.verify() == []
    again = next(step for step in recording.steps[1:] if step.keyframe is not None)
    assert again.checksums


def differences_before_the_first_batch(transfer: str) -> list[str]:
    """Tables that differ after a reset and a step without a batch: nobody is added, and everything is published."""
    with small_engine(transfer=transfer) as engine, Recorder(engine) as rec:
        engine.submit([1, 2, 3], sampled())
        engine.step()
        engine.reset()
        engine.abort(engine.submit([6], sampled()))
        engine.step()
        live = {name: engine.rt.read(table).numpy() for name, table in engine.worker.runner.tables().items()}
        replay = Replay(rec.recording)
        replay.seek(len(rec.recording) - 1)
        return [name for name, table in live.items() if not np.array_equal(table, replay.tables[name])]


@each_transfer
def test_a_step_without_a_batch_after_a_reset(transfer: str) -> None:
    assert differences_before_the_first_batch(transfer) == []


def test_a_reset_that_does_not_publish_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingState, "reset", lambda state: None)
    assert differences_before_the_first_batch("pinned_copy") == ["temperature", "seeds"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_checksum_that_was_dropped_with_the_queue_is_not_believed(goes_on: bool) -> None:
    with small_engine() as engine, Recorder(engine, check_every=1) as rec:
        engine.submit([1, 2, 3], sampled())
        settle_once(engine)  # the last settled step's checksum is queued behind its output, and nobody needed it yet
        engine.reset()
        if goes_on:
            engine.submit([4], sampled())
            settle_once(engine)
    recording = rec.recording
    assert recording.verify() == []
    assert recording[0].checksums and not recording[1].checksums


def test_a_recorder_that_keeps_dropped_checksums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probes, "drop", lambda probes, number: None)
    with small_engine() as engine, Recorder(engine, check_every=1) as rec:
        engine.submit([1, 2, 3], sampled())
        settle_once(engine)
        engine.reset()
    assert rec.recording.verify() != []


def test_an_interrupt_where_a_span_begins_does_not_end_the_story() -> None:
    with small_engine() as engine, Recorder(engine) as rec:
        engine.submit([1, 2, 3], sampled())
        settle_once(engine)
        listener = rec.listener
        assert listener is not None
        now = listener._now

        def interrupted() -> int:
            listener._now = now
            raise KeyboardInterrupt

        listener._now = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.reset()
        engine.submit([4], sampled())
        settle_once(engine)
    assert [step.step for step in rec.recording] == [0, 1, 0, 1, 2]
    assert {span.depth for step in rec.recording.steps[2:] for span in step.spans if span.name == "schedule"} == {0}


def test_a_closed_engine_is_not_recorded() -> None:
    engine = small_engine()
    engine.close()
    with pytest.raises(RuntimeError, match="this engine was closed; make a new one"), Recorder(engine):
        pass
