"""What every machine must do alike: copies, streams, events and graphs. The CUDA twin runs where a GPU is."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from mrv2lab.runtime.base import PlaceError, Runtime
from tests.runtime.machines import device, fill, marks, pinned, seen


def test_h2d_and_d2h_go_round(rt: Runtime) -> None:
    there, back = device(rt, 4), pinned(rt, [0] * 4, "back")
    rt.h2d(there, pinned(rt, [1, 2, 3, 4]))
    rt.run("add", there, 10, writes=(there,))
    rt.d2h(back, there)
    rt.synchronize()
    assert back.tolist() == [11, 12, 13, 14]


def test_copies_keep_the_order_of_elements_of_matrices(rt: Runtime) -> None:
    source = rt.empty((2, 3), torch.int64, name="source", place="pinned")
    source.numpy()[:] = [[1, 2, 3], [4, 5, 6]]
    flat = device(rt, 6, dtype=torch.int64)
    rt.h2d(flat, source)
    assert seen(rt, flat) == [1, 2, 3, 4, 5, 6]


def test_copies_into_views(rt: Runtime) -> None:
    there = device(rt, 6)
    rt.h2d(there[2:4], pinned(rt, [7, 8, 9])[1:])
    assert seen(rt, there) == [0, 0, 8, 9, 0, 0]


def test_copies_refuse_what_does_not_fit(rt: Runtime) -> None:
    there, host = device(rt, 4), pinned(rt, [0] * 4)
    with pytest.raises(ValueError, match=r"4 torch\.int32 into 3 torch\.int32, at .*test_machines"):
        rt.h2d(there[:3], host)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        rt.h2d(device(rt, 4, dtype=torch.int64), host)
    with pytest.raises(ValueError, match="contiguous"):
        rt.h2d(there[::2], host[:2])
    with pytest.raises(ValueError, match="contiguous"):
        rt.d2h(host[::2], there[:2])
    for bad in (lambda: rt.h2d(there, there), lambda: rt.h2d(host, host), lambda: rt.d2h(there, there)):
        with pytest.raises(PlaceError, match="one device and one host tensor"):
            bad()
    assert not marks(rt, "h2d", "d2h")


def test_empty_copies(rt: Runtime) -> None:
    there = device(rt, 4)
    for _ in range(3):
        rt.h2d(there[:0], pinned(rt, []))
    rt.synchronize()
    assert not marks(rt, "implicit_sync")


def test_a_pageable_copy_synchronises_and_says_so(rt: Runtime) -> None:
    there = device(rt, 3)
    host = torch.tensor([1, 2, 3], dtype=torch.int32)
    with rt.watch_syncs() as lines:
        rt.h2d(there, host)
    host.fill_(9)
    assert seen(rt, there) == [1, 2, 3]
    (line,) = lines
    assert line.startswith("pageable h2d on 'device' at ")
    assert "test_machines.py:" in line
    assert len(marks(rt, "implicit_sync")) == 1


def test_scalars_are_captured_when_queued(rt: Runtime) -> None:
    there = device(rt, 2)
    for value in (1, 2, 3):
        rt.run("add", there, value, writes=(there,))
    assert seen(rt, there) == [6, 6]


def test_an_event_orders_two_streams(rt: Runtime) -> None:
    there, back = device(rt, 1000), pinned(rt, [0] * 1000, "back")
    side, event, copied = rt.stream("side"), rt.event("ready"), rt.event("copied")
    for value in range(50):
        rt.run("fill", there, value, writes=(there,))
    event.record()
    side.wait_event(event)
    with rt.use(side):
        rt.d2h(back, there)
        copied.record()
    copied.synchronize()
    assert back.tolist() == [49] * 1000
    assert copied.query()
    assert [(m.kind, m.name, m.stream) for m in marks(rt, "record", "wait_event", "synchronize")] == [
        ("record", "ready", "main"),
        ("wait_event", "ready", "side"),
        ("record", "copied", "side"),
        ("synchronize", "copied", "side"),
    ]


def test_use_gives_the_stream_back_after_an_error(rt: Runtime) -> None:
    with pytest.raises(KeyError), rt.use(rt.copy):
        raise KeyError
    rt.run("fill", there := device(rt, 1), 5, writes=(there,))
    assert marks(rt, "run")[-1].stream == "main"


def test_an_event_that_was_never_recorded_is_done(rt: Runtime) -> None:
    event = rt.event("never")
    assert event.query()
    event.synchronize()
    rt.main.wait_event(event)
    rt.synchronize()
    assert not [mark for mark in marks(rt, "synchronize") if mark.name == "never"]


def test_marks_name_buffers_and_bytes(rt: Runtime) -> None:
    there = device(rt, 4, "tokens")
    rt.h2d(there, pinned(rt, [1, 2, 3, 4], "tokens.pinned"))
    rt.run("copy", there[:2], there[2:], reads=(there,), writes=(there,))
    h2d, run = marks(rt, "h2d", "run")
    assert (h2d.name, h2d.nbytes, h2d.reads, h2d.writes) == ("tokens.pinned", 16, ("tokens.pinned",), ("tokens",))
    assert (run.name, run.nbytes, run.reads, run.writes) == ("copy", 16, ("tokens",), ("tokens",))


def test_a_name_is_bound_once_and_must_be_bound(rt: Runtime) -> None:
    with pytest.raises(ValueError, match="'fill' is registered already"):
        rt.register("fill", fill)
    with pytest.raises(KeyError, match="no segment is registered as 'fil'"):
        rt.run("fil")


def test_publish_is_a_host_write_with_a_mark(rt: Runtime) -> None:
    import numpy as np

    slot = pinned(rt, [0] * 4, "slot")
    rt.publish(slot, np.array([5, 6], np.int64))
    assert slot.tolist() == [5, 6, 0, 0]
    (mark,) = marks(rt, "publish")
    assert (mark.name, mark.nbytes, mark.writes) == ("slot", 8, ("slot",))
    with pytest.raises((PlaceError, TypeError)):
        rt.publish(device(rt, 2), np.array([5, 6], np.int32))
    with pytest.raises(ValueError, match="broadcast"):
        rt.publish(slot, np.zeros(5, np.int32))


# -- graphs ------------------------------------------------------------------------------------------------------------


def _steps(rt: Runtime, there: torch.Tensor, value: int) -> None:
    rt.run("fill", there, value, writes=(there,))
    rt.run("add", there, 1, writes=(there,))
    rt.run("copy", there[:1], there[1:], reads=(there,), writes=(there,))


def test_a_replay_equals_eager(rt: Runtime) -> None:
    there, eager = device(rt, 2), device(rt, 2)
    _steps(rt, eager, 7)
    graph = rt.graph("g")
    rt.synchronize()
    with graph.capture():
        _steps(rt, there, 7)
    assert seen(rt, there) == [0, 0]  # captured, not run
    graph.replay()
    assert seen(rt, there) == seen(rt, eager) == [8, 8]
    assert [(mark.name, mark.stream) for mark in marks(rt, "replay")] == [("g", "main")]


def test_graphs_freeze_scalars_and_read_buffers_anew(rt: Runtime) -> None:
    source, there = device(rt, 1), device(rt, 1)
    graph, scale = rt.graph("g"), 3
    rt.synchronize()
    with graph.capture():
        rt.run("copy", there, source, reads=(source,), writes=(there,))
        rt.run("add", there, scale, writes=(there,))
    scale = 1000
    for value in (10, 20):
        rt.run("fill", source, value, writes=(source,))
        graph.replay()
        assert seen(rt, there) == [value + 3]


def test_a_graph_can_be_captured_again_and_keeps_its_earlier_replays(rt: Runtime) -> None:
    there, graph = device(rt, 1), rt.graph("g")
    rt.synchronize()
    with graph.capture():
        rt.run("add", there, 1, writes=(there,))
    graph.replay()
    rt.synchronize()
    with graph.capture():
        rt.run("add", there, 100, writes=(there,))
    graph.replay()
    assert seen(rt, there) == [101]


def test_an_empty_graph_cannot_be_replayed(rt: Runtime) -> None:
    with pytest.raises(RuntimeError, match="'g' is empty"):
        rt.graph("g").replay()


def test_captures_do_not_nest(rt: Runtime) -> None:
    there, outer, inner = device(rt, 1), rt.graph("outer"), rt.graph("inner")
    rt.synchronize()
    with inner.capture():
        rt.run("add", there, 1, writes=(there,))
    with outer.capture():
        rt.run("add", there, 10, writes=(there,))
        with pytest.raises(RuntimeError, match="outer"), inner.capture():
            pass
    for graph in (outer, inner) if rt.device.type == "cpu" else (outer,):
        graph.replay()
    assert seen(rt, there) == [11 if rt.device.type == "cpu" else 10]


def test_an_error_inside_a_capture_leaves_the_runtime_usable(rt: Runtime) -> None:
    there, graph = device(rt, 1), rt.graph("g")
    rt.synchronize()

    def broken() -> None:
        with graph.capture():
            rt.run("add", there, 1, writes=(there,))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with pytest.raises(RuntimeError, match="empty"):
        graph.replay()
    rt.run("add", there, 5, writes=(there,))
    with graph.capture():
        rt.run("add", there, 10, writes=(there,))
    graph.replay()
    assert seen(rt, there) == [15]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_reset_leaves_a_usable_runtime(rt: Runtime) -> None:
    there = device(rt, 2)
    rt.run("fill", there, 1, writes=(there,))
    rt.reset()
    rt.run("fill", there, 2, writes=(there,))
    assert seen(rt, there) == [2, 2]


def test_ten_thousand_temporaries_leave_nothing(rt: Runtime) -> None:
    def temporaries(count: int) -> None:
        for _ in range(count):
            rt.empty(8, torch.int32, name="x.tmp", place="pinned")
            rt.empty(8, torch.int32, name="x.device")

    temporaries(10)
    gc.collect()
    before = len(rt.registry)
    temporaries(5_000)
    gc.collect()
    assert len(rt.registry) == before


def test_no_thread_is_left(rt: Runtime) -> None:
    rt.stream("third")
    rt.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mrv2lab-")]
