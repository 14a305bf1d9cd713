"""The observer: three verbs, a null object that costs nothing, a log that keeps order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.observer import MARKS, NULL_OBSERVER, PHASES, WAITS, EventLog, Mark, Observer
from tests.runtime.machines import device, machine, pinned


def test_phases_and_marks_are_words_of_their_own() -> None:
    assert len(set(PHASES)) == len(PHASES) == 16
    assert len(set(MARKS)) == len(MARKS)
    assert set(MARKS) >= WAITS
    assert all(name == name.lower() and name.isidentifier() for name in PHASES + MARKS)


def test_the_null_observer_shares_one_span_and_returns_nothing() -> None:
    assert NULL_OBSERVER.span("forward") is NULL_OBSERVER.span("sample")
    with NULL_OBSERVER.span("forward") as value:
        assert value is None
    assert NULL_OBSERVER.mark(Mark("kernel", "x")) is None
    assert NULL_OBSERVER.gauge("depth", 1) is None
    with pytest.raises(KeyError), NULL_OBSERVER.span("forward"):
        raise KeyError


class Counting(Observer):
    """Off, but counts who calls it all the same."""

    def __init__(self) -> None:
        self.calls = 0

    def mark(self, mark: Mark) -> None:
        self.calls += 1


def test_chokepoints_build_no_mark_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    make = Mark.__new__
    monkeypatch.setattr(Mark, "__new__", lambda *args, **kwargs: (built.append(1), make(*args, **kwargs))[1])
    for observer in (Counting(), EventLog()):
        built.clear()
        with machine("deferred", observer=observer) as rt:
            there, graph, event = device(rt, 2), rt.graph("g"), rt.event("e")
            slot = pinned(rt, [0, 0])
            rt.publish(slot, np.array([1, 2], np.int32))
            rt.h2d(there, slot)
            with graph.capture():
                rt.run("add", there, 1, writes=(there,))
            graph.replay()
            event.record()
            rt.copy.wait_event(event)
            with rt.use(rt.copy):
                rt.d2h(slot, there)
            event.synchronize()
            there.tolist()
            rt.h2d(there, torch.zeros(2, dtype=torch.int32))
        if isinstance(observer, Counting):
            assert (observer.calls, built) == (0, [])
        else:
            assert [mark.kind for mark in observer.marks] == (
                "publish h2d run replay record wait_event d2h synchronize implicit_sync h2d implicit_sync".split()
            )
            assert {mark.kind for mark in observer.marks} <= set(MARKS)
            assert [mark.kind for mark in observer.waits()] == ["synchronize", "implicit_sync", "implicit_sync"]


def test_call_sites_only_where_asked_for() -> None:
    for asked in (False, True):
        log = EventLog(call_sites=asked)
        with machine("deferred", observer=log) as rt:
            there = device(rt, 1)
            rt.run("add", there, 1, writes=(there,))
            rt.h2d(there, pinned(rt, [1]))
            rt.synchronize()
        sites = [mark.site for mark in log.marks]
        if asked:
            assert all(site is not None and "test_observer.py:" in site for site in sites)
            assert len(set(sites)) == 3
        else:
            assert sites == [None] * len(sites)


def test_a_log_keeps_order_and_times() -> None:
    log = EventLog()
    with log.span("forward"):
        with log.span("forward/attention"):
            log.mark(Mark("kernel", "a"))
        log.gauge("depth", 2)
        log.mark(Mark("kernel", "b"))
    with pytest.raises(KeyError), log.span("sample"):
        raise KeyError
    inner, outer, broken = log.spans
    assert [span.name for span in log.spans] == ["forward/attention", "forward", "sample"]
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns <= broken.start_ns <= broken.end_ns
    assert outer.duration_ns >= inner.duration_ns >= 0
    assert [mark.name for mark in log.marks] == ["a", "b"]
    assert log.gauges == [("depth", 2)]
    log.clear()
    assert (log.spans, log.marks, log.gauges) == ([], [], [])
