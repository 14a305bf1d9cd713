"""Each label on a trace that deserves it, and no label where the file does not carry one."""

from __future__ import annotations

import pytest

from mrv2lab.trace.trace import Trace
from mrv2lab.trace.verdict import LABELS, Verdict, verdict
from tests.trace.hand_made import HandMade, stream


def steady(
    work: float, period: float, ahead: float = 0, count: int = 40, host: str = "", copies: bool = False
) -> Trace:
    """``count`` kernels of ``work`` us every ``period`` us, launched 2 us + ``ahead`` before; ``host``: what the host
    does between launches."""
    made = HandMade()
    for number in range(count):
        at = 1000 + number * period
        made.call(at - 2 - ahead, 1, "cudaLaunchKernel", number)
        if host == "waits":
            made.call(at - 0.9, period - 1.1, "cudaStreamSynchronize")
        elif host == "works":
            made.op(at - 0.9, period - 1.1, "aten::mm")
        elif host == "half":
            made.op(at - 0.9, 0.6 * period, "aten::mm").call(
                at + 0.6 * period, 0.4 * period - 2.1, "cudaStreamSynchronize"
            )
        if copies:
            made.add(at, work, "Memcpy HtoD (Pinned -> Device)", "memcpy", stream(7), number)
        else:
            made.kernel(at, work, "k", number)
    return made.build()


def test_a_device_that_is_fed_is_healthy() -> None:
    found = verdict(steady(98, 100, ahead=500))
    assert found.label == "device-bound"
    assert str(found) == (
        "Device-bound: the device worked 98.0% of the 4.0 ms from its first work to its last; the host kept it fed, "
        "which is healthy. Outside of that lie 1.0 ms of the trace before it and 0.0 ms after it; 0.5 ms of them are "
        "between the launch of the first work and its start: whether the device was busy with what is not in the trace "
        "cannot be told."
    )
    assert found.evidence["max_queue_depth"] == 6 and found.evidence["median_ahead_ns"] == 502_000


def test_pauses_between_queued_work_are_the_devices() -> None:
    found = verdict(steady(60, 100, ahead=500))
    assert found.label == "device-bound" and "(with pauses between queued work 100.0%)" in found.sentence


def test_copies_alone_are_not_called_healthy() -> None:
    found = verdict(steady(98, 100, ahead=500, copies=True))
    assert found.label == "device-bound" and "100% of that with copies alone: the copies limit it." in found.sentence


def test_a_host_that_works_between_launches() -> None:
    found = verdict(steady(20, 100, host="works"))
    assert found.label == "host-bound"
    assert found.sentence.startswith(
        "Host-bound: the device worked 20.4% of the 3.9 ms from its first work to its last; of 3.1 ms idle, 99% while"
    )


def test_a_host_that_waits_between_launches() -> None:
    assert verdict(steady(20, 100, host="waits")).label == "waiting"


def test_a_bit_of_both() -> None:
    found = verdict(steady(20, 100, host="half"))
    assert found.label == "mixed" and 0.3 < found.evidence["waiting_share"] < 0.6


def test_a_host_that_was_not_recorded() -> None:
    found = verdict(steady(20, 100))
    assert found.label == "cannot tell" and "record host activities" in found.sentence


def test_too_little_and_nothing() -> None:
    few = verdict(steady(20, 100, host="works", count=19))
    assert few.label == "cannot tell" and "19 pieces of device work are too few" in few.sentence
    none = verdict(HandMade().op(1, 5, "aten::mm").build())
    assert none == Verdict("cannot tell", none.sentence) and "no GPU activity recorded" in none.sentence


def test_what_lies_outside_is_said_and_what_is_short_is_not() -> None:
    made = HandMade().op(0, 20_000, "aten::mm")
    for number in range(40):
        made.call(5_000 + 100 * number, 1, "cudaLaunchKernel", number).kernel(5_003 + 100 * number, 99, "k", number)
    found = verdict(made.build())
    outside = {name: found.evidence[name] for name in ("before_ns", "after_ns", "untold_ns")}
    assert outside == {"before_ns": 5_003_000, "after_ns": 20_000_000 - 9_002_000, "untold_ns": 0}
    assert found.sentence.endswith("Outside of that lie 5.0 ms of the trace before it and 11.0 ms after it.")
    made = HandMade().call(0, 1, "cudaLaunchKernel", 99).kernel(2, 98, "k", 99)
    for number in range(40):
        made.call(100 * number, 1, "cudaLaunchKernel", number).kernel(100 + 100 * number, 99, "k", number)
    assert "Outside" not in verdict(made.build()).sentence


@pytest.mark.parametrize(
    "reason", ["the array of events has no end: the file was cut off", "the file ends in the middle of an event"]
)
def test_a_file_that_was_cut_off_may_have_had_device_work(reason: str) -> None:
    made = HandMade().op(1, 5, "aten::mm")
    made.builder.problem(reason)
    assert verdict(made.build()).sentence == (
        "Cannot tell what limits this: the file was cut off, and no device work is in the part that is there."
    )
    assert verdict(HandMade().op(1, 5, "aten::mm").build()).sentence.count("cut off") == 0


def test_every_label_is_known() -> None:
    assert {"host-bound", "device-bound", "waiting", "mixed", "cannot tell"} == set(LABELS)
