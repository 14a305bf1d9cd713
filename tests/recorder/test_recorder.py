"""A recorder changes nothing, says what it added, and always lets go."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.observer import WAITS, EventLog, Observer
from mrv2lab.recorder.probes import Checksums, Probes
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recorder.store import CUT_SHORT
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import StepRecord
from mrv2lab.runner import model_runner
from mrv2lab.runtime.base import DeviceError
from tests.engine.small import sampled
from tests.recorder.runs import TRANSPORTS, busy_engine, device_work, tokens, work
from tests.runner.invariants import waits_of_a_step
from tests.slow import mostly_slow

each_transport = pytest.mark.parametrize("options", TRANSPORTS, ids=lambda o: "-".join(map(str, o.values())) or "plain")


def listened(steps: int = 40, **options: Any) -> tuple[dict[str, list[int]], list[tuple[Any, ...]], list[str]]:
    """Tokens, device work and waits of a run with a plain event log."""
    log = EventLog()
    with busy_engine(**options) as engine:
        engine.rt.synchronize()
        engine.observer = log
        work(engine, steps)
        engine.observer = Observer()
        return tokens(engine), device_work(log.marks), [mark.name for mark in log.waits()]


def recorded(
    steps: int = 40, recorder: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, list[int]], Recording]:
    with busy_engine(**options) as engine:
        with Recorder(engine, **recorder or {}) as rec:
            work(engine, steps)
        return tokens(engine), rec.recording


def in_order(recording: Recording) -> list[Any]:
    """Marks as they were made: a step's wait comes after the next step's launch."""
    return sorted((mark for step in recording.steps for mark in step.marks), key=lambda mark: mark.time_ns)


@each_transport
@pytest.mark.parametrize(
    "recorder", mostly_slow([{"top_k": 3, "check_every": 1}, {}, {"device_times": "phases"}], 1), ids=str
)
def test_recording_changes_nothing(options: dict[str, Any], recorder: dict[str, Any]) -> None:
    plain_tokens, plain_work, plain_waits = listened(**options)
    got_tokens, recording = recorded(recorder=recorder, **options)
    assert got_tokens == plain_tokens
    marks = in_order(recording)
    cut = len(device_work(marks))  # steps that were in flight at the end are in it without their wait
    assert cut >= len(plain_work) - 1
    assert device_work(marks)[: len(plain_work)] == plain_work[:cut]
    assert [mark.name for mark in marks if mark.kind in WAITS] == plain_waits


def test_mutant_a_recorder_that_waits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    after = Probes.after_step
    monkeypatch.setattr(Probes, "after_step", lambda self, n: (self._rt.synchronize(), after(self, n)))
    with pytest.raises(AssertionError):
        test_recording_changes_nothing({}, {})


def test_mutant_a_recorder_that_launches_unlabelled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probes, "_own", lambda self: nullcontext())
    with pytest.raises(AssertionError):
        test_recording_changes_nothing({}, {"check_every": 1})


# -- AS2: no CPU-device sync in a step ---------------------------------------------------------------------------------


def bad_waits(recording: Recording) -> list[str]:
    """Waits of plain MRV2 steps that are not for the step's output."""
    found = []
    for step in recording.steps:
        names = [mark.name for mark in step.marks if mark.kind in WAITS]
        found += waits_of_a_step(names, "uva_pool")
        if len(names) > 1:
            found.append(f"step {step.step} waited {len(names)} times")
    return found


@pytest.mark.parametrize("loop", [True, False], ids=["async", "sync"])
def test_a_plain_step_waits_for_its_output_only(loop: bool) -> None:
    _, recording = recorded(async_scheduling=loop)
    assert len(recording) > 30
    assert bad_waits(recording) == []
    assert sum(mark.kind in WAITS for step in recording.steps for mark in step.marks) > 25


def test_mutant_an_item_in_the_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = model_runner.prepare_inputs

    def with_item(*args: Any) -> Any:
        batch = prepare(*args)
        batch.seq_lens[0].item()
        return batch

    monkeypatch.setattr(model_runner, "prepare_inputs", with_item)
    _, recording = recorded()
    assert any("item" in name for name in bad_waits(recording))
    wait = next(mark for step in recording.steps for mark in step.marks if mark.kind == "implicit_sync")
    assert wait.phase == "prepare_inputs"
    assert wait.reads == ("seq_lens",)
    assert wait.site is not None and wait.site.startswith("recorder/test_recorder.py:")


# -- what a mark and a step say ----------------------------------------------------------------------------------------


def test_every_mark_has_bytes_buffers_phase_and_call_site() -> None:
    _, recording = recorded()
    moved = [mark for mark in in_order(recording) if mark.kind in ("kernel", "run", "h2d", "d2h", "publish")]
    assert len(moved) > 300
    for mark in moved:
        assert mark.nbytes > 0, mark
        assert mark.writes, mark
        assert "?" not in mark.reads + mark.writes, mark
        assert mark.phase, mark
        assert mark.site is not None and mark.site.startswith("mrv2lab/"), mark
    assert {mark.name for mark in moved if mark.added} == {"checksum"} | {
        mark.name for mark in moved if mark.name.startswith("recorder.")
    }


def test_device_times_are_in_order_on_each_stream() -> None:
    _, recording = recorded()
    last: dict[str, int] = {}
    launches = [mark for mark in in_order(recording) if mark.kind in ("kernel", "run", "h2d", "d2h")]
    for mark in launches:
        assert last.get(mark.stream, 0) <= mark.device_start_ns < mark.device_end_ns, mark
        last[mark.stream] = mark.device_end_ns
    assert set(last) == {"main", "copy"}


def test_without_stamps_no_device_times() -> None:
    _, recording = recorded(recorder={"device_times": "none"})
    assert {mark.device_end_ns for mark in in_order(recording)} == {-1}
    _, recording = recorded(recorder={"device_times": "phases"})
    assert {mark.device_end_ns for mark in in_order(recording)} == {-1}
    assert all(s.device_end_ns > 0 for s in recording[5].spans if s.name in ("forward", "sample", "postprocess"))


def test_top_k_are_the_logits_of_that_step() -> None:
    seen: dict[int, np.ndarray] = {}
    with busy_engine(async_scheduling=False) as engine:
        runner = engine.worker.runner

        def look(i: int) -> None:
            schedule = engine.core.last_schedule
            if schedule is not None and schedule.total_num_scheduled_tokens:
                seen[schedule.step] = engine.rt.read(runner.logits).numpy()

        with Recorder(engine, top_k=4) as rec:
            work(engine, 20, after=look)
    assert len(seen) > 12
    for step in rec.recording.steps:
        if not step.req_ids:
            assert step.top_k is None
            continue
        logits = seen[step.step]
        want = np.sort(logits, axis=1)[:, :-5:-1]
        assert step.top_k is not None
        assert np.array_equal(step.top_k.logits, want)
        assert np.array_equal(np.take_along_axis(logits, step.top_k.token_ids.astype(np.int64), 1), want)


def test_checksums_come_every_so_many_steps() -> None:
    _, recording = recorded(recorder={"check_every": 4})
    with_check = [i for i, step in enumerate(recording.steps) if step.checksums]
    assert with_check
    assert all((i + 1) % 4 == 0 for i in with_check)
    assert set(recording[with_check[0]].checksums) == set(recording.header.tables)


# -- beginnings, ends and breaks ---------------------------------------------------------------------------------------


def known(steps: list[StepRecord]) -> list[tuple[Any, ...]]:
    """What a step says, times and number apart."""
    return [
        (s.req_ids, s.rows.tolist(), s.num_scheduled.tolist(), s.sampled, s.removed, s.finish_reasons) for s in steps
    ]


def test_a_recording_may_begin_and_end_with_steps_in_flight() -> None:
    _, whole = recorded(40)
    with busy_engine() as engine:
        work(engine, 0)
        parts: list[Recording] = []

        def switch(i: int) -> None:
            if i in (14, 29):
                recorders[-1].__exit__(None, None, None)
                parts.append(recorders[-1].recording)
                recorders.append(Recorder(engine).__enter__())

        recorders = [Recorder(engine).__enter__()]
        work(engine, 40, after=switch)
        recorders[-1].__exit__(None, None, None)
        parts.append(recorders[-1].recording)
    assert len(parts) == 3
    joined = [step for part in parts for step in part.steps]
    # A step in flight where one recording ends and the next begins is known to both sides' engine, not to the next's.
    assert [row[:4] for row in known(joined)] == [row[:4] for row in known(list(whole.steps))]


def test_after_a_reset_the_story_goes_on_from_a_keyframe() -> None:
    with busy_engine() as engine, Recorder(engine) as rec:
        work(engine, 12)
        engine.reset()
        work(engine, 12, seed=1)
        recording = rec.recording
        frames = [i for i, step in enumerate(recording.steps) if step.keyframe is not None]
    assert len(frames) == 2 and frames[0] == 0
    assert recording[frames[1]].owners == {}


def test_an_exception_in_the_block_keeps_what_was_recorded() -> None:
    with busy_engine() as engine:
        before = engine.observer

        def fail(i: int) -> None:
            if i == 7:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), Recorder(engine) as rec:
            work(engine, 8, after=fail)
        assert engine.observer is before
        assert len(rec.recording) >= 7
        engine.step()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_breaks_off_is_left_out(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    with busy_engine() as engine:
        with Recorder(engine, check_every=1) as rec:
            work(engine, 10)
            with monkeypatch.context() as patch:
                patch.setattr(engine.worker.runner.sampler, "sample", lambda *args: (_ for _ in ()).throw(error()))
                engine.submit([1, 2, 3], sampled())
                with pytest.raises(error):
                    engine.step()
            engine.reset()
            work(engine, 10, seed=3)
        numbers = [step.step for step in rec.recording.steps]
        restart = numbers.index(0, 1)
        assert numbers[restart - 1] < 11
        assert rec.recording[restart].keyframe is not None
        assert all(step.sampled is not None for step in rec.recording.steps)


@pytest.mark.parametrize("to_file", [False, True])
def test_queued_work_that_raises_does_not_cost_the_recording(tmp_path: Path, to_file: bool) -> None:
    with busy_engine() as engine:
        engine.rt.register("boom", lambda x: (_ for _ in ()).throw(ArithmeticError("boom")))
        rec = Recorder(engine, tmp_path / "run.mrv2rec" if to_file else None)

        def boom(i: int) -> None:
            if i == 9:
                engine.rt.run("boom", engine.worker.runner.num_rejected)

        with pytest.raises(DeviceError), rec:
            work(engine, 20, after=boom)
        assert len(rec.recording) >= 9
        assert rec.recording.problems == [CUT_SHORT] and rec.recording.verify() == []
        engine.reset()
        work(engine, 5, seed=2)


def test_one_recorder_at_a_time_and_once_each() -> None:
    with busy_engine() as engine:
        with pytest.raises(RuntimeError, match="nothing is recorded yet"):
            _ = Recorder(engine).recording
        with Recorder(engine) as rec, pytest.raises(RuntimeError, match="is being recorded already"), Recorder(engine):
            pass
        with pytest.raises(RuntimeError, match="records once"), rec:
            pass
        for bad, match in (
            ({"top_k": -1}, "top_k must lie between 0 .* got -1"),
            ({"top_k": 62}, "vocabulary's 61, got 62"),
            ({"check_every": -2}, "check_every must be 0 .* got -2"),
            ({"device_times": "all"}, "got 'all'"),
        ):
            with pytest.raises(ValueError, match=match):
                Recorder(engine, **bad)


def test_nothing_outlives_a_recorder() -> None:
    threads = threading.active_count()
    with busy_engine() as engine:
        with Recorder(engine) as rec:
            work(engine, 10)
        gone = weakref.ref(rec)
        del rec
        gc.collect()
        assert gone() is None
        assert not any(buffer.name.startswith("recorder.") for buffer in engine.rt.registry.buffers())
    assert threading.active_count() == threads


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_says_what_memory_says(tmp_path: Path) -> None:
    path = tmp_path / "run.mrv2rec"
    _, memory = recorded(60)
    with busy_engine() as engine:
        with Recorder(engine, path, check_every=16) as rec:
            work(engine, 60)
            with pytest.raises(RuntimeError, match="is being written"):
                _ = rec.recording
        assert rec.recording.title == "run.mrv2rec"
    loaded = Recording.load(path)
    assert loaded.complete and loaded.problems == []
    assert known(list(loaded.steps)) == known(list(memory.steps))
    assert [step.checksums for step in loaded.steps] == [step.checksums for step in memory.steps]
    assert [len(s.marks) for s in loaded.steps] == [len(s.marks) for s in memory.steps]
    assert loaded.clock["method"] == memory.clock["method"]
    assert all(m.device_end_ns > 0 for s in loaded.steps for m in s.marks if m.kind in ("kernel", "run", "h2d", "d2h"))
    assert loaded.texts == memory.texts


def test_a_disk_error_surfaces_at_the_end_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mrv2lab.recorder.store.RecordingWriter.append", full)
    with busy_engine() as engine:
        before = engine.observer
        with pytest.raises(OSError, match="No space left"), Recorder(engine, tmp_path / "full.mrv2rec"):
            work(engine, 40)
        assert engine.observer is before
        work(engine, 5, seed=1)


def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with busy_engine() as engine:
        before = engine.observer
        with pytest.raises(FileNotFoundError), Recorder(engine, tmp_path / "no" / "such" / "folder.mrv2rec"):
            pass
        assert engine.observer is before
        with Recorder(engine):
            work(engine, 3)


# -- checks ------------------------------------------------------------------------------------------------------------


@each_transport
def test_every_checksum_fits_the_rebuilt_state(options: dict[str, Any]) -> None:
    _, recording = recorded(80, recorder={"check_every": 1}, **options)
    assert sum(bool(step.checksums) for step in recording.steps) > 50
    assert recording.verify() == []


@pytest.mark.parametrize("options", [{"transfer": "unsafe"}, {"pool_depth": 1}], ids=str)
def test_a_race_shows_in_the_checksums(options: dict[str, Any]) -> None:
    """In as many steps as leave what goes wrong within the tables."""
    _, recording = recorded(40, recorder={"check_every": 1}, **options)
    assert recording.verify()


def test_mutant_a_probe_that_reads_a_pool_too_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the output's event a slot of the pool may have its next values already."""
    monkeypatch.setattr(Probes, "before_output", lambda self, number: None)
    launch = Checksums.launch
    monkeypatch.setattr(Checksums, "launch", lambda self, number: (self.launch_early(), launch(self, number)))
    _, recording = recorded(80, recorder={"check_every": 1})
    assert any("num_blocks" in sentence for sentence in recording.verify())
