"""Writes to host buffers that queued work had yet to read: by times on a device, by order on software streams."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.recorder.recorder import Recorder
from mrv2lab.trace import hazards as module
from mrv2lab.trace.from_recording import from_recording
from mrv2lab.trace.hazards import FOREIGN, hazards
from mrv2lab.trace.trace import Trace
from tests.recorder.runs import busy_engine, work
from tests.trace.hand_made import US, HandMade, Marks


def two_steps(done: float, buffer: str = "ids.pinned", **info: Any) -> Trace:
    """Step 1 copies ``buffer``, and the device is done at ``done``; step 2 writes it again at 50."""
    marks = Marks(**info).mark(8, "publish", buffer, on="", writes=[buffer], step=1, site="a.py:1", nbytes=64)
    marks.mark(10, "h2d", buffer, device=(done - 5, done), reads=[buffer], step=1, site="a.py:2", nbytes=64)
    marks.mark(50, "publish", buffer, on="", writes=[buffer], step=2, site="a.py:3", nbytes=64)
    marks.mark(55, "h2d", buffer, device=(90, 95), reads=[buffer], step=2, nbytes=64)
    return marks.build()


def test_a_write_before_the_copy_was_done() -> None:
    table = hazards(two_steps(80))
    row = table.drop(columns=["read_event", "write_event"]).iloc[0].to_dict()
    assert row == {
        "buffer": "ids.pinned",
        "kind": "copy",
        "reader": "h2d ids.pinned",
        "writer": "publish ids.pinned",
        "read_step": 1,
        "write_step": 2,
        "read_site": "a.py:2",
        "write_site": "a.py:3",
        "queued_ns": 10 * US,
        "read_end_ns": 80 * US,
        "write_ns": 50 * US,
        "overlap_ns": 30 * US,
        "evidence": "device times",
        "write_recorded": True,
    }
    assert len(table) == 1 and table.attrs["cannot_say"] == []


@pytest.mark.parametrize(("done", "found"), [(50, 0), (51, 1)])
def test_the_moment_counts(done: float, found: int) -> None:
    assert len(hazards(two_steps(done))) == found


def test_a_temporary_is_memory_of_its_own() -> None:
    assert len(hazards(two_steps(80, "ids.tmp"))) == 0


def test_a_kernel_that_reads_in_place() -> None:
    marks = Marks().mark(5, "publish", "t.uva0", on="", writes=["t.uva0"], step=0, nbytes=64)
    marks.mark(10, "kernel", "gather", device=(20, 80), reads=["x", "t.uva0"], step=1)
    table = hazards(marks.mark(50, "publish", "t.uva0", on="", writes=["t.uva0"], step=2, nbytes=32).build())
    assert table[["buffer", "kind", "reader"]].to_numpy().tolist() == [["t.uva0", "in place", "kernel gather"]]


def test_a_slot_that_may_have_grown_is_left_out_and_said() -> None:
    marks = Marks().mark(5, "publish", "t.uva0", on="", writes=["t.uva0"], step=0, nbytes=64)
    marks.mark(10, "kernel", "gather", device=(20, 80), reads=["t.uva0"], step=1)
    table = hazards(marks.mark(50, "publish", "t.uva0", on="", writes=["t.uva0"], step=2, nbytes=128).build())
    assert len(table) == 0 and "may have gone to new memory" in table.attrs["cannot_say"][0]


def filled_through_numpy(second_step: int) -> Trace:
    marks = Marks().mark(10, "h2d", "t.host", device=(20, 80), reads=["t.host"], step=1)
    return marks.mark(50, "h2d", "t.host", device=(80, 85), reads=["t.host"], step=second_step).build()


def test_a_buffer_that_is_written_without_a_mark() -> None:
    table = hazards(filled_through_numpy(2))
    assert table[["writer", "write_recorded"]].to_numpy().tolist() == [["h2d t.host", False]]
    assert "written by the host without a mark (t.host)" in table.attrs["cannot_say"][0]
    assert len(hazards(filled_through_numpy(1))) == 0, "a step may copy a buffer in pieces"


def test_reads_without_device_times() -> None:
    marks = Marks().mark(5, "publish", "a", on="", writes=["a"]).mark(10, "h2d", "a", reads=["a"])
    table = hazards(marks.mark(50, "publish", "a", on="", writes=["a"]).build())
    assert len(table) == 0 and "1 reads of host buffers have no device time" in table.attrs["cannot_say"][0]


def test_on_modelled_streams_the_order_decides() -> None:
    """The model says that the copy was over at 20; but nobody had waited for it, and a deferred stream is late."""
    table = hazards(two_steps(20, modelled=True))
    assert table[["evidence", "overlap_ns"]].to_numpy().tolist() == [["no wait between", -1]]
    marks = Marks(modelled=True).mark(5, "publish", "a", on="", writes=["a"]).mark(10, "h2d", "a", reads=["a"], step=1)
    marks.mark(12, "record", "e").mark(40, "synchronize", "e", waited=5)
    assert len(hazards(marks.mark(50, "publish", "a", on="", writes=["a"], step=2).build())) == 0


def test_a_foreign_trace() -> None:
    for trace in (HandMade().call(1, 1, "cudaMemcpyAsync", 1).build(), HandMade().build()):
        table = hazards(trace)
        assert len(table) == 0 and table.attrs["cannot_say"] == [FOREIGN]
    assert {"buffer", "overlap_ns", "evidence"} <= set(table.columns)


@pytest.mark.parametrize("policy", ["unsafe", "barrier", "pinned_copy", "uva_pool"])
def test_only_the_unsafe_policy_has_hazards(policy: str) -> None:
    with busy_engine(transfer=policy) as engine, Recorder(engine) as rec:
        work(engine, 20)
    table = hazards(from_recording(rec.recording))
    assert (len(table) > 0) is (policy == "unsafe")
    if policy == "unsafe":
        recorded = table[table["write_recorded"]]
        assert {"idx_mapping.pinned", "query_start_loc.pinned"} <= set(recorded["buffer"])
        assert (table["write_step"] > table["read_step"]).all()
        assert all(site.startswith("mrv2lab/") for site in recorded["write_site"])


@pytest.mark.parametrize(
    ("name", "bug", "policy"),
    [("TEMPORARY", "\0", "pinned_copy"), ("HappensBefore", lambda trace: _Never(), "barrier")],
    ids=["names of temporaries ignored", "waits ignored"],
)
def test_mutants_die(monkeypatch: pytest.MonkeyPatch, name: str, bug: Any, policy: str) -> None:
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        test_only_the_unsafe_policy_has_hazards(policy)


class _Never:
    def done(self, *_: Any) -> bool:
        return False
