"""Ranges open and close around steps and phases, whatever happens inside, and nobody else is disturbed."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mrv2lab.observer import EventLog
from mrv2lab.recorder import annotate as annotate_module
from mrv2lab.recorder.annotate import Annotator, annotate, nvtx_range
from mrv2lab.recorder.profile import profile
from mrv2lab.recorder.step_hook import StepHook, hooks
from tests.engine.small import sampled, small_engine


class Ranges:
    """A profiler that writes down what opens and closes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Any:
        self.said.append(f"+{name}")
        try:
            yield
        finally:
            self.said.append(f"-{name}")


def balanced(said: list[str]) -> bool:
    stack: list[str] = []
    for one in said:
        if one[0] == "+":
            stack.append(one[1:])
        elif not stack or stack.pop() != one[1:]:
            return False
    return not stack


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """A package ``nvtx`` that writes down its ranges."""
    ranges = Ranges()
    module = types.ModuleType("nvtx")
    module.annotate = lambda name, domain: ranges(f"{domain}:{name}")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return ranges


def test_nvtx_ranges_of_one_synchronous_step(nvtx: Ranges) -> None:
    with small_engine(async_scheduling=False) as engine, annotate(engine):
        engine.submit([1, 2, 3], sampled(2))
        engine.step()
    said = [one.replace("mrv2lab:mrv2lab.", "") for one in nvtx.said]
    assert said[0] == "+step#0" and said[-1] == "-step#0"
    assert [one for one in said if one[0] == "+"] == [
        "+step#0",
        "+phase.schedule",
        "+execute#0_context_1(3)_generation_0(0)",
        "+phase.update_states",
        "+phase.apply_writes",
        "+phase.prepare_inputs",
        "+phase.gather",
        "+phase.prepare_attn",
        "+phase.forward",
        "+phase.logits",
        "+phase.sample",
        "+phase.copy_output",
        "+phase.postprocess",
        "+phase.wait_output",
        "+phase.update_from_output",
    ]
    assert said.index("-phase.schedule") < said.index("+execute#0_context_1(3)_generation_0(0)")
    assert said.index("-execute#0_context_1(3)_generation_0(0)") < said.index("+phase.wait_output")
    assert balanced(said)


def test_v1s_barrier_and_sub_phases_have_ranges(nvtx: Ranges) -> None:
    with small_engine(runner="v1") as engine, annotate(engine, profiler=False):
        engine.submit([1, 2, 3], sampled(3))
        while engine.has_work():
            engine.step()
    opened = {one.rpartition(".")[2] for one in nvtx.said if one[0] == "+"}
    assert {"barrier_wait", "wait_output", "sample/output_repair"} <= opened
    assert balanced(nvtx.said)


def test_ranges_close_when_a_step_raises(nvtx: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        before = engine.observer
        monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 // 0)
        engine.submit([1, 2, 3], sampled())
        with pytest.raises(ZeroDivisionError), annotate(engine):
            engine.step()
        assert engine.observer is before
        assert "step" not in vars(engine)
    assert nvtx.said[0].endswith("step#0") and balanced(nvtx.said)


def test_the_observer_hears_everything_and_is_put_back() -> None:
    log = EventLog(call_sites=True)
    with small_engine() as engine:
        engine.observer = log
        with annotate(engine, nvtx=False) as annotator:
            assert annotator.enabled and annotator.call_sites
            engine.generate([1, 2, 3], sampled(3))
        assert engine.observer is log
    assert {"schedule", "forward", "wait_output"} <= {span.name for span in log.spans}
    assert any(mark.kind == "run" for mark in log.marks)
    assert "running" not in dict(log.gauges) and log.gauges


def test_without_an_observer_the_chokepoints_stay_silent() -> None:
    with small_engine() as engine, annotate(engine, nvtx=False) as annotator:
        assert not annotator.enabled
        engine.generate([1, 2, 3], sampled(3))


def test_torch_profiler_sees_the_ranges() -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with small_engine() as engine, profiler as seen, annotate(engine, nvtx=False):
        engine.generate([1, 2, 3], sampled(3))
    names = {event.key for event in seen.key_averages()}
    assert {"mrv2lab.step#0", "mrv2lab.phase.forward"} <= names


def test_no_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)

    def missing(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    assert nvtx_range() is None
    with small_engine() as engine:
        with pytest.raises(RuntimeError, match="pip install nvtx"), annotate(engine, nvtx=True):
            pass
        with annotate(engine) as annotator:  # None: none is fine
            engine.generate([1, 2, 3], sampled(2))
        assert isinstance(annotator, Annotator)


def test_nvtx_of_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: 0)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: 0)
    monkeypatch.setattr(torch.cuda.nvtx, "range", ranges)
    with small_engine() as engine, annotate(engine, nvtx=True):
        engine.generate([1, 2, 3], sampled(2))
    assert "+mrv2lab.step#0" in ranges.said and balanced(ranges.said)


def test_mutant_a_step_that_is_not_closed_is_caught(nvtx: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []  # a range that is let go closes itself
    monkeypatch.setattr(annotate_module.Annotator, "end_turn", lambda self: kept.append(self._step))
    with pytest.raises(AssertionError):
        test_nvtx_ranges_of_one_synchronous_step(nvtx)


def test_hooks_nest_and_detach_in_any_order() -> None:
    said: list[str] = []
    with small_engine(async_scheduling=False) as engine:
        first, second = (
            StepHook(engine, lambda n, name=name: said.append(f"{name}{n}"), lambda n: None)  # type: ignore[misc]
            for name in "ab"
        )
        first.attach()
        second.attach()
        assert list(hooks(engine)) == [second, first]
        engine.step()
        first.detach()
        engine.step()
        second.detach()
        engine.step()
        assert said == ["b0", "a0", "b1"]


def test_what_a_hook_raises_leaves_the_engine_usable() -> None:
    def stop(number: int) -> None:
        raise KeyboardInterrupt

    with small_engine() as engine:
        hook = StepHook(engine, stop, lambda n: None)
        hook.attach()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        hook.detach()
        assert engine.step() == []


def test_annotate_within_a_profile_leaves_nothing_behind() -> None:
    engine = small_engine()
    before = engine.observer
    with profile(engine, warmup=0, record=False) as profiled:
        with annotate(engine):
            engine.submit([1, 2, 3], sampled(3))
            engine.step()  # here the profile begins to listen, around the annotator
        ended = next(one for one in profiled._observer._observers if isinstance(one, Annotator))
        while engine.has_work():
            engine.step()
    assert engine.observer is before and "step" not in vars(engine)
    assert ended._openers == ()
    assert profiled.trace.mask("phase").any()


def test_hooks_that_end_in_the_order_of_their_beginning_are_all_gone() -> None:
    engine = small_engine()
    one, two, three = (StepHook(engine, lambda step: None, lambda step: None) for _ in range(3))
    for hook in (one, two, three):
        hook.attach()
    for hook in (one, two, three):
        hook.detach()
    assert "step" not in vars(engine) and not list(hooks(engine))
