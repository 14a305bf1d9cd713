from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace import same_stream
from mrv2lab.trace.same_stream import CLOCK_NOISE_NS, same_stream_overlaps
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace


def overlaps() -> Trace:
    small = SmallTrace()
    small.launch((0, 1), (1_000, 9_000), "a")
    small.launch((1, 2), (8_500, 12_000), "b", api="cudaLaunchKernelExC")  # asked to begin early
    small.launch((2, 3), (11_889, 20_000), "c")  # 111 ns
    small.launch((3, 4), (16_000, 17_000), "d")  # within c
    small.launch((4, 5), (19_500, 19_500), "e")  # a moment within c, which d does not hide
    small.launch((5, 6), (20_000, 30_000), "f", api="cudaLaunchKernelExC")  # touches
    small.launch((6, 7), (25_000, 26_000), "g", stream=20)  # another stream may
    small.work(29_000, 40_000, "h", correlation=99)  # 1000 ns, and nobody knows how it was launched
    return small.build()


def check_labels() -> None:
    frame = same_stream_overlaps(overlaps())
    assert frame[["earlier", "later", "start_ns", "overlap_ns", "label"]].values.tolist() == [
        ["a", "b", 8_500, 500, "programmatic launch"],
        ["b", "c", 11_889, 111, "clock noise"],
        ["c", "d", 16_000, 1_000, "clock noise"],
        ["c", "e", 19_500, 0, "zero length"],
        ["f", "h", 29_000, 1_000, "clock noise"],
    ]
    assert frame.attrs["counts"] == {"zero length": 1, "programmatic launch": 1, "clock noise": 3, "unknown": 0}
    assert frame.attrs["cannot_say"] == [
        "1 overlaps are of work whose launch is not in the file: it may be a programmatic one"
    ]


def test_labels() -> None:
    check_labels()


def test_one_that_compares_with_the_work_just_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: d ended, so e would not overlap c."""
    monkeypatch.setattr(same_stream, "leaders", lambda end: range(len(end)))
    with pytest.raises(AssertionError):
        check_labels()


@pytest.mark.parametrize(
    "api", ["cudaLaunchKernelExC", "cudaLaunchKernelExC_v11060", "cuLaunchKernelEx", "hipLaunchKernelExC"]
)
def test_apis_that_can_ask_for_an_early_start(api: str) -> None:
    small = SmallTrace()
    small.launch((0, 1), (10, 5_000))
    small.launch((1, 2), (2_000, 9_000), api=api)
    assert same_stream_overlaps(small.build())["label"].tolist() == ["programmatic launch"]


@pytest.mark.parametrize("api", ["cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipExtModuleLaunchKernel"])
def test_others_are_noise_up_to_a_bound_and_unknown_beyond(api: str) -> None:
    for overlap, label in ((CLOCK_NOISE_NS, "clock noise"), (CLOCK_NOISE_NS + 1, "unknown")):
        small = SmallTrace()
        small.launch((0, 1), (10, 5_000))
        small.launch((1, 2), (5_000 - overlap, 9_000), api=api)
        assert same_stream_overlaps(small.build())["label"].tolist() == [label]


def test_an_orphan_is_nobodys_launch() -> None:
    """Position -1 would be the trace's last event, here a call that can ask for an early start."""
    small = SmallTrace()
    small.launch((0, 1), (10, 5_000))
    small.work(2_000, 9_000, correlation=99)
    small.call(9_500, 9_600, "cudaLaunchKernelExC")
    assert same_stream_overlaps(small.build())["label"].tolist() == ["unknown"]


def test_branches_of_a_graph_are_unknown_and_said() -> None:
    small = SmallTrace()
    graph = small.call(0, 2, "cudaGraphLaunch")
    small.work(10, 5_000, correlation=graph)
    small.work(20, 4_000, correlation=graph)
    frame = same_stream_overlaps(small.build())
    assert frame["label"].tolist() == ["unknown"]
    assert frame.attrs["cannot_say"] == [
        "1 overlaps lie within one graph launch, whose branches and programmatic edges are not recorded"
    ]


def test_none() -> None:
    frame = same_stream_overlaps(SmallTrace().build())
    assert len(frame) == 0
    assert frame.attrs["cannot_say"] == []
    assert frame.dtypes.to_dict() == same_stream_overlaps(overlaps()).dtypes.to_dict()


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6), st.integers(0, 1)), max_size=12))
def test_sum_less_union_is_what_overlaps(events: list[tuple[int, int, int]]) -> None:
    """On each stream the overlaps add up to the time that is counted more than once."""
    small = SmallTrace()
    for start, length, stream in events:
        small.work(start, start + length, stream=stream)
    frame = same_stream_overlaps(small.build())
    for stream in (0, 1):
        mine = [(start, start + length) for start, length, one in events if one == stream]
        union = len({moment for one in mine for moment in range(*one)})
        assert frame[frame["stream"] == stream]["overlap_ns"].sum() == sum(b - a for a, b in mine) - union
