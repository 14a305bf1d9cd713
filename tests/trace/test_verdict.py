"""Each label on a trace that deserves it, and no label where the file does not carry one."""

from __future__ import annotations

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
    assert str(found) == "Device-bound: the device worked 98.0% of 4.0 ms; the host kept it fed, which is healthy."
    assert found.evidence["max_queue_depth"] == 6 and found.evidence["median_ahead_ns"] == 502_000


def test_pauses_between_queued_work_are_the_devices() -> None:
    found = verdict(steady(60, 100, ahead=500))
    assert found.label == "device-bound" and "(with pauses between queued work 100.0%)" in found.sentence


def test_copies_alone_are_not_called_healthy() -> None:
    found = verdict(steady(98, 100, ahead=500, copies=True))
    assert found.label == "device-bound" and found.sentence.endswith(
        "100% of that with copies alone: the copies limit it."
    )


def test_a_host_that_works_between_launches() -> None:
    found = verdict(steady(20, 100, host="works"))
    assert found.label == "host-bound"
    assert found.sentence.startswith(
        "Host-bound: the device worked 20.4% of 3.9 ms; of 3.1 ms idle, 99% while the launch"
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


def test_every_label_is_known() -> None:
    assert {"host-bound", "device-bound", "waiting", "mixed", "cannot tell"} == set(LABELS)
