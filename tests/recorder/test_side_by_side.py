"""Each setting gets the same work, one engine at a time, and a failing one does not stop the others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Workload, burst, steady
from mrv2lab.observer import PHASES, EventLog
from mrv2lab.recorder import side_by_side
from mrv2lab.recorder.host_log import HostLog
from mrv2lab.recorder.overlay import overlay
from mrv2lab.recorder.side_by_side import Run, drive, figures_frame, figures_of, run_settings
from mrv2lab.recorder.step_hook import StepHook
from tests.engine.small import MODEL, small_engine

WORK = burst(4, prompt_len=(3, 8), max_tokens=(4, 8), seed=3)
SIZES: dict[str, Any] = {"device": "cpu", "max_num_reqs": 4, "num_blocks": 33, "block_size": 4, "max_model_len": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "V1": {"runner": "v1", **SIZES},
    "MRV2": {"runner": "mrv2", **SIZES},
    "MRV2 synchronous": {"runner": "mrv2", "async_scheduling": False, **SIZES},
}


def run(settings: Any = SETTINGS, workload: Workload = WORK, **how: Any) -> dict[str, Run]:
    return run_settings(workload, settings, model=MODEL, progress=False, **how)


def test_the_same_tokens_for_every_setting_and_as_the_engine_alone() -> None:
    runs = run()
    with Engine(MODEL, **SIZES) as engine:
        alone = [output.token_ids for output in engine.run(WORK, progress=False).outputs.values()]
    assert list(runs) == ["V1", "MRV2", "MRV2 synchronous"]
    for one in runs.values():
        assert one.error is None and one.problems == ()
        assert one.token_ids == alone
        assert one.trace is not None and one.trace.info.title == one.name
        assert one.report is not None and one.report.num_output_tokens == sum(map(len, alone))
    assert runs["V1"].recording is None
    assert runs["MRV2"].recording is not None and runs["MRV2"].recording.verify() == []


def test_sampled_requests_get_the_same_seeds() -> None:
    work = burst(4, prompt_len=(3, 8), max_tokens=8, temperature=1.0, seed=3)
    policies = {name: {"transfer": name, **SIZES} for name in ("barrier", "pinned_copy", "uva_pool")}
    first, again = run(policies, work), run(policies, work, profile=False)
    assert len({str(one.token_ids) for one in [*first.values(), *again.values()]}) == 1


def test_the_warm_up_leaves_no_trace() -> None:
    runs = run({"MRV2": SETTINGS["MRV2"]}, warmup=2)
    bare = run({"MRV2": SETTINGS["MRV2"]}, warmup=0)
    for one in (*runs.values(), *bare.values()):
        assert one.report is not None
        assert one.figures["steps"] == one.report.steps
        assert one.trace is not None and "mrv2lab.step#0" in one.trace.names
        assert one.report.stats.prefix_hit_tokens == 0
    assert runs["MRV2"].figures["steps"] == bare["MRV2"].figures["steps"]


def test_figures() -> None:
    runs = run({"V1": SETTINGS["V1"], "MRV2": SETTINGS["MRV2"]})
    v1, mrv2 = runs["V1"].figures, runs["MRV2"].figures
    assert v1["modelled"] and v1["step_us"] > 0
    assert v1["waits"]["barrier"] > 0 == mrv2["waits"]["barrier"]
    assert v1["waits"]["output"] == mrv2["waits"]["output"] > 0
    assert "barrier_wait" in v1["phase_us"] and "gather" in mrv2["phase_us"] and "gather" not in v1["phase_us"]
    assert mrv2["publishes"] > 0 and v1["h2d_copies"] > 0 and v1["h2d_bytes"] > v1["h2d_copies"]
    frame = figures_frame(runs)
    assert list(frame.columns) == ["V1", "MRV2"]
    assert frame.loc[("waits", "barrier"), "V1"] == v1["waits"]["barrier"]
    assert ("waits", "queue_full") not in frame.index  # nobody has it
    assert frame["V1"].isna()[("phase_us", "gather")]
    phases = [of for figure, of in frame.index if figure == "phase_us"]
    assert phases == [phase for phase in PHASES if phase in phases]


def test_figures_are_medians_of_known_turns(host_clock: Any) -> None:
    with small_engine(async_scheduling=False) as engine:
        log = HostLog(engine.rt)
        for busy in (5_000, 90_000, 7_000):
            log.begin_turn(0)
            with log.span("forward"):
                host_clock.advance(busy)
            log.end_turn(None)
        figures = figures_of(log, engine, drive(engine, WORK, steps=1))
    assert figures["steps"] == 3
    assert figures["phase_us"] == {"forward": 8.0}  # 7 us, and a look at the clock
    assert figures["step_us"] == 10.0
    assert sum(figures["waits"].values()) == 0


def test_an_overlay_has_steps_waits_and_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr("mrv2lab.widgets.timeline.Timeline", lambda *traces, **how: seen.append((traces, how)))
    runs = run({"A": SETTINGS["V1"] | {"transfer": "barrier"}, "B": SETTINGS["MRV2 synchronous"]})
    overlay(runs["A"], runs["B"])
    traces, how = seen[0]
    assert traces == (runs["A"].trace, runs["B"].trace)
    assert (how["align"], how["titles"]) == ("step", ["run A: v1, barrier", "run B: mrv2, synchronous"])
    assert [len(frame) for frame in how["marks"]] == [sum(one.figures["waits"].values()) for one in runs.values()]
    assert len(how["difference"]) == min(len(frame) for frame in how["steps"]) > 4
    overlay(runs["B"], align="start")
    assert seen[1][1]["align"] == "start" and "difference" not in seen[1][1]
    failed = run({"X": {"runner": "v3"}})["X"]
    with pytest.raises(ValueError, match="'X' has no trace"):
        overlay(failed)


def test_a_run_without_figures_has_a_repr() -> None:
    assert repr(Run("A", {})) == "Run 'A': not measured"


def test_the_overlay_is_a_timeline() -> None:
    runs = run({"A": SETTINGS["V1"], "B": SETTINGS["MRV2"]}, steps=4)
    shown = overlay(runs["A"], runs["B"])
    assert [lane.trace for lane in shown.lanes if lane.trace] and shown.traces[0] is runs["A"].trace
    shown.close()


def test_a_setting_that_fails_is_a_sentence_and_the_others_go_on() -> None:
    settings = {
        "unknown word": {"transfer": "carrier_pigeon", **SIZES},
        "unknown option": {"pigeons": 3, **SIZES},
        "too small": {**SIZES, "num_blocks": 3},
        "fine": SETTINGS["MRV2"],
    }
    runs = run(settings)
    assert [name for name, one in runs.items() if one.error is None] == ["fine"]
    assert "carrier_pigeon" in str(runs["unknown word"].error)
    assert "pigeons" in str(runs["unknown option"].error)
    assert "\n" not in str(runs["too small"].error)
    assert "failed" in repr(runs["too small"]) and "median" in repr(runs["fine"])
    assert list(figures_frame(runs).columns) == ["fine"]


def test_an_error_in_the_middle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Engine, workload: Workload, *, steps: int | None = None, **how: Any) -> Any:
        if how and engine.config.runner.runner == "v1":
            drive(engine, workload, steps=1)
            raise RuntimeError("out of ink")
        return drive(engine, workload, steps=steps, **how)

    monkeypatch.setattr(side_by_side, "drive", broken)
    runs = run({"V1": SETTINGS["V1"], "MRV2": SETTINGS["MRV2"]})
    assert runs["V1"].error == "out of ink" and runs["MRV2"].error is None


def test_one_engine_lives_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = side_by_side.Engine

    def engine(*args: Any, **options: Any) -> Engine:
        gc.collect()
        assert [one() for one in made if one() is not None] == []
        one = real(*args, **options)
        made.append(weakref.ref(one))
        return one

    monkeypatch.setattr(side_by_side, "Engine", engine)
    runs = run()
    assert [one.error for one in runs.values()] == [None] * 3
    assert len(made) == 3


def test_steps_and_stopping() -> None:
    runs = run(
        {"V1": SETTINGS["V1"], "MRV2": SETTINGS["MRV2"]}, steady(6, every=3, prompt_len=4, max_tokens=6), steps=5
    )
    for one in runs.values():
        assert one.report is not None and one.report.steps == 5
        assert {output.finish_reason for output in one.report.outputs.values()} <= {"abort", "length"}
    asked: list[tuple[str, int]] = []

    def go_on(name: str, turns: int) -> bool:
        asked.append((name, turns))
        return turns < 2

    stopped = run(on_step=go_on)
    assert list(stopped) == ["V1"]  # the others are not begun
    assert stopped["V1"].figures["steps"] == 2
    assert asked == [("V1", 0), ("V1", 1), ("V1", 2)]
    never = run(on_step=lambda name, turns: False)
    assert never["V1"].error == "stopped before its first step"


@pytest.mark.parametrize(
    ("settings", "how", "match"),
    [({}, {}, "no settings"), (SETTINGS, {"steps": 0}, "steps"), (SETTINGS, {"warmup": -1}, "warmup")],
)
def test_bad_arguments(settings: Any, how: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run(settings, **how)


def test_drive_is_engine_run_with_an_end() -> None:
    work = steady(5, every=2, prompt_len=(3, 8), max_tokens=(4, 8), temperature=1.0, seed=3)
    with Engine(MODEL, **SIZES) as one, Engine(MODEL, **SIZES) as other:
        run, driven = one.run(work, progress=False), drive(other, work)
        assert [o.token_ids for o in run.outputs.values()] == [o.token_ids for o in driven.outputs.values()]
        assert (run.steps, run.stats, run.workload) == (driven.steps, driven.stats, driven.workload)
        with pytest.raises(ValueError, match="max_model_len"):
            drive(other, burst(2, prompt_len=40))
        assert not other.requests or all(output.finished for output in other.requests.values())


def test_a_plain_log_lets_go_of_the_engine() -> None:
    with small_engine() as engine:
        with side_by_side._Listening(engine):
            drive(engine, WORK, steps=2)
        assert "step" not in vars(engine) and not isinstance(engine.observer, HostLog)
        engine.observer = log = EventLog()
        drive(engine, WORK, steps=2)
        assert log.spans


def test_mutant_a_warm_up_that_is_not_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side.Engine, "reset", lambda self: None)
    with pytest.raises(AssertionError):
        test_the_warm_up_leaves_no_trace()


def test_mutant_a_hook_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepHook, "detach", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_plain_log_lets_go_of_the_engine()
