"""The first experiment: with two steps in flight the reused buffer is wrong, and every other policy is right."""

from __future__ import annotations

import pytest

from mrv2lab.observer import EventLog
from tests.runtime.machines import machine
from tests.runtime.toy import run_toy, toy_on_cpu

SAFE = ["barrier", "pinned_copy", "uva_pool"]
LAGS = [None, 1, 2]


@pytest.mark.parametrize("lag", LAGS)
def test_unsafe_is_wrong_in_every_step_but_the_last(lag: int | None) -> None:
    assert toy_on_cpu("unsafe", lag=lag) >= 28


@pytest.mark.parametrize("lag", [None, 0, 1, 2])
@pytest.mark.parametrize("policy", SAFE)
def test_safe_policies_are_right(policy: str, lag: int | None) -> None:
    assert toy_on_cpu(policy, lag=lag) == 0


def test_unsafe_is_right_at_lag_0() -> None:
    """At lag 0 each launch runs as it is queued: the copy is over before the host writes the buffer again. That is why
    CUDA_LAUNCH_BLOCKING=1 makes such bugs go away."""
    assert toy_on_cpu("unsafe", lag=0) == 0


@pytest.mark.parametrize("policy", SAFE)
@pytest.mark.parametrize("repeat", range(5))
def test_safe_policies_are_right_on_real_threads(policy: str, repeat: int) -> None:
    assert toy_on_cpu(policy, stream="threaded") == 0


def test_pool_needs_as_many_slots_as_steps_in_flight() -> None:
    assert toy_on_cpu("uva_pool", depth=1) >= 28
    assert toy_on_cpu("uva_pool", depth=2) == 0
    assert toy_on_cpu("uva_pool", depth=3) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", SAFE)
def test_safe_policies_are_right_on_a_gpu(policy: str) -> None:
    with machine("cuda") as rt:
        assert run_toy(rt, policy) == 0


def test_only_the_outputs_are_waited_for_without_a_barrier() -> None:
    for policy in ("unsafe", "pinned_copy", "uva_pool"):
        log = EventLog()
        toy_on_cpu(policy, log)
        assert [mark.name for mark in log.waits()] == ["copied"] * 30, policy


def test_the_barrier_waits_once_a_step() -> None:
    log = EventLog()
    toy_on_cpu("barrier", log)
    names = [mark.name for mark in log.waits()]
    assert names.count("copied") == 30
    assert names.count("prepare_inputs") == 29  # the first step finds nothing to wait for
    assert len(names) == 59
    assert [span.name for span in log.spans] == ["barrier_wait"] * 30


@pytest.mark.usefixtures("host_clock")
def test_an_item_is_caught_with_its_call_site() -> None:
    log = EventLog()
    toy_on_cpu("pinned_copy", log, item_at=7)
    (mark,) = [mark for mark in log.marks if mark.kind == "implicit_sync"]
    assert (mark.name, mark.reads, mark.stream) == ("item", ("total",), "main")
    assert mark.wait_ns > 0
    assert mark.site is not None
    assert "toy.py:" in mark.site


def test_an_item_hides_the_race_of_its_step() -> None:
    """The accidental sync that "fixes" a race, and comes back as a bug when somebody removes it."""
    assert toy_on_cpu("unsafe", item_at=7) == toy_on_cpu("unsafe") - 1


def test_twelve_launches_a_step() -> None:
    log = EventLog()
    toy_on_cpu("pinned_copy", log, steps=1)
    kinds = [mark.kind for mark in log.marks]
    assert kinds.count("run") == 11
    assert kinds.count("h2d") == 2
    assert kinds.count("d2h") == 1
