"""A Trace as a frame."""

from __future__ import annotations

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import TraceInfo
from tests.trace.hand_made import HandMade, stream


def test_a_frame_has_the_same_types_with_and_without_events() -> None:
    trace = HandMade().kernel(1, 2).build()
    empty = TraceBuilder().build(TraceInfo("kineto", "empty"))
    for nothing in (empty, trace.between(-5, -4)):
        found = nothing.to_frame()
        assert not len(found)
        assert found.dtypes.to_dict() == trace.to_frame().dtypes.to_dict()


def test_a_frame_holds_whatever_a_device_is_called() -> None:
    trace = HandMade().add(1, 2, "k", "kernel", stream(7, 2**62)).build()
    assert trace.to_frame()["device"].tolist() == [-1, 2**62]


def test_the_names_that_some_events_have() -> None:
    trace = HandMade().kernel(1, 2, name="b").kernel(5, 6, name="a").kernel(8, 9, name="b").build()
    assert [trace.names[place] for place in trace.names_in(trace.mask("kernel"))] == ["b", "a"]
    assert [trace.names[place] for place in trace.names_in(trace.end > 12_000)] == ["b"]
    assert trace.names_in(trace.mask("runtime")) == []
