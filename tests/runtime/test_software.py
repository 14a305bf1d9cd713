"""Software streams: a wait runs exactly its prefix, a full queue blocks, the clock is modelled."""

from __future__ import annotations

import random
import threading

import pytest

from mrv2lab.observer import EventLog
from mrv2lab.runtime import software
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.clock import CostModel, VirtualClock
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.software import DeferredStream, SoftwareEvent, ThreadedStream
from tests.runtime.machines import device, log, machine, marks, pinned, raw_values, seen
from tests.steady_clock import READ_NS, SteadyClock

# -- exactly the prefix ------------------------------------------------------------------------------------------------


def test_a_wait_runs_exactly_its_prefix(cpu: CpuRuntime) -> None:
    there, event = device(cpu, 1), cpu.event("middle")
    for value in range(1, 6):
        cpu.run("fill", there, value, writes=(there,))
        if value == 3:
            event.record()
    assert raw_values(cpu, there) == [0]
    event.synchronize()
    assert raw_values(cpu, there) == [3]
    assert (cpu.main.done, cpu.main.queued) == (3, 5)
    event.synchronize()
    assert raw_values(cpu, there) == [3]
    cpu.main.synchronize()
    assert raw_values(cpu, there) == [5]


def test_a_wait_runs_exactly_what_it_depends_on_across_streams(cpu: CpuRuntime) -> None:
    """a: 1 2 [ready] 3     b: wait ready, copy, [copied], wait late, copy"""
    side, there, back = cpu.stream("side"), device(cpu, 1), pinned(cpu, [0])
    ready, late, copied = cpu.event("ready"), cpu.event("late"), cpu.event("copied")
    cpu.run("fill", there, 1, writes=(there,))
    cpu.run("fill", there, 2, writes=(there,))
    ready.record()
    side.wait_event(ready)
    with cpu.use(side):
        cpu.d2h(back, there)
        copied.record()
    cpu.run("fill", there, 3, writes=(there,))
    late.record()
    side.wait_event(late)
    with cpu.use(side):
        cpu.d2h(back, there)
    copied.synchronize()
    assert (cpu.main.done, side.done) == (2, 2)
    assert (raw_values(cpu, there), back.tolist()) == ([2], [2])
    side.synchronize()
    assert (cpu.main.done, side.done, back.tolist()) == (3, 4, [3])


def test_random_programs_run_exactly_the_dependencies() -> None:
    """Against a model: the items an event depends on, by walking the program."""
    for seed in range(25):
        _random_program(random.Random(seed))


def _random_program(choose: random.Random) -> None:
    rt = CpuRuntime()
    ran: list[int] = []
    rt.register("note", ran.append)
    streams = [rt.main, rt.copy, rt.stream("third")]
    # program[s] = launches (a number) and waits (an event's dependency set) of stream s
    program: list[list[int | frozenset[int]]] = [[], [], []]
    events: list[tuple[SoftwareEvent, frozenset[int]]] = []

    def needed(s: int) -> frozenset[int]:
        parts = [frozenset([item]) if isinstance(item, int) else item for item in program[s]]
        return frozenset().union(*parts)

    for number in range(80):
        s = choose.randrange(3)
        what = choose.random()
        if what < 0.5 or not events:
            with rt.use(streams[s]):
                rt.run("note", number)
            program[s].append(number)
        elif what < 0.7:
            event, wanted = choose.choice(events)
            streams[s].wait_event(event)
            program[s].append(wanted)
        elif what < 0.8:
            event, wanted = choose.choice(events)
            before = set(ran)
            assert wanted <= before or not event.query()
            assert set(ran) == before  # a query runs nothing
            event.synchronize()
            assert set(ran) == before | wanted
            assert event.query()
        if what >= 0.8 or not events:
            made = rt.event(f"e{number}")
            made.record(streams[s])
            events.append((made, needed(s)))
    rt.synchronize()
    assert sorted(ran) == sorted(item for items in program for item in items if isinstance(item, int))


def test_a_query_runs_nothing(cpu: CpuRuntime) -> None:
    there, event = device(cpu, 1), cpu.event("e")
    cpu.run("fill", there, 1, writes=(there,))
    event.record()
    assert [event.query() for _ in range(3)] == [False] * 3
    assert raw_values(cpu, there) == [0]
    event.synchronize()
    assert event.query()


def test_an_event_recorded_again_means_the_later_point(soft: Runtime) -> None:
    there, event = device(soft, 1), soft.event("e")
    for value in (1, 2):
        soft.run("fill", there, value, writes=(there,))
        event.record()
    event.synchronize()
    assert raw_values(soft, there) == [2]


@pytest.mark.parametrize(("lag", "right"), [(0, [3, 3, 3]), (1, [0, 1, 2]), (2, [0, 0, 1]), (None, [0, 0, 0])])
def test_lag_is_counted_in_steps(lag: int | None, right: list[int]) -> None:
    with machine("deferred", lag=lag) as rt:
        there, values = device(rt, 1), []
        for step in range(1, 4):
            for value in (100, 200, step):
                rt.run("fill", there, value, writes=(there,))
            rt.end_step()
            values.append(int(raw_values(rt, there)[0]))
        if lag == 0:
            right = [1, 2, 3]
        assert values == right


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="stream must be one of"):
        CpuRuntime(stream="lazy")
    with pytest.raises(ValueError, match="need a GPU"):
        CpuRuntime(backend="triton")


# -- a full queue ------------------------------------------------------------------------------------------------------


def test_a_full_queue_blocks_the_host_and_says_so(cpu: CpuRuntime) -> None:
    there = device(cpu, 1)
    for _ in range(software.MAX_QUEUED):
        cpu.run("add", there, 1, writes=(there,))
    assert not marks(cpu, "queue_full")
    assert cpu.main.done == 0
    cpu.run("add", there, 1, writes=(there,))
    (mark,) = marks(cpu, "queue_full")
    assert (mark.name, mark.stream) == ("main", "main")
    assert mark.wait_ns >= 0  # 0 where the modelled device has long caught up with a slow host
    assert mark in log(cpu).waits()
    assert cpu.main.done == 1
    assert seen(cpu, there) == [software.MAX_QUEUED + 1]


def test_a_full_threaded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device stands until the host waits for it."""
    gate, wait = threading.Event(), ThreadedStream.wait
    monkeypatch.setattr(software, "MAX_QUEUED", 4)
    monkeypatch.setattr(ThreadedStream, "wait", lambda self, position: gate.set() or wait(self, position))
    with machine("threaded") as rt:
        there = device(rt, 1)
        rt.register("wait", lambda: gate.wait(60))
        rt.run("wait")
        for _ in range(8):
            rt.run("add", there, 1, writes=(there,))
        assert marks(rt, "queue_full")
        assert seen(rt, there) == [8]


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_the_clock_stands_still_while_the_device_is_played(host_clock: SteadyClock) -> None:
    clock = VirtualClock()
    before = clock.now()
    host_clock.advance(50_000)
    assert clock.freeze()
    frozen_at = before + 50_000 + READ_NS
    assert not clock.freeze()
    host_clock.advance(20_000_000)
    assert clock.now() == clock.now() == frozen_at
    clock.thaw()
    assert clock.now() == frozen_at + READ_NS
    host_clock.advance(70_000)
    assert clock.now() == frozen_at + 70_000 + 2 * READ_NS
    assert clock.wait_until(before + 10**9) == 10**9 - 120_000 - 4 * READ_NS
    assert clock.now() == before + 10**9 + READ_NS
    assert clock.wait_until(before) == 0


def test_the_clock_never_goes_back(cpu: CpuRuntime) -> None:
    there, last = device(cpu, 1000), 0
    for i in range(200):
        cpu.run("fill", there, i, writes=(there,))
        if i % 7 == 0:
            there[0].item()
        if i % 11 == 0:
            cpu.synchronize()
        assert cpu.clock.now() >= last
        last = cpu.clock.now()


@pytest.mark.usefixtures("host_clock")
def test_modelled_ends() -> None:
    """A stream's records follow each other; a copy waits for what it copies; a wait costs what is left to do."""
    costs = CostModel(launch_ns=10**9, device_bytes_per_ns=1.0, bus_bytes_per_ns=1.0)
    with machine("deferred", costs=costs) as rt:
        assert isinstance(rt, CpuRuntime)
        there, back, ready, copied = device(rt, 4), pinned(rt, [0] * 4), rt.event("ready"), rt.event("copied")
        start = rt.clock.now()
        for value in range(3):
            rt.run("fill", there, value, writes=(there,))
        ready.record()
        rt.copy.wait_event(ready)
        with rt.use(rt.copy):
            rt.d2h(back, there)
            copied.record()
        rt.run("fill", there, 9, writes=(there,))
        copied.synchronize()
        waited = marks(rt, "synchronize")[-1].wait_ns
        assert 4e9 - 20 * READ_NS < waited < 4e9 + 100 * READ_NS
        assert 4e9 <= rt.clock.now() - start < 4e9 + 20 * READ_NS
        rt.main.synchronize()
        assert marks(rt, "synchronize")[-1].wait_ns == 0  # the fourth fill ended beside the copy
        assert list(rt.main.ends_ns) == sorted(rt.main.ends_ns)


@pytest.mark.usefixtures("host_clock")
def test_a_dependency_costs_its_own_prefix_only() -> None:
    """The other stream has been run further, but the wait is for its first record."""
    costs = CostModel(launch_ns=10**9)
    with machine("deferred", costs=costs) as rt:
        there, first, end = device(rt, 1), rt.event("first"), rt.event("end")
        rt.run("fill", there, 0, writes=(there,))
        first.record()
        rt.copy.wait_event(first)
        for value in range(9):
            rt.run("fill", there, value, writes=(there,))
        end.record(rt.copy)
        assert isinstance(rt, CpuRuntime)
        assert isinstance(rt.main, DeferredStream)
        rt.main.advance(10)
        before = rt.clock.now()
        end.synchronize()
        assert 0 <= 10**9 - (rt.clock.now() - before) < 50 * READ_NS  # less what the host did meanwhile


def test_costs_have_a_floor_and_a_bandwidth() -> None:
    costs = CostModel()
    assert costs.kernel_ns(8) == 2_000
    assert costs.kernel_ns(42_000_000) == 10_000
    assert costs.copy_ns(500_000) == 12_000


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_mutant_a_wait_that_drains_everything(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = DeferredStream.advance
    monkeypatch.setattr(DeferredStream, "advance", lambda self, position: advance(self, self.queued))
    with pytest.raises(AssertionError):
        test_a_wait_runs_exactly_its_prefix(cpu)
    with pytest.raises(AssertionError):
        test_random_programs_run_exactly_the_dependencies()


def test_mutant_a_wait_that_stops_one_short(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = DeferredStream.advance
    monkeypatch.setattr(DeferredStream, "advance", lambda self, position: advance(self, position - 1))
    with pytest.raises(AssertionError):
        test_a_wait_runs_exactly_its_prefix(cpu)


def test_mutant_streams_that_ignore_each_other(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredStream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError):
        test_a_wait_runs_exactly_what_it_depends_on_across_streams(cpu)


def test_mutant_a_query_that_waits(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    query = SoftwareEvent.query
    monkeypatch.setattr(SoftwareEvent, "query", lambda self: (self.synchronize(), query(self))[1])
    with pytest.raises(AssertionError):
        test_a_query_runs_nothing(cpu)


def test_the_observer_is_not_asked_where_it_is_off() -> None:
    silent = EventLog(enabled=False)
    with machine("deferred", observer=silent) as rt:
        there, event = device(rt, 1), rt.event("e")
        rt.h2d(there, pinned(rt, [1]))
        rt.run("fill", there, 1, writes=(there,))
        event.record()
        rt.copy.wait_event(event)
        there.item()
        rt.synchronize()
        assert silent.marks == []
