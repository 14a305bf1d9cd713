"""What a wait waits for follows from the order of launches."""

from __future__ import annotations

import numpy as np

from mrv2lab.trace.awaited import Awaited
from mrv2lab.trace.trace import Trace
from tests.trace.hand_made import US, HandMade


def named(trace: Trace, event: int) -> str | None:
    return trace.name_of(event) if event >= 0 else None


def queues() -> Trace:
    made = HandMade().call(10, 1, "launch", 1).call(20, 1, "launch", 2).call(30, 1, "launch", 3)
    made.kernel(12, 100, "long", 1, on=7).kernel(22, 5, "short", 2, on=8).kernel(112, 10, "late", 3, on=7)
    return made.kernel(40, 10, "orphan", on=9).kernel(5, 2, "elsewhere", on=7, device=1).build()


def test_the_last_of_what_was_launched_before() -> None:
    trace = queues()
    awaited = Awaited(trace)
    late = 1000 * US
    assert named(trace, awaited.last(10 * US, 10 * US, device=0)) is None
    assert named(trace, awaited.last(11 * US, late, stream=7)) == "long"
    assert named(trace, awaited.last(30 * US, 30 * US, device=0)) == "long", "ends last, though launched first"
    assert named(trace, awaited.last(31 * US, 30 * US, device=0)) == "late"
    assert named(trace, awaited.last(31 * US, late, stream=8)) == "short"
    assert awaited.until(31 * US, late, stream=8) == 27 * US
    assert awaited.until(10 * US, 0, stream=8) == -1
    assert awaited.devices == (0, 1)
    assert len(awaited) == 5


def test_work_without_a_launch_counts_if_it_had_ended_by_then() -> None:
    trace = queues()
    awaited = Awaited(trace)
    assert named(trace, awaited.last(0, 49 * US, stream=9)) is None
    assert named(trace, awaited.last(0, 50 * US, stream=9)) == "orphan"
    assert named(trace, awaited.last(0, 1000 * US, device=1)) == "elsewhere"
    assert named(trace, awaited.last(0, 1000 * US)) == "orphan"


def test_a_lane() -> None:
    trace = queues()
    lane = next(number for number, one in enumerate(trace.lanes) if one.stream == 8)
    assert named(trace, Awaited(trace).last(1000 * US, 0, lane=lane)) == "short"


def test_nothing_on_a_device() -> None:
    awaited = Awaited(HandMade().build())
    assert (len(awaited), awaited.devices, awaited.last(5, 5), awaited.until(5, 5)) == (0, (), -1, -1)


def test_against_brute_force() -> None:
    rng = np.random.default_rng(3)
    made = HandMade()
    for link in range(60):
        launched = int(rng.integers(1, 500))
        if rng.random() < 0.8:
            made.call(launched, 1, "launch", link)
        at = launched + int(rng.integers(0, 50))
        made.kernel(at, int(rng.integers(1, 60)), f"k{link}", link, on=int(rng.integers(3)))
    trace = made.build()
    awaited = Awaited(trace)
    calls = {int(trace.correlation[e]): int(trace.start[e]) for e in range(len(trace)) if trace.kind_of(e) == "runtime"}
    work = [e for e in range(len(trace)) if trace.kind_of(e) == "kernel"]
    for before in range(0, 600 * US, 7 * US):
        back = before + 20 * US
        for stream in (0, 1, 2):
            ends = [
                int(trace.end[e])
                for e in work
                if trace.lane_of(e).stream == stream
                and (
                    calls[int(trace.correlation[e])] < before
                    if int(trace.correlation[e]) in calls
                    else int(trace.end[e]) <= back
                )
            ]
            assert awaited.until(before, back, stream=stream) == max(ends, default=-1)
