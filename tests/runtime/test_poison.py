"""Work that raises poisons its stream until a reset; worker threads end, whatever happened."""

from __future__ import annotations

import threading

import pytest
import torch

from mrv2lab.runtime.base import DeviceError, Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.software import DeferredStream, ThreadedStream
from tests.runtime.machines import device, machine, pinned, raw_values, seen


def test_an_error_poisons_its_stream_and_names_the_launch(soft: Runtime) -> None:
    there = device(soft, 1)
    soft.run("boom", there, writes=(there,))  # the line that the error must name
    soft.run("fill", there, 1, writes=(there,))
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"run 'boom', launched at .*test_poison\.py:\d+, raised Arithm") as hit:
            soft.synchronize()
    assert isinstance(hit.value.__cause__, ArithmeticError)
    line = int(str(hit.value).split(".py:")[1].split(",")[0])
    with open(__file__, encoding="utf-8") as file:
        assert "must name" in file.read().splitlines()[line - 1]
    assert raw_values(soft, there) == [0]  # nothing behind the error runs


def test_every_kind_of_wait_raises(cpu: CpuRuntime) -> None:
    there, event = device(cpu, 1), cpu.event("e")
    cpu.run("boom", there, writes=(there,))
    event.record()
    for wait in (event.synchronize, cpu.main.synchronize, cpu.synchronize, there.item, lambda: cpu.read(there)):
        with pytest.raises(DeviceError, match="boom"):
            wait()
    with pytest.raises(DeviceError, match="boom"):
        cpu.h2d(there, torch.zeros(1, dtype=torch.int32))


def test_an_event_before_the_error_is_fine(cpu: CpuRuntime) -> None:
    there, event = device(cpu, 1), cpu.event("before")
    cpu.run("fill", there, 4, writes=(there,))
    event.record()
    cpu.run("boom", there, writes=(there,))
    event.synchronize()
    assert raw_values(cpu, there) == [4]


def test_poison_spreads_to_dependents_and_not_to_others(soft: Runtime) -> None:
    there, back, ready = device(soft, 1), pinned(soft, [5]), soft.event("ready")
    other = soft.stream("other")
    soft.run("boom", there, writes=(there,))
    ready.record()
    soft.copy.wait_event(ready)
    with soft.use(soft.copy):
        soft.d2h(back, there)
    with soft.use(other):
        soft.run("fill", there, 8, writes=(there,))
    other.synchronize()
    with pytest.raises(DeviceError, match="boom"):
        soft.copy.synchronize()
    assert back.tolist() == [5]


def test_reset_clears_the_poison_and_later_work_runs(soft: Runtime) -> None:
    there, ready = device(soft, 1), soft.event("ready")
    soft.run("boom", there, writes=(there,))
    soft.run("fill", there, 1, writes=(there,))
    ready.record()
    soft.copy.wait_event(ready)
    soft.reset()
    ready.synchronize()  # what was dropped is not waited for
    soft.synchronize()
    assert raw_values(soft, there) == [0]
    soft.run("fill", there, 2, writes=(there,))
    assert seen(soft, there) == [2]


def test_a_replay_names_itself_and_the_captured_launch(cpu: CpuRuntime) -> None:
    there, graph = device(cpu, 1), cpu.graph("decode")
    with graph.capture():
        cpu.run("boom", there, writes=(there,))
    graph.replay()
    with pytest.raises(DeviceError, match=r"replay 'decode', launched at .*, in run 'boom', captured at .*test_poison"):
        cpu.synchronize()


def test_the_stop_button_poisons_the_stream_it_hits(cpu: CpuRuntime) -> None:
    """Half of a record has run: nobody may go on as if it had."""

    def stop() -> None:
        raise KeyboardInterrupt

    cpu.register("stop", stop)
    cpu.run("stop")
    with pytest.raises(KeyboardInterrupt):
        cpu.synchronize()
    with pytest.raises(DeviceError, match="KeyboardInterrupt"):
        cpu.synchronize()
    cpu.reset()
    cpu.synchronize()


# -- threads -----------------------------------------------------------------------------------------------------------


def test_reset_does_not_run_what_is_queued_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device stands until the host waits for it, as the reset does."""
    gate, wait = threading.Event(), ThreadedStream._await
    monkeypatch.setattr(ThreadedStream, "_await", lambda self, position: gate.set() or wait(self, position))
    with machine("threaded") as rt:
        there = device(rt, 1)
        rt.register("wait", lambda: gate.wait(60))
        rt.run("wait")
        rt.run("fill", there, 1, writes=(there,))
        rt.reset()
        assert raw_values(rt, there) == [0]
        rt.run("fill", there, 2, writes=(there,))
        assert seen(rt, there) == [2]


def test_closing_finishes_the_queue_and_ends_every_worker() -> None:
    names = {thread.name for thread in threading.enumerate()}
    with machine("threaded") as rt:
        rt.stream("third")
        there = device(rt, 1)
        for _ in range(200):
            rt.run("add", there, 1, writes=(there,))
        rt.close()
        assert raw_values(rt, there) == [200]
        assert {thread.name for thread in threading.enumerate()} == names
        rt.close()  # twice is fine
        with pytest.raises(RuntimeError, match="'main' is closed"):
            rt.run("add", there, 1, writes=(there,))
        rt.synchronize()


def test_closing_a_poisoned_runtime_ends_too() -> None:
    with machine("threaded") as rt:
        there = device(rt, 1)
        rt.run("boom", there, writes=(there,))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mrv2lab-")]


def test_workers_are_in_inference_mode(soft: Runtime) -> None:
    modes: list[bool] = []
    soft.register("mode", lambda: modes.append(torch.is_inference_mode_enabled()))
    soft.run("mode")
    soft.synchronize()
    assert modes == [True]
    assert not torch.is_inference_mode_enabled()


def test_mutant_an_error_that_is_swallowed(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredStream, "check", lambda self: None)
    with pytest.raises(pytest.fail.Exception):
        test_an_error_poisons_its_stream_and_names_the_launch(cpu)
