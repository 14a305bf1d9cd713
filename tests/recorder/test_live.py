"""A live engine in the explorer: recorded steps at speed, a standing step as the device has it, and every way out."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import WAITS, EventLog, Observer
from mrv2lab.recorder import readback
from mrv2lab.recorder.live import NOTHING_TO_DO, LiveSource
from mrv2lab.recorder.paused import PausedStep
from mrv2lab.recorder.readback import SYNCHRONISED, Readback
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.view import StepView
from tests.engine.small import sampled, small_engine
from tests.recorder.runs import busy_engine, tokens, work
from tests.recorder.stops import (
    FAR_TOO_LONG,
    a_stop_interrupts,  # noqa: F401
    press_stop,
    press_stop_and_let_the_reader_wait_again,
)
from tests.recorder.test_paused import LAUNCH, no_thread_is_left  # noqa: F401

RESET = "engine.reset() drops the unfinished requests and makes the engine usable again"


def engine_with_work(**options: Any) -> Engine:
    engine = small_engine(**{"async_scheduling": False} | options)
    engine.submit([1, 2, 3], sampled(6))
    engine.submit([4, 5, 6, 8], sampled(6))
    return engine


# -- AS2: which mode waits ---------------------------------------------------------------------------------------------
def waits_without_explorer() -> list[str]:
    log = EventLog()
    with busy_engine() as engine:
        engine.observer = log
        work(engine, 20)
    return [mark.name for mark in log.waits()]


def test_record_mode_adds_no_wait() -> None:
    with busy_engine() as engine:
        source = LiveSource(engine)
        work(engine, 20, after=lambda i: [source.view(k) for k in range(len(source))])
        marks = [mark for step in engine.observer.recorder.recording for mark in step.marks]  # type: ignore[attr-defined]
        views = [source.view(k).meta for k in range(len(source))]
        waits = [mark for mark in sorted(marks, key=lambda mark: mark.time_ns) if mark.kind in WAITS]
        source.close()
    assert [wait.name for wait in waits] == waits_without_explorer()
    assert {wait.phase for wait in waits} == {"wait_output"}
    assert {view["mode"] for view in views} == {"record"}
    assert not any(SYNCHRONISED in view["notes"] for view in views)


def test_mutant_a_view_that_reads_the_device_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    look = LiveSource.view

    def reads(self: LiveSource, index: int) -> StepView:
        readback.read_tables(self._open().engine)
        return look(self, index)

    monkeypatch.setattr(LiveSource, "view", reads)
    with pytest.raises(AssertionError):
        test_record_mode_adds_no_wait()


def test_step_mode_says_that_it_synchronises() -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        assert source.advance("step") is None
        assert source.advance("phase") is None
        standing = source.view(1).meta
        assert source.advance("step") is None
        passed = source.view(1).meta
        source.close()
    for meta, after in ((standing, "schedule"), (passed, None)):
        assert (meta["mode"], meta["paused_after"]) == ("step", after)
        assert meta["notes"][-1] == SYNCHRONISED
    waits = Counter((mark["name"], mark["added"]) for mark in passed["marks"] if mark["kind"] in WAITS)
    assert waits[("sampled.1.copied", False)] + waits[("sampled.0.copied", False)] == 1
    assert waits[("main", True)] >= 12
    assert {wait for wait in waits if not wait[1]} <= {("sampled.0.copied", False), ("sampled.1.copied", False)}


# -- stepping ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_one_by_one_give_the_same_tokens(asynchronous: bool) -> None:
    with engine_with_work(async_scheduling=asynchronous) as engine:
        while engine.has_work():
            engine.step()
        plain = tokens(engine)
    with engine_with_work(async_scheduling=asynchronous) as engine:
        source = LiveSource(engine)
        lengths = []
        while engine.has_work():
            assert source.advance("step") is None
            lengths.append(len(source))
        assert source.advance("step") == NOTHING_TO_DO
        assert source.advance("phase") == NOTHING_TO_DO
        assert tokens(engine) == plain
        assert lengths == list(range(1, len(source) + 1))
        assert [source.view(i).meta["step"] for i in range(len(source))] == list(range(len(source)))
        source.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_phases_one_by_one_give_the_same_tokens(asynchronous: bool) -> None:
    with engine_with_work(async_scheduling=asynchronous) as engine:
        while engine.has_work():
            engine.step()
        plain = tokens(engine)
    with engine_with_work(async_scheduling=asynchronous) as engine:
        source = LiveSource(engine)
        seen = []
        while source.advance("phase") is None:
            meta = source.view(len(source) - 1).meta
            assert meta["count"] == len(source)
            seen.append((meta["step"], meta["paused_after"]))
        assert tokens(engine) == plain
        assert seen[:11] == [(0, phase) for phase in LAUNCH]
        assert engine.observer.recorder.recording.verify() == []  # type: ignore[attr-defined]
        source.close()


def test_steps_of_ones_own_appear() -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        assert len(source) == 0
        engine.step()
        engine.step()
        assert len(source) == 2
        meta = source.view(1).meta
        assert (meta["title"], meta["live"], meta["count"], meta["step"]) == ("live engine", True, 2, 1)
        assert meta["top_k"] is not None
        with pytest.raises(IndexError, match=r"step 2 is outside 0..1 of live engine"):
            source.view(2)
        with pytest.raises(ValueError, match="'step' or 'phase', got 'year'"):
            source.advance("year")
        source.close()
        with pytest.raises(RuntimeError, match="was closed"):
            len(source)


def test_the_engine_can_be_used_between_phases_of_the_explorer() -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        source.advance("phase")
        with pytest.raises(RuntimeError, match="the explorer's Next step"):
            engine.step()
        engine.submit([9], sampled(2), request_id="late")
        assert source.advance("step") is None
        assert source.advance("step") is None
        assert source.view(1).meta["requests"][-1] == "late"
        source.close()


# -- errors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unit", ["step", "phase"])
def test_errors_become_sentences_and_reset_helps(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("boom\n  twice")

    with engine_with_work() as engine:
        source = LiveSource(engine)
        source.advance("step")
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker.runner.block_tables, "gather", broken)
            said = [source.advance(unit) for _ in range(1 if unit == "step" else 5)]
        assert said[:-1] == [None] * (len(said) - 1)
        assert said[-1] == f"ValueError: boom twice; {RESET}"
        assert source.advance(unit) == f"a step broke off with ValueError; {RESET}"
        assert len(source) in (1, 2)
        assert source.view(0).meta["step"] == 0
        engine.reset()
        assert len(source) == 1
        assert source.advance(unit) == NOTHING_TO_DO
        engine.submit([7, 8], sampled(3), request_id="after")
        assert source.advance("step") is None
        assert source.view(1).meta["requests"] == ["after"]
        source.close()


def test_reset_while_a_step_stands() -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        for _ in range(4):
            source.advance("phase")
        assert len(source) == 1
        engine.reset()
        assert len(source) == 0
        engine.submit([7, 8], sampled(3), request_id="after")
        for _ in range(2):
            assert source.advance("phase") is None
        assert source.view(0).meta["words"] == ["after enters row 3: 2 prompt tokens, of which 0 cached"]
        source.close()


@pytest.mark.parametrize("unit", ["step", "phase"])
def test_an_interrupt_becomes_a_sentence(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        gather = engine.worker.runner.block_tables.gather

        def slow(*args: Any) -> Any:
            press_stop() if unit == "step" else press_stop_and_let_the_reader_wait_again()
            return gather(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engine.worker.runner.block_tables, "gather", slow)
            said = [source.advance(unit) for _ in range(1 if unit == "step" else 5)]
        if unit == "step":  # the step itself was hit
            assert said == [f"interrupted in the middle of a step; {RESET}"]
            engine.reset()
            engine.submit([7, 8], sampled(3))
        else:  # the waiting was hit, and the phase went on
            assert said == [None] * 4 + ["interrupted; go on when you like"]
            assert source.advance("phase") is None
            assert source.view(0).meta["paused_after"] == "gather"
        assert source.advance("step") is None
        source.close()


def test_a_closed_engine_says_so() -> None:
    engine = engine_with_work()
    source = LiveSource(engine)
    source.advance("phase")
    engine.close()
    assert source.advance("step") == "this engine was closed; make a new one"
    source.close()
    with pytest.raises(RuntimeError, match="this engine was closed"):
        LiveSource(engine)


# -- several of them, and the end --------------------------------------------------------------------------------------
def test_two_explorers_on_one_engine() -> None:
    with engine_with_work() as engine:
        before = engine.observer
        one, two = LiveSource(engine), LiveSource(engine)
        assert one.advance("step") is None
        assert two.advance("phase") is None
        assert one.advance("phase") is None
        assert [source.view(1).meta["paused_after"] for source in (one, two)] == ["update_states"] * 2
        one.close()
        assert two.advance("step") is None
        assert len(two) == 2
        two.close()
        assert engine.observer is before
        assert engine.step()


def test_closing_in_mid_step_runs_it_to_its_end() -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        source.advance("phase")
        source.close()
        source.close()
        assert engine.num_steps == 1
        assert engine.step()


def test_a_recorder_in_memory_is_shared_and_outlives_the_source() -> None:
    with engine_with_work() as engine:
        with Recorder(engine) as rec:
            engine.step()
            source = LiveSource(engine)
            assert source.advance("step") is None
            assert len(source) == len(rec.recording) == 2
            source.close()
            engine.step()
            late = LiveSource(engine)
        assert len(rec.recording) == len(late) == 3
        assert late.advance("step") == (
            "the recording that is shown here has ended; open a new explorer on the engine to go on"
        )
        late.close()


def test_a_recorder_to_a_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.mrv2rec"
    with (
        engine_with_work() as engine,
        Recorder(engine, path),
        pytest.raises(RuntimeError, match=r"recorded to .*run\.mrv2rec"),
    ):
        LiveSource(engine)


def test_another_ones_paused_step_is_respected() -> None:
    with engine_with_work() as engine:
        source = LiveSource(engine)
        step = PausedStep(engine)
        step.advance()
        said = source.advance("phase")
        assert said is not None
        assert said.startswith("a paused step of this engine is open and stands behind 'schedule'")
        step.finish()
        assert source.advance("phase") is None
        source.close()


@pytest.mark.parametrize("stream", ["deferred", "threaded"])
def test_closing_frees_the_engine(stream: str) -> None:
    threads = set(threading.enumerate())
    observer = Observer()
    engine = engine_with_work(stream=stream, observer=observer)
    source = LiveSource(engine)
    source.advance("step")
    for _ in range(5):
        source.advance("phase")
    source.view(1)
    source.close()
    assert engine.observer is engine.rt.observer is engine.core.observer is observer
    engine.close()
    assert set(threading.enumerate()) == threads
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_mutant_a_source_that_keeps_its_recorder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveSource, "close", lambda self: None)
    with pytest.raises(AssertionError):
        test_closing_frees_the_engine("deferred")


def test_a_forgotten_source_gives_the_step_up_and_the_recorder_is_taken_over() -> None:
    threads = set(threading.enumerate())
    with engine_with_work() as engine:
        before = engine.observer
        forgotten = LiveSource(engine)
        forgotten.advance("phase")
        del forgotten
        gc.collect()
        for thread in set(threading.enumerate()) - threads:
            thread.join(FAR_TOO_LONG)
        assert set(threading.enumerate()) == threads
        engine.reset()
        another = LiveSource(engine)
        another.close()
        assert engine.observer is before


def test_a_reading_that_breaks_off_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would take its writes for those of a later phase."""
    with engine_with_work() as engine:
        source = LiveSource(engine)
        source.advance("phase")
        with monkeypatch.context() as patch:
            patch.setattr(Readback, "take", lambda self, phase: press_stop())
            assert source.advance("phase") == "interrupted; go on when you like"
        assert len(source) == 0
        assert source.advance("step") is None
        assert len(source) == 1
        source.close()
