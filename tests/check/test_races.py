"""The race detector names the buffer, the step, the reader and the writer, and is silent where nothing is wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from mrv2lab.check.host_reads import HostReads
from mrv2lab.check.races import RaceDetector
from mrv2lab.engine.workload import steady
from mrv2lab.observer import NULL_OBSERVER, EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runner_v1.buffers import BUFFERS
from mrv2lab.runtime.base import Event, Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from tests.check import race_lines as lines
from tests.check.race_random import small_engine, storm
from tests.runtime.toy import run_toy
from tests.slow import mostly_slow

SAFE: list[dict[str, Any]] = [{"transfer": "barrier"}, {"transfer": "pinned_copy"}, {"transfer": "uva_pool"}]
SHORT = SamplingParams(max_tokens=9)

# -- to the letter -----------------------------------------------------------------------------------------------------


def check_lines(detector: lines.Detector = RaceDetector) -> None:
    """Every script's hazards and corrupted steps."""
    races = lines.published_twice(detector)
    assert [lines.plain(hazard) for hazard in races.hazards] == [
        ("ids", 0, "copy", "h2d ids.pinned", "publish ids.pinned", True),
        ("ids", 1, "copy", "h2d ids.pinned", "publish ids.pinned", False),
    ]
    assert races.corrupted_steps == [0]  # the third publish wrote what was there

    races = lines.written_through_numpy(detector)
    assert [lines.plain(hazard) for hazard in races.hazards] == [
        ("table", 0, "copy", "h2d table.host", ("run add", "run add"), True)
    ]
    assert races.corrupted_steps == [0]

    races = lines.written_before_the_wait(detector)
    assert [lines.plain(hazard) for hazard in races.hazards] == [
        ("table", 0, "copy", "h2d table.host", ("h2d table.host", "synchronize copied"), True)
    ]
    assert races.corrupted_steps == [0]

    races = lines.read_in_place(detector)
    assert [lines.plain(hazard) for hazard in races.hazards] == [("slot", 0, "uva", "run add", "publish slot", True)]
    assert races.corrupted_steps == [0]

    races = lines.memory_served_twice(detector)
    assert [hazard.buffer for hazard in races.hazards] == ["host"]
    assert races.corrupted_steps == [0]

    races = lines.neighbours(detector)
    assert races.hazards == []
    assert races.corrupted_steps == []


def test_the_scripts() -> None:
    check_lines()


@pytest.mark.parametrize("kind", lines.MUTANTS)
def test_mutants_of_the_detector_are_caught(kind: type[HostReads]) -> None:
    with pytest.raises(AssertionError):
        check_lines(lines.with_reads(kind))


def test_reader_and_writer_have_their_lines() -> None:
    first, _ = lines.published_twice().hazards
    assert first.reader.startswith("h2d ids.pinned at check/race_lines.py:")
    assert first.writer == first.reader.replace("h2d", "publish")
    (bracketed,) = lines.written_through_numpy().hazards
    assert bracketed.between is not None
    before, after = (int(moment.rpartition(":")[2]) for moment in bracketed.between)
    assert after == before + 2  # the write stands in the line between


def test_the_report_is_a_row_a_buffer_and_step() -> None:
    report = lines.published_twice().report()
    assert list(report.columns) == "step buffer kind reads corrupted hazards reader writer".split()
    assert report.iloc[:, :6].values.tolist() == [[0, "ids", "copy", 1, 1, 1], [1, "ids", "copy", 1, 0, 1]]
    assert lines.neighbours().report().empty


# -- the toy of the first experiment -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["deferred", "threaded"])
@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_silent_on_the_toy(policy: str, stream: str) -> None:
    rt = CpuRuntime(stream=stream)
    with RaceDetector(rt) as races:
        assert run_toy(rt, policy) == 0
    rt.close()
    assert races.hazards == []
    assert races.corrupted_steps == []


def test_the_toy_unsafe() -> None:
    rt = CpuRuntime()
    with RaceDetector(rt) as races:
        assert run_toy(rt, "unsafe") == 29
    assert races.corrupted_steps == list(range(29))
    assert {(hazard.buffer, hazard.kind) for hazard in races.hazards} == {("states", "copy"), ("ids", "copy")}
    assert len(races.hazards) == 58


def test_an_item_makes_its_step_safe() -> None:
    rt = CpuRuntime()
    with RaceDetector(rt) as races:
        run_toy(rt, "unsafe", item_at=7)
    assert races.corrupted_steps == [step for step in range(29) if step != 7]
    assert races.waits.loc["implicit", "waits"] == 1


# -- the engine --------------------------------------------------------------------------------------------------------


RUNNERS = ["mrv2", "v1"]


def run_storm(steps: int, seed: int, **options: Any) -> RaceDetector:
    with small_engine(**options) as engine:
        with RaceDetector(engine) as races:
            storm(engine, steps, seed)
        preempted = engine.scheduler.stats.num_preemptions
    assert preempted > steps / 20
    assert len(races.reads.found.reads) > steps  # it did look
    return races


def check_silent(steps: int, seed: int, **options: Any) -> None:
    races = run_storm(steps, seed, **options)
    assert races.hazards == []
    assert races.corrupted_steps == []


@pytest.mark.parametrize("stream", mostly_slow([{"stream": "threaded"}, {}, {"lag": 1}], 1), ids=str)
@pytest.mark.parametrize("policy", SAFE, ids=str)
@pytest.mark.parametrize("runner", RUNNERS)
def test_silent_on_safe_policies(runner: str, policy: dict[str, Any], stream: dict[str, Any]) -> None:
    check_silent(100, seed=1, runner=runner, **policy, **stream)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [{}, {"stream": "threaded"}], ids=str)
@pytest.mark.parametrize("policy", SAFE, ids=str)
@pytest.mark.parametrize("runner", RUNNERS)
def test_silent_over_5000_steps(runner: str, policy: dict[str, Any], stream: dict[str, Any]) -> None:
    check_silent(5000, seed=2, runner=runner, **policy, **stream)


@pytest.mark.parametrize("runner", RUNNERS)
def test_silent_where_the_device_keeps_up(runner: str) -> None:
    check_silent(60, seed=3, runner=runner, transfer="unsafe", lag=0)
    check_silent(60, seed=3, runner=runner, transfer="unsafe", async_scheduling=False)
    check_silent(60, seed=3, runner=runner, transfer="uva_pool", pool_depth=1, async_scheduling=False)


def test_silent_from_the_middle_of_a_run() -> None:
    """Chunks of a prompt are read from a table that steps before the watch are still writing."""
    with small_engine(transfer="uva_pool", max_num_batched_tokens=8) as engine:
        for seed in range(12):
            storm(engine, 5, seed)
            with RaceDetector(engine) as races:
                storm(engine, 4, seed)
            assert races.hazards == []
            assert races.corrupted_steps == []


def test_a_deeper_pool_is_as_safe() -> None:
    check_silent(60, seed=4, transfer="uva_pool", pool_depth=3)


def generate(engine: Any) -> list[list[int]]:
    report = engine.run(steady(6, prompt_len=(3, 9), max_tokens=6), progress=False)
    return [output.token_ids for output in report.outputs.values()]


def test_it_changes_nothing_and_waits_for_nothing() -> None:
    logs = []
    tokens = []
    for watched in (False, True):
        with small_engine(observer=EventLog()) as engine:
            assert isinstance(engine.observer, EventLog)
            log = engine.observer
            if watched:
                with RaceDetector(engine) as races:
                    tokens.append(generate(engine))
                assert engine.observer is log
                assert vars(engine.rt).keys().isdisjoint({"kernel", "run", "_copy", "publish", "end_step", "reset"})
            else:
                tokens.append(generate(engine))
            logs.append(log)
    assert tokens[0] == tokens[1]
    plain, watched_log = logs
    assert [(m.kind, m.name) for m in plain.waits()] == [(m.kind, m.name) for m in watched_log.waits()]
    assert len(races.waits) == 5
    assert races.waits.waits.sum() == len(plain.waits())

    def launches(log: EventLog, own: bool) -> list[tuple[str, str]]:
        kinds = ("kernel", "run", "h2d", "d2h", "publish")
        return [(m.kind, m.name) for m in log.marks if m.kind in kinds and m.name.startswith("races.") == own]

    assert launches(plain, False) == launches(watched_log, False)
    assert launches(plain, True) == []
    assert {kind for kind, _ in launches(watched_log, True)} == {"run", "d2h"}


@pytest.mark.parametrize("outside", ["recorder", "detector"])
def test_beside_a_recorder(outside: str) -> None:
    with small_engine(transfer="barrier") as engine:
        recorder, races = Recorder(engine, check_every=4), RaceDetector(engine)
        first, second = (recorder, races) if outside == "recorder" else (races, recorder)
        with first, second:
            storm(engine, 30, 1)
        assert engine.observer is NULL_OBSERVER
    assert recorder.recording.verify() == []
    assert len(recorder.recording) == 30
    assert races.hazards == []


def test_it_detaches_when_the_run_breaks_off() -> None:
    with small_engine() as engine:
        races = RaceDetector(engine)

        def run() -> None:
            with races:
                engine.submit([1, 2, 3], SHORT)
                engine.step()
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            run()
        assert engine.observer is NULL_OBSERVER
        assert "kernel" not in vars(engine.rt)
        engine.step()
        assert races.hazards == []


def test_one_watch_at_a_time_and_once_each() -> None:
    with small_engine() as engine:
        with RaceDetector(engine) as races, pytest.raises(RuntimeError, match="watched already"), RaceDetector(engine):
            pass
        assert engine.observer is NULL_OBSERVER
        with pytest.raises(RuntimeError, match="watches once"), races:
            pass


def test_a_reset_inside_leaves_nothing_behind() -> None:
    with small_engine(transfer="pinned_copy") as engine:
        with RaceDetector(engine) as races:
            for _ in range(3):
                engine.submit([1, 2, 3, 4], SHORT)
                engine.step()
                engine.reset()
            storm(engine, 20, 0)
        assert races.hazards == []
        assert races.corrupted_steps == []


def test_work_that_raises_is_no_corruption() -> None:
    def boom(dst: torch.Tensor) -> None:
        raise ArithmeticError

    with small_engine(transfer="pinned_copy") as engine:
        engine.rt.register("boom", boom)
        out = engine.rt.zeros(1, torch.int32, name="boom")
        with RaceDetector(engine) as races:
            engine.submit([1, 2, 3], SHORT)
            engine.step()
            engine.rt.run("boom", out, writes=(out,))
            engine.step()  # waits for the step before the work that raises
            with pytest.raises(RuntimeError, match="boom"):
                engine.step()
        assert races.hazards == []
        assert races.corrupted_steps == []


def test_a_spin_needs_a_gpu() -> None:
    with small_engine() as engine:
        with pytest.raises(ValueError, match="a spin needs a GPU"):
            RaceDetector(engine, spin_ms=5)
        with pytest.raises(ValueError, match="between 0 and 1000 ms, got -1"):
            RaceDetector(engine, spin_ms=-1)


class _StandIn:
    """A spin that takes no time, for a machine without a GPU."""

    def __init__(self, rt: Runtime, milliseconds: float) -> None:
        self.rt = rt
        self.state = rt.zeros(1, torch.int32, name="spin")
        rt.register("races.spin", torch.Tensor.zero_)

    def queue(self) -> None:
        self.rt.run("races.spin", self.state, writes=(self.state,))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_spin_stands_in_front_of_each_steps_copies(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrv2lab.check.races.Spin", _StandIn)
    log = EventLog()
    engine = small_engine(runner=runner, transfer="pinned_copy", observer=log)
    with engine, RaceDetector(engine, spin_ms=5):
        for _ in range(4):
            engine.submit([1, 2, 3], SHORT)
            engine.step()
    names = [mark.name for mark in log.marks if mark.kind in ("run", "h2d", "kernel")]
    spins = [i for i, name in enumerate(names) if name == "races.spin"]
    assert len(spins) == 4
    kinds = [mark.kind for mark in log.marks if mark.kind in ("run", "h2d", "kernel")]
    for begin, end in pairwise([*spins, len(names)]):
        assert kinds[begin + 1] == "h2d"
        assert names[end - 1] != "races.spin"
    assert spins[0] == 0


# -- a barrier that forgets a buffer -----------------------------------------------------------------------------------


def forgetful(rt: Runtime, forgotten: str) -> RaceDetector:
    """Two arrays behind V1's kind of barrier, one of them copied after the event was recorded."""
    barrier: Event = rt.event("prepare_inputs")
    sources = {name: rt.empty(4, torch.int32, name=name, place="pinned") for name in ("tokens", "positions")}
    targets = {name: rt.zeros(4, torch.int32, name=f"{name}.gpu") for name in sources}
    with RaceDetector(rt) as races:
        for step in range(5):
            barrier.synchronize()
            for source in sources.values():
                source.numpy()[:] = step
            for name in sorted(sources, key=lambda name: name == forgotten):
                if name == forgotten:
                    barrier.record()
                rt.h2d(targets[name], sources[name])
            if forgotten not in sources:
                barrier.record()
            rt.end_step()
    return races


@pytest.mark.parametrize("name", ["tokens", "positions"])
def test_the_buffer_that_a_barrier_forgets_is_named(name: str) -> None:
    races = forgetful(CpuRuntime(), name)
    assert {hazard.buffer for hazard in races.hazards} == {name}
    assert races.corrupted_steps == [0, 1, 2, 3]
    assert races.waits.loc["barrier", "waits"] == 4
    assert forgetful(CpuRuntime(), "nothing").hazards == []


@pytest.mark.parametrize("name", BUFFERS)
def test_the_buffer_that_v1_forgets_is_named(name: str) -> None:
    protected = tuple(buffer for buffer in BUFFERS if buffer != name)
    with small_engine(runner="v1", transfer="barrier", protected=protected) as engine, RaceDetector(engine) as races:
        storm(engine, 60, seed=5)
    assert {hazard.buffer.partition(".")[0] for hazard in races.hazards} == {name}
    assert {hazard.step for hazard in races.hazards} >= set(races.corrupted_steps) != set()
    assert all("runner_v1/buffers.py" not in hazard.reader for hazard in races.hazards)
