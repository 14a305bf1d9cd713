"""Waits of our own marks: kinds, causes and what the device still had to do, by hand."""

from __future__ import annotations

from mrv2lab.trace.syncs import blocked, syncs
from mrv2lab.trace.trace import Trace
from tests.trace.hand_made import US, Marks


def barrier() -> Trace:
    marks = Marks().mark(10, "h2d", "a", device=(20, 60), step=1, phase="prepare_inputs")
    marks.mark(12, "record", "prepare_inputs").mark(14, "kernel", "k", device=(60, 500), step=1)
    site = "mrv2lab/runtime/transfer.py:7"
    marks.mark(50, "synchronize", "prepare_inputs", waited=30, step=2, phase="barrier_wait", site=site)
    return marks.build()


def test_a_barrier_waits_for_the_copies_and_not_for_the_forward() -> None:
    row = syncs(barrier()).iloc[0]
    assert (row["kind"], row["call"], row["barrier"]) == ("event", "prepare_inputs", True)
    assert [row[name] // US for name in ("start_ns", "api_ns", "gpu_wait_ns")] == [20, 30, 30]
    assert (row["site"], row["caller"], row["step"]) == (
        "mrv2lab/runtime/transfer.py:7",
        "barrier_wait",
        "mrv2lab.step#2",
    )
    assert blocked(barrier()).total_ns == 30 * US


def test_the_latest_record_of_an_event_counts() -> None:
    marks = Marks().mark(10, "h2d", "a", device=(20, 30)).mark(12, "record", "e")
    marks.mark(14, "h2d", "b", device=(30, 45)).mark(16, "record", "e").mark(60, "synchronize", "e", waited=25)
    marks.mark(62, "h2d", "c", device=(62, 90)).mark(63, "record", "e")
    row = syncs(marks.build()).iloc[0]
    assert row["gpu_wait_ns"] == 10 * US, "from 35, when the wait began, until 45"


def test_kinds_of_marks() -> None:
    marks = Marks().mark(5, "kernel", "k", device=(5, 90)).mark(6, "record", "e")
    marks.mark(10, "wait_event", "e", on="copy").mark(20, "queue_full", "main", waited=4)
    marks.mark(30, "implicit_sync", "item", waited=5).mark(40, "implicit_sync", "pageable copy", waited=5)
    marks.mark(50, "synchronize", "main", waited=5).mark(60, "synchronize", "device", waited=5)
    table = syncs(marks.build())
    assert table["kind"].tolist() == ["device-side wait", "queue full", "item", "implicit copy", "stream", "device"]
    assert table["host_waits"].tolist() == [False, True, True, True, True, True]
    assert (table["gpu_wait_ns"] // US).tolist() == [-1, -1, 5, 5, 5, 5]


def test_a_real_device_does_not_say_how_long_an_implicit_wait_took() -> None:
    table = syncs(Marks().mark(5, "kernel", "k", device=(5, 9)).mark(30, "implicit_sync", "item").build())
    assert table["api_ns"].tolist() == [-1]
    assert any("CUDA does not say how long" in sentence for sentence in table.attrs["cannot_say"])
    marks = Marks(modelled=True).mark(5, "kernel", "k", device=(5, 9))
    modelled = syncs(marks.mark(30, "implicit_sync", "item", site="a.py:1").build())
    assert modelled["api_ns"].tolist() == [0] and modelled.attrs["cannot_say"] == []


def test_without_device_times() -> None:
    table = syncs(Marks().mark(5, "kernel", "k").mark(6, "record", "e").mark(30, "synchronize", "e", waited=5).build())
    assert table["gpu_wait_ns"].tolist() == [-1]
    assert any("device_times='launches'" in sentence for sentence in table.attrs["cannot_say"])


def test_an_event_that_was_recorded_before_the_recording_is_not_known() -> None:
    marks = Marks().mark(5, "kernel", "k", device=(5, 90)).mark(30, "synchronize", "e", waited=5)
    table = syncs(marks.mark(40, "record", "e").build())
    assert (table["kind"].tolist(), table["gpu_wait_ns"].tolist()) == (["event"], [-1])
