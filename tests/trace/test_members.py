"""What is found in a merged trace is what is found in each of its members."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mrv2lab.trace import syncs as syncs_module
from mrv2lab.trace.align import Alignment
from mrv2lab.trace.busy import gaps
from mrv2lab.trace.critical_path import critical_path
from mrv2lab.trace.hazards import hazards
from mrv2lab.trace.links import links
from mrv2lab.trace.members import member_of_lane, members
from mrv2lab.trace.merge import merge
from mrv2lab.trace.read import load
from mrv2lab.trace.syncs import blocked, syncs
from mrv2lab.trace.trace import Trace
from mrv2lab.trace.write import write_perfetto
from tests.trace.hand_made import MAIN, US, HandMade, Marks


def waiting(busy_us: float) -> HandMade:
    """A kernel of so many us, an event behind it, and a wait for the event from 40 to 50 us; the record says for which
    one, by an id that every trace here uses."""
    trace = HandMade()
    trace.call(1, 1, "cudaLaunchKernel", 5).kernel(10, busy_us, "k", 5)
    trace.add(3, 1, "cudaEventRecord", "runtime", MAIN, 6, correlation=6)
    trace.call(40, 10, "cudaEventSynchronize", 7)
    trace.record(40, 10, "Event Sync", 7, 7, wait_on_stream=7, wait_on_cuda_event_record_corr_id=6, correlation=7)
    return trace


def merged(*traces: Trace, offset: int = 0) -> Trace:
    return merge(traces, Alignment((0, *[offset] * (len(traces) - 1)), "start", 0, "by hand"))


@pytest.fixture
def pair() -> Trace:
    """The first one's kernel ends at 15 us, the second one's at 48 us."""
    return merged(waiting(5).overhead(41, 2).build(), waiting(38).build())


def test_every_lane_is_of_one_member_and_every_event_of_one(pair):
    assert sorted(set(member_of_lane(pair).tolist())) == [0, 1]
    parts = members(pair)
    assert [part.info.title for _, part in parts] == ["0: hand-made", "1: hand-made"]
    assert np.array_equal(np.sort(np.concatenate([events for events, _ in parts])), np.arange(len(pair)))
    assert {lane.process for lane in parts[1][1].lanes} >= {"10", "GPU 0"}
    assert members(waiting(5).build()) == []


def test_a_wait_waits_for_the_work_of_its_own_member(pair):
    table = syncs(pair)
    assert table["gpu_wait_ns"].tolist() == [0, 8 * US]
    assert table["overhead_ns"].tolist() == [2 * US, 0]
    assert [pair.name_of(event) for event in table["event"]] == ["cudaEventSynchronize"] * 2
    assert blocked(pair).total_ns == 10 * US


def test_taking_a_merged_trace_for_one_is_noticed(monkeypatch, pair):
    monkeypatch.setattr(syncs_module, "members", lambda trace: [])
    assert syncs(pair)["gpu_wait_ns"].tolist() != [0, 8 * US]


def test_a_merge_of_a_merge(pair):
    assert syncs(merged(pair, waiting(33).build()))["gpu_wait_ns"].tolist() == [0, 8 * US, 3 * US]


def test_written_and_read_again(tmp_path, pair):
    write_perfetto(pair, tmp_path / "both.json")
    again = load(tmp_path / "both.json", cache=False)
    assert again.correlation.tolist() == pair.correlation.tolist()
    assert np.array_equal(links(again).launch, links(pair).launch)
    assert syncs(again)["gpu_wait_ns"].tolist() == [0, 8 * US]


def test_a_stream_is_held_up_by_a_wait_of_its_own_member():
    def held(waits: bool) -> Trace:
        trace = HandMade().call(0, 1, "cudaLaunchKernel", 1).kernel(1, 4, "k", 1)
        if waits:
            trace.call(1, 1, "cudaStreamWaitEvent", 2).record(1, 1, "Stream Wait Event", 2, 7, device=0)
        return trace.call(2, 1, "cudaLaunchKernel", 3).kernel(30, 4, "k", 3).build()

    found = gaps(merged(held(True), held(False)))
    assert found.sort_values("process")["cause"].tolist() == ["device-side wait", "device late"]


def test_overhead_in_a_gap_is_of_the_same_member():
    one = waiting(5).call(20, 1, "cudaLaunchKernel", 8).kernel(25, 1, "k", 8).overhead(16, 3).build()
    other = waiting(5).call(20, 1, "cudaLaunchKernel", 8).kernel(25, 1, "k", 8).build()
    assert gaps(merged(one, other)).sort_values("process")["overhead_ns"].tolist() == [3 * US, 0]


def test_the_path_goes_through_one_member():
    def stepping(busy_us: float) -> Trace:
        return waiting(busy_us).step(0, 60, 1).build()

    a, b = stepping(5), stepping(38)
    both = merged(a, b)
    for row, one in enumerate((a, b)):
        path, alone = critical_path(both, row), critical_path(one, 0)
        columns = ["resource", "name", "start_ns", "end_ns"]
        assert path[columns].values.tolist() == alone[columns].values.tolist()


def test_hazards_are_of_one_member():
    def copying(written_at: float) -> Trace:
        marks = Marks(clock="host")
        marks.mark(10, "h2d", "tokens", device=(12, 20), reads=["tokens"], step=1)
        return marks.mark(written_at, "publish", "tokens", writes=["tokens"], step=2).build()

    both = merged(copying(15), copying(25))
    found = hazards(both)
    assert found[["buffer", "overlap_ns"]].values.tolist() == [["tokens", 5 * US]]
    assert both.name_of(int(found["read_event"][0])) == "tokens"
    assert "0: hand-made" in str(both.lane_of(int(found["read_event"][0])))


def test_a_member_of_another_title_with_the_same_beginning():
    one = waiting(5).build()
    a, b = (replace(one, info=replace(one.info, title=title)) for title in ("run", "run: again"))
    numbers = member_of_lane(both := merged(a, b))
    assert {number for number, lane in zip(numbers, both.lanes, strict=True) if "again" in lane.process} == {1}
