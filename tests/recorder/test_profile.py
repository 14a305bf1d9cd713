"""A profile changes nothing, sees what the chokepoints saw, leaves out the warm-up, and always lets go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import burst
from mrv2lab.observer import EventLog
from mrv2lab.recorder import profile as profile_module
from mrv2lab.recorder.host_log import HostLog, LoggedMark
from mrv2lab.recorder.profile import CUT_SHORT, Profile, profile
from mrv2lab.runtime.base import DeviceError
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import DEVICE_KINDS
from tests.engine.small import sampled, small_engine
from tests.recorder.profiled import assert_untouched, phase_counts, profiled, step_numbers
from tests.recorder.runs import busy_engine, device_work, tokens, work

CPU = torch.profiler.ProfilerActivity.CPU
RUNNERS: list[dict[str, Any]] = [
    {"runner": "v1"},
    {"runner": "v1", "transfer": "pinned_copy"},
    {"runner": "mrv2"},
    {"runner": "mrv2", "transfer": "barrier", "async_scheduling": False},
    {"runner": "mrv2", "stream": "threaded"},
]
each_runner = pytest.mark.parametrize("options", RUNNERS, ids=lambda o: "-".join(map(str, o.values())))


class Broke(Exception):
    """What breaks off a profiled body."""


def work_and_break(engine: Engine, steps: int) -> None:
    work(engine, steps)
    raise Broke


# -- it changes nothing ------------------------------------------------------------------------------------------------


@each_runner
def test_tokens_and_device_work_stay_the_same(options: dict[str, Any]) -> None:
    log = EventLog()
    with busy_engine(**options) as engine:
        engine.observer = log
        work(engine, 12)
        plain = tokens(engine)
    engine, p = profiled(options, warmup=0)
    assert tokens(engine) == plain
    assert device_work([mark.mark for mark in p.marks]) == device_work(log.marks)
    assert_untouched(engine, engine.observer)


def test_mutant_a_log_that_drops_launches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostLog, "launch", lambda self, describe: None)
    with pytest.raises(AssertionError):
        test_tokens_and_device_work_stay_the_same({"runner": "v1"})


def test_the_observer_before_goes_on_listening_and_is_put_back() -> None:
    log = EventLog()
    with busy_engine() as engine:
        engine.observer = log
        with profile(engine, warmup=2) as p:
            work(engine, 8)
        assert_untouched(engine, log)
    heard = [mark for mark in log.marks if mark.kind in ("run", "kernel", "h2d", "d2h")]
    ours = [mark.mark for mark in p.marks if mark.kind in ("run", "kernel", "h2d", "d2h")]
    assert len(ours) < len(heard)
    assert heard[-len(ours) :] == ours
    assert Counter(span.name for span in log.spans)["schedule"] == engine.scheduler.step == 7


@each_runner
def test_an_exception_inside_comes_out_and_the_engine_is_left_as_it_was(options: dict[str, Any]) -> None:
    with busy_engine(**options) as engine:
        before = engine.observer
        with pytest.raises(Broke), profile(engine, warmup=1) as p:
            work_and_break(engine, 6)
        assert_untouched(engine, before)
        assert step_numbers(p.trace) == [turn.step for turn in p.log.turns if turn.step >= 0] != []
        work(engine, 2)  # and it goes on


def test_mutant_a_profile_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profile, "_let_go", lambda self, before: None)
    with pytest.raises(AssertionError):
        test_an_exception_inside_comes_out_and_the_engine_is_left_as_it_was({"runner": "v1"})


def test_an_exception_of_a_step_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        engine.submit([1, 2, 3], sampled())
        before = engine.observer
        with profile(engine, warmup=0) as p:
            engine.step()
            monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        assert_untouched(engine, before)
        assert [turn.step for turn in p.log.turns] == [0, 1]
        engine.reset()
        engine.step()


def test_a_trace_that_cannot_be_made_does_not_hide_the_bodys_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(profile_module, "log_trace", broken)
    with busy_engine() as engine:
        with pytest.raises(Broke), profile(engine, warmup=0) as p:
            work_and_break(engine, 3)
        with pytest.raises(RuntimeError, match="no trace: OSError: disk full"):
            _ = p.trace
        with pytest.raises(OSError, match="disk full"), profile(engine, warmup=0):
            work(engine, 3)
        assert_untouched(engine, engine.observer)


def test_queued_work_that_raised_is_said_in_the_profile_and_still_told_to_the_next_waiter() -> None:
    with small_engine() as engine:
        engine.rt.register("bad", lambda: 1 // 0)
        engine.submit([1, 2, 3], sampled())
        with profile(engine, warmup=0) as p:
            engine.step()
            engine.rt.run("bad")
        assert CUT_SHORT in p.problems
        assert step_numbers(p.trace) == [0]
        with pytest.raises(DeviceError):
            engine.rt.synchronize()


# -- what is in it -----------------------------------------------------------------------------------------------------


@each_runner
def test_the_warm_up_is_left_out(options: dict[str, Any]) -> None:
    engine, everything = profiled(options, steps=9, warmup=0)
    _, p = profiled(options, steps=9, warmup=4)
    expected = [turn.step for turn in everything.log.turns][4:]
    assert [turn.step for turn in p.log.turns] == expected
    assert expected == [engine.scheduler.step - 5 + i for i in range(5)]
    assert step_numbers(p.trace) == expected
    assert {mark.step for mark in p.marks} == set(expected)
    assert len(p.marks) < len(everything.marks)


def test_mutant_a_profile_that_keeps_its_warm_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Profile._before

    def early(self: Profile, step: int) -> None:
        self._skipped = self.warmup
        real(self, step)

    monkeypatch.setattr(Profile, "_before", early)
    with pytest.raises(AssertionError):
        test_the_warm_up_is_left_out({"runner": "v1"})


def test_a_turn_that_only_waits_is_no_step() -> None:
    with small_engine() as engine:
        engine.submit([1, 2, 3], sampled(2))
        with profile(engine, warmup=0) as p:
            while engine.has_work():
                engine.step()
    assert [turn.step for turn in p.log.turns] == [0, 1, 2, 3, -1]
    assert step_numbers(p.trace) == [0, 1, 2, 3]
    assert "mrv2lab.turn" in p.trace.names
    assert p.recording is not None and [step.step for step in p.recording.steps] == [0, 1, 2, 3]


def test_turns_of_any_caller_count() -> None:
    with Engine("tiny", device="cpu", num_blocks=64) as engine, profile(engine, warmup=1) as p:
        report = engine.run(burst(2, max_tokens=6), progress=False)
        engine.generate([1, 2, 3])
    assert len(p.log.turns) == engine.num_steps - 1
    assert report.steps < len(p.log.turns)


@each_runner
def test_a_cpus_trace_is_the_chokepoints_and_modelled(options: dict[str, Any]) -> None:
    _, p = profiled(options, warmup=3)
    trace = p.trace
    assert trace.info.modelled
    assert p.torch_trace is None
    phases = [span.name for span in p.log.spans]
    assert phase_counts(trace) == Counter(phases)
    launches = [mark for mark in p.marks if mark.kind in ("kernel", "run", "h2d", "d2h", "replay")]
    assert len(launches) > 20
    assert all(0 < mark.device_start_ns < mark.device_end_ns for mark in launches)
    assert int(trace.mask(*DEVICE_KINDS).sum()) == len(launches)
    on_device = trace.select(trace.mask(*DEVICE_KINDS))
    durations = sorted(mark.device_end_ns - mark.device_start_ns for mark in launches)
    assert sorted(on_device.duration.tolist()) == durations
    assert {trace.lane_of(i).role for i in np.flatnonzero(trace.mask(*DEVICE_KINDS))} == {"stream"}


def test_the_waits_are_those_of_the_chokepoints() -> None:
    _, v1 = profiled({"runner": "v1"}, warmup=3)
    assert isinstance(v1.waits[0], LoggedMark)
    found = Counter((wait.kind, wait.name.split(".")[0], wait.phase) for wait in v1.waits)
    assert set(found) == {
        ("synchronize", "prepare_inputs", "barrier_wait"),
        ("synchronize", "sampled", "wait_output"),
    }
    syncs = [i for i in np.flatnonzero(v1.trace.mask("sync")) if v1.trace.args(i).get("phase") != ""]
    in_trace = Counter((v1.trace.name_of(i), v1.trace.args(i)["phase"], int(v1.trace.duration[i])) for i in syncs)
    assert sum(in_trace.values()) == len(v1.waits) + sum(mark.kind == "wait_event" for mark in v1.marks)
    assert all(wait.site is not None and ":" in wait.site for wait in v1.waits)
    _, mrv2 = profiled({"runner": "mrv2"}, warmup=3)
    assert {wait.phase for wait in mrv2.waits} == {"wait_output"}


def test_device_times_lie_behind_their_launch_and_in_order(host_clock: Any) -> None:
    _, p = profiled({"runner": "mrv2"}, warmup=3)
    free: dict[str, int] = {}
    for mark in p.marks:
        if mark.device_end_ns >= 0:
            assert mark.device_start_ns >= free.get(mark.mark.stream, 0)
            free[mark.mark.stream] = mark.device_end_ns


def test_mrv2_is_recorded_and_v1_is_not() -> None:
    _, p = profiled({"runner": "mrv2"}, steps=12, warmup=3)
    assert p.recording is not None
    assert [step.step for step in p.recording.steps] == step_numbers(p.trace)[: len(p.recording)]
    assert len(p.recording) >= 8
    assert p.recording.verify() == []
    _, p = profiled({"runner": "mrv2"}, record=False)
    assert p.recording is None
    _, p = profiled({"runner": "v1"})
    assert p.recording is None


def test_a_turn_says_what_it_scheduled() -> None:
    with small_engine(async_scheduling=False) as engine:
        engine.submit([1, 2, 3], sampled(3), request_id="a")
        engine.submit([1, 2, 3, 4], sampled(3), request_id="b")
        with profile(engine, warmup=1) as p:
            for _ in range(4):
                engine.step()
    schedules = [turn.schedule.num_scheduled_tokens if turn.schedule else None for turn in p.log.turns]
    assert schedules == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {}]


def test_the_file_is_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    _, p = profiled({"runner": "v1"}, path=path, title="barrier run")
    again = load(path, cache=False, progress=False)
    assert p.trace.info.title == "barrier run"
    assert len(again) == len(p.trace)
    assert again.start.tolist() == p.trace.start.tolist()
    assert again.duration.tolist() == p.trace.duration.tolist()


def test_torch_profiler_on_a_cpu_sees_our_steps_and_phases() -> None:
    _, p = profiled({"runner": "v1"}, steps=6, warmup=2, activities=[CPU])
    seen = p.torch_trace
    assert seen is not None
    assert step_numbers(seen) == step_numbers(p.trace) == [1, 2, 3, 4]
    assert phase_counts(seen) == phase_counts(p.trace)
    facts = seen.info.extra["mrv2lab"]
    assert facts["config"]["runner"]["runner"] == "v1"
    assert facts["steps"] == [1, 2, 3, 4]
    assert facts["requests"] == [len(t.schedule.num_scheduled_tokens) if t.schedule else 0 for t in p.log.turns]


@pytest.mark.parametrize("kept", ["run.json.gz", "run.json", None])
def test_the_way_of_a_gpus_trace(tmp_path: Path, kept: str | None) -> None:
    """All of it but the device: the profiler's file becomes the trace, and a recording goes beside it."""
    path = tmp_path / kept if kept is not None else None
    with busy_engine() as engine:
        p = profile(engine, warmup=2, path=path, activities=[CPU], title="as on a GPU")
        p._on_gpu = True
        with p:
            work(engine, 8)
    assert p.trace is p.torch_trace
    assert (p.trace.info.title, p.trace.info.producer) == ("as on a GPU", "kineto")
    assert p.trace.info.path == (str(path) if path is not None else "")
    assert step_numbers(p.trace) == [turn.step for turn in p.log.turns]
    assert {(mark.device_start_ns, mark.device_end_ns) for mark in p.marks} == {(-1, -1)}
    assert p.recording is not None and len(p.recording) >= 4 and p.recording.verify() == []
    if path is not None:
        assert len(load(path, cache=False, progress=False)) == len(p.trace)
        assert (path.read_bytes()[:2] == b"\x1f\x8b") == (path.suffix == ".gz")
    assert [one.name for one in tmp_path.iterdir()] == ([kept] if kept is not None else [])
