"""Step mode: the phases of an unchanged engine one by one, interrupts, and every way out of the middle of a step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.observer import WAITS, EventLog
from mrv2lab.recorder import paused as module
from mrv2lab.recorder.paused import PausedStep, paused_step
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runtime.base import DeviceError
from tests.engine.small import MODEL, sampled, small_engine
from tests.recorder.runs import OPTIONS, TRANSPORTS, busy_engine, device_work, tokens, work
from tests.recorder.stops import (
    FAR_TOO_LONG,
    a_stop_interrupts,  # noqa: F401
    press_stop,
    press_stop_and_let_the_reader_wait_again,
)
from tests.steady_clock import steady_clock

LAUNCH = (
    "schedule update_states apply_writes prepare_inputs gather prepare_attn forward logits sample copy_output "
    "postprocess"
).split()
SETTLE = ["wait_output", "update_from_output"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "mrv2lab-paused-step"]
    if left:  # in a cycle of rubbish; half a second beside a library as large as torch
        gc.collect()
    for thread in left:
        thread.join(FAR_TOO_LONG)
        assert not thread.is_alive(), "a paused step's thread outlives its test"


def engine_with_work(**options: Any) -> Engine:
    engine = small_engine(**{"async_scheduling": False} | options)
    engine.submit([1, 2, 3], sampled(6))
    engine.submit([4, 5, 6, 8], sampled(6))
    return engine


def usable(engine: Engine) -> bool:
    """Whether the engine runs a request to its end, as a new one would."""
    return len(engine.generate([[9, 9]], sampled(3))[0].token_ids) == 3


# -- phases ------------------------------------------------------------------------------------------------------------
def test_the_phases_of_a_step_are_these() -> None:
    with engine_with_work() as engine:
        assert list(paused_step(engine)) == LAUNCH + SETTLE
        assert list(paused_step(engine)) == LAUNCH + SETTLE
        assert engine.num_steps == 2


def test_an_asynchronous_step_launches_one_step_and_settles_the_one_before() -> None:
    with engine_with_work(async_scheduling=True) as engine:
        seen: list[list[tuple[str, int | None]]] = []
        for _ in range(2):
            step = PausedStep(engine)
            assert step.phase is None
            assert step.step is None
            seen.append([(phase, step.step) for phase in iter(step.advance, None)])
        assert seen[0] == [(phase, 0) for phase in LAUNCH]
        assert seen[1] == [(phase, 1) for phase in LAUNCH] + [(phase, 0) for phase in SETTLE]
        assert [output.request_id for output in step.outputs] == ["r0", "r1"]


def test_everything_can_be_read_between_phases() -> None:
    with engine_with_work() as engine:
        runner, read = engine.worker.runner, engine.rt.read
        step = PausedStep(engine)
        seen = {}
        while (phase := step.advance()) is not None:
            total = read(runner.req_states.total_len.gpu).tolist()
            staged = {name: [d.row for d in diffs] for name, diffs in runner.staged().items()}
            seen[phase] = (total, staged, runner.batch is not None, runner.logits is not None)
    rows = [3, 2]  # the highest is given first
    every = dict.fromkeys("all_token_ids total_len num_computed_tokens block_table.0".split(), rows)
    assert seen["schedule"] == ([0, 0, 0, 0], {}, False, False)
    assert seen["update_states"] == ([0, 0, 0, 0], every, False, False)
    assert seen["apply_writes"] == ([0, 0, 4, 3], {}, False, False)
    assert seen["prepare_inputs"] == ([0, 0, 4, 3], {}, True, False)
    assert seen["logits"] == ([0, 0, 4, 3], {}, True, True)
    assert seen["postprocess"] == ([0, 0, 5, 4], {}, True, True)


@pytest.mark.parametrize("options", TRANSPORTS, ids=lambda o: "-".join(map(str, o.values())) or "plain")
def test_pausing_changes_neither_tokens_nor_device_work(options: dict[str, Any]) -> None:
    log = EventLog()
    with busy_engine(**options) as engine:
        engine.observer = log
        work(engine, 30)
        plain, plain_work = tokens(engine), device_work(log.marks)
    log = EventLog()
    with PhaseByPhase(MODEL, **OPTIONS | options) as engine:
        engine.observer = log
        work(engine, 30)
        assert tokens(engine) == plain
        assert device_work(log.marks) == plain_work


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_pausing_changes_nothing_on_a_gpu(policy: str) -> None:
    test_pausing_changes_neither_tokens_nor_device_work({"device": "cuda", "transfer": policy})


class PhaseByPhase(Engine):
    """Every step of it is a paused one."""

    def step(self) -> list[RequestOutput]:
        return PausedStep(self).finish()


def test_what_a_reader_asks_for_is_labelled_as_added() -> None:
    with engine_with_work() as engine, Recorder(engine) as rec:
        engine.step()
        for _ in paused_step(engine):
            engine.rt.synchronize()
        plain, paused = rec.recording
    waits = [[(mark.name, mark.added) for mark in step.marks if mark.kind in WAITS] for step in (plain, paused)]
    assert waits[0] == [("sampled.0.copied", False)]
    assert [wait for wait in waits[1] if not wait[1]] == [("sampled.0.copied", False)]
    # a synchronisation of both streams at each of 12 pauses; the 13th comes when the step is settled
    assert [wait[0] for wait in waits[1] if wait[1]][:24] == ["main", "copy"] * 12
    assert (plain.paused, paused.paused) == (False, True)


def test_mutant_an_unlabelled_reader_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = module._StepThread._stand

    def unlabelled(self: Any, phase: str) -> None:
        self._hook._probes.busy = False
        stand(self, phase)

    monkeypatch.setattr(module._StepThread, "_stand", unlabelled)
    with pytest.raises(AssertionError):
        test_what_a_reader_asks_for_is_labelled_as_added()


def test_modelled_time_stands_still_while_the_reader_thinks() -> None:
    times = []
    for thought_ns in (0, 30_000_000):
        with steady_clock() as clock, engine_with_work() as engine, Recorder(engine) as rec:
            engine.step()
            for _ in paused_step(engine):
                clock.advance(thought_ns)
            spans = rec.recording[1].spans
        assert len([span for span in spans if not span.depth]) == 13
        times.append([(span.name, span.start_ns, span.end_ns) for span in spans])
    assert times[0] == times[1]


# -- errors ------------------------------------------------------------------------------------------------------------
def break_gather(engine: Engine, monkeypatch: pytest.MonkeyPatch, what: Callable[[], Any]) -> None:
    monkeypatch.setattr(engine.worker.runner.block_tables, "gather", lambda *args: what())


def raising(error: BaseException) -> Callable[[], Any]:
    def raises() -> Any:
        raise error

    return raises


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_a_phase_raises_comes_out_of_advance(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with_work() as engine:
        step = PausedStep(engine)
        with monkeypatch.context() as patch:
            break_gather(engine, patch, raising(error))
            assert [step.advance() for _ in range(4)] == LAUNCH[:4]
            with pytest.raises(type(error)) as caught:
                step.advance()
            assert caught.value is error
        assert step.advance() is None
        with pytest.raises(RuntimeError, match=r"broke off with \w+; engine.reset\(\)"):
            engine.step()
        engine.reset()
        assert usable(engine)


def test_a_device_error_comes_to_the_reader_and_to_the_step() -> None:
    def bad(tensor: Any) -> None:
        raise ValueError("in the queue")

    with engine_with_work() as engine:
        engine.rt.register("bad", bad)
        step = standing(engine)
        engine.rt.run("bad", engine.worker.runner.num_rejected)
        for _ in range(2):
            with pytest.raises(DeviceError, match="in the queue"):
                engine.rt.synchronize()
        with pytest.raises(DeviceError, match=r"engine.reset\(\)"):
            step.finish()
        engine.reset()
        assert usable(engine)


# -- interrupts while the reader waits ---------------------------------------------------------------------------------
def test_an_interrupt_while_waiting_lets_the_phase_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with_work() as engine:
        gather = engine.worker.runner.block_tables.gather

        def slow(*args: Any) -> Any:
            press_stop_and_let_the_reader_wait_again()
            return gather(*args)

        monkeypatch.setattr(engine.worker.runner.block_tables, "gather", slow)
        step = PausedStep(engine)
        assert [step.advance() for _ in range(4)] == LAUNCH[:4]
        with pytest.raises(KeyboardInterrupt):
            step.advance()
        assert (step.phase, step.open) == ("gather", True)
        engine.rt.read(engine.worker.runner.req_states.total_len.gpu)  # it stands
        assert list(iter(step.advance, None)) == LAUNCH[4:] + SETTLE  # gather is not lost
        monkeypatch.undo()
        assert usable(engine)


def test_mutant_a_phase_that_is_lost_to_an_interrupt_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on = module._StepThread.run_on
    monkeypatch.setattr(module._StepThread, "run_on", lambda self, told: run_on(self, self.stops))
    with pytest.raises(AssertionError):
        test_an_interrupt_while_waiting_lets_the_phase_end(monkeypatch)


def test_a_second_interrupt_leaves_at_once_and_the_step_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with engine_with_work() as engine:
        gather = engine.worker.runner.block_tables.gather

        def stuck(*args: Any) -> Any:
            press_stop_and_let_the_reader_wait_again()
            press_stop()
            go_on.wait(FAR_TOO_LONG)
            return gather(*args)

        step = PausedStep(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker.runner.block_tables, "gather", stuck)
            with pytest.raises(KeyboardInterrupt):
                step.finish()
            assert not go_on.is_set()  # left while the phase was going on
            with pytest.raises(RuntimeError, match="a paused step of this engine is open"):
                engine.step()
            go_on.set()
            assert step.advance() == "gather"
        step.finish()
        assert usable(engine)


# -- the engine while a step stands ------------------------------------------------------------------------------------
def standing(engine: Engine) -> PausedStep:
    step = PausedStep(engine)
    while step.advance() != "forward":
        pass
    return step


def test_the_engine_says_what_to_do_while_a_step_stands() -> None:
    sentence = (
        r"^a paused step of this engine is open and stands behind 'forward': run it to its end \(finish\(\) of the "
        r"PausedStep, or the explorer's Next step\), or give it up with engine.reset\(\)$"
    )
    with engine_with_work() as engine:
        step = standing(engine)
        uses: list[Callable[[], Any]] = [
            engine.step,
            lambda: engine.generate([[9]], sampled(2)),
            lambda: PausedStep(engine),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=sentence):
                use()
        assert len(engine.rows()) == 2  # looking is allowed
        assert [output.request_id for output in step.finish()] == ["r0", "r1"]
        while engine.has_work():
            engine.step()
        assert len(engine.requests["r2"].token_ids) == 2  # what generate() had submitted


def test_reset_gives_the_step_up() -> None:
    with engine_with_work() as engine:
        step = standing(engine)
        engine.reset()
        assert (step.open, step.phase, step.advance()) == (False, None, None)
        assert engine.requests["r0"].finish_reason == "abort"
        assert usable(engine)


def test_close_gives_the_step_up() -> None:
    engine = engine_with_work(stream="threaded")
    step = standing(engine)
    engine.close()
    assert not step.open
    with pytest.raises(RuntimeError, match="was closed"):
        engine.step()


def test_cancel_leaves_an_engine_that_says_how_to_go_on() -> None:
    with engine_with_work() as engine:
        standing(engine).cancel()
        with pytest.raises(RuntimeError, match=r"broke off with StepCancelled; engine.reset\(\)"):
            engine.step()
        engine.reset()
        assert usable(engine)


def test_a_step_that_had_not_begun_is_cancelled_without_a_trace() -> None:
    with engine_with_work() as engine:
        PausedStep(engine).cancel()
        assert [output.request_id for output in engine.step()] == ["r0", "r1"]


def test_leaving_the_loop_runs_the_step_to_its_end() -> None:
    with engine_with_work() as engine:
        for phase in paused_step(engine):
            if phase == "gather":
                break
        gc.collect()
        assert engine.num_steps == 1
        assert usable(engine)


def test_an_error_in_the_loop_leaves_an_engine_that_says_how_to_go_on() -> None:
    with engine_with_work() as engine:
        loop = paused_step(engine)  # in a notebook the traceback keeps it
        assert next(loop) == "schedule"
        with pytest.raises(RuntimeError, match=r"stands behind 'schedule'.*engine.reset\(\)"):
            engine.step()
        engine.reset()
        assert usable(engine)


def test_a_forgotten_step_is_given_up() -> None:
    with engine_with_work() as engine:
        step = standing(engine)
        thread = step._thread
        del step
        gc.collect()
        thread.join(FAR_TOO_LONG)
        assert not thread.is_alive()
        engine.reset()
        assert usable(engine)


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_nothing_is_left_in_the_engine(end: str) -> None:
    log = EventLog()
    engine = engine_with_work(observer=log)
    step = standing(engine)
    getattr(step, end)()
    assert {"step", "reset", "close"} & set(vars(engine)) == set()
    assert engine.observer is engine.rt.observer is engine.core.observer is log
    engine.close()
    gone = weakref.ref(engine)
    del engine, step
    gc.collect()
    assert gone() is None
