"""What a profile refuses, and what it says where something was lost."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.recorder.annotate import annotate
from mrv2lab.recorder.profile import REPLACED, profile
from mrv2lab.recorder.recorder import Recorder
from tests.recorder.profiled import assert_untouched, profiled, step_numbers
from tests.recorder.runs import busy_engine, work


def test_results_inside_the_with_are_refused() -> None:
    with busy_engine() as engine, profile(engine, warmup=0) as p:
        work(engine, 2)
        for what in ("trace", "recording", "log", "marks", "waits"):
            with pytest.raises(RuntimeError, match="behind the `with`"):
                getattr(p, what)
        assert "not over" in repr(p)


def test_a_profile_shorter_than_its_warm_up_says_so() -> None:
    _, p = profiled({}, steps=2, warmup=5)
    with pytest.raises(RuntimeError, match=r"first 5 turns are warm-up, and the engine made 2"):
        _ = p.trace
    assert "empty" in repr(p)


def test_nested_profiles_are_refused() -> None:
    with busy_engine() as engine:
        with profile(engine, warmup=1) as p:
            for _ in range(2):  # in the warm-up and behind it
                with pytest.raises(RuntimeError, match="being profiled already"), profile(engine):
                    pass
                work(engine, 2)
        assert_untouched(engine, engine.observer)
        assert p.problems == []
        with pytest.raises(RuntimeError, match="taken once"), p:
            pass


def test_a_recorded_engine_is_refused() -> None:
    with busy_engine() as engine, Recorder(engine) as recorder:
        with pytest.raises(RuntimeError, match="being recorded"), profile(engine):
            pass
        assert_untouched(engine, recorder.listener)  # type: ignore[arg-type]


def test_a_closed_engine_is_refused() -> None:
    with busy_engine() as engine:
        pass
    with pytest.raises(RuntimeError, match="closed"), profile(engine):
        pass


@pytest.mark.parametrize("how", [{"warmup": -1}, {"warmup": 1.5}, {"warmup": True}, {"path": "trace.txt"}], ids=str)
def test_bad_arguments_are_refused_at_once(how: dict[str, Any]) -> None:
    with busy_engine() as engine, pytest.raises(ValueError, match=r"warmup|\.json"):
        profile(engine, **how)


def test_somebody_elses_observer_inside_is_noticed() -> None:
    with busy_engine() as engine:
        with profile(engine, warmup=0, record=False) as p:
            work(engine, 3)
            with Recorder(engine):
                work(engine, 3)
        assert p.problems == [REPLACED]
        assert_untouched(engine, engine.observer)


def test_profiles_and_annotations_nest_and_may_end_crosswise() -> None:
    with busy_engine() as engine:
        before = engine.observer
        with annotate(engine), profile(engine, warmup=0) as inner:
            work(engine, 3)
        assert_untouched(engine, before)
        outer, names = profile(engine, warmup=0), annotate(engine)
        outer.__enter__()
        work(engine, 2)
        names.__enter__()
        work(engine, 2)
        outer.__exit__(None, None, None)
        work(engine, 2)
        names.__exit__(None, None, None)
        assert "step" not in vars(engine) or engine.step() is not None
        assert len(outer.log.turns) == 4
    assert inner.problems == []


def test_reset_inside_a_profile() -> None:
    with busy_engine() as engine:
        with profile(engine, warmup=0) as p:
            work(engine, 4)
            engine.reset()
            work(engine, 4)
        assert [turn.step for turn in p.log.turns] == [-1, 0, 1, 2] * 2
        assert step_numbers(p.trace) == [0, 1, 2] * 2
        assert_untouched(engine, engine.observer)
