"""What a wait makes sure of, by the order of marks."""

from __future__ import annotations

from mrv2lab.trace.happens_before import HappensBefore
from tests.trace.hand_made import US, Marks


def test_a_wait_makes_sure_of_what_came_before_the_record() -> None:
    marks = Marks().mark(10, "h2d", "a").mark(20, "record", "e").mark(30, "h2d", "b").mark(40, "synchronize", "e")
    order = HappensBefore(marks.build())
    assert order.done("main", 10 * US, 40 * US)
    assert not order.done("main", 10 * US, 39 * US), "before the wait"
    assert not order.done("main", 30 * US, 50 * US), "launched behind the record"
    assert not order.done("copy", 10 * US, 50 * US), "another stream"


def test_streams_that_wait_for_each_other() -> None:
    marks = Marks().mark(10, "h2d", "a").mark(20, "record", "ready").mark(25, "wait_event", "ready", on="copy")
    marks.mark(30, "h2d", "b").mark(40, "record", "copied", on="copy").mark(50, "synchronize", "copied", on="copy")
    order = HappensBefore(marks.build())
    assert order.done("copy", 40 * US, 50 * US)
    assert order.done("main", 20 * US, 50 * US)
    assert not order.done("main", 30 * US, 50 * US)


def test_a_wait_of_a_stream_that_was_told_too_late() -> None:
    marks = Marks().mark(20, "record", "ready").mark(22, "record", "copied", on="copy")
    marks.mark(25, "wait_event", "ready", on="copy").mark(50, "synchronize", "copied", on="copy")
    assert not HappensBefore(marks.build()).done("main", 20 * US, 50 * US)


def test_draining_a_stream() -> None:
    for mark in ("implicit_sync", "synchronize"):
        order = HappensBefore(Marks().mark(40, mark, "main", waited=10).build())
        assert order.done("main", 30 * US, 40 * US) and not order.done("main", 31 * US, 60 * US)


def test_a_full_queue_makes_sure_of_nothing() -> None:
    assert not HappensBefore(Marks().mark(40, "queue_full", "main", waited=10).build()).done("main", 30 * US, 40 * US)


def test_what_is_known_stays_known() -> None:
    marks = Marks().mark(30, "record", "late").mark(40, "synchronize", "late").mark(50, "record", "x", on="copy")
    marks.mark(5, "record", "early").mark(60, "synchronize", "early")
    assert HappensBefore(marks.build()).done("main", 30 * US, 70 * US)
