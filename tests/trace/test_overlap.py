from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace import overlap as overlap_module
from mrv2lab.trace.overlap import PAIRS, overlap
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace


def busy_device() -> Trace:
    #   0        10        20        30        40        50        60
    #   |---------|---------|---------|---------|---------|---------|
    # 7            [--- compute -------]             [ compute ]
    # 20                     [--- compute -]
    # 24                 [- copy -----------------]
    # 28                                             [- all reduce -]
    # host [launches] [ python         ] [ synchronise   ] [python]
    small = SmallTrace()
    small.launch((0, 1), (10, 32), stream=7)
    small.launch((1, 2), (22, 37), stream=20)
    small.launch((2, 3), (18, 45), "Memcpy HtoD (Pinned -> Device)", kind="memcpy", stream=24)
    small.launch((3, 4), (48, 58), stream=7)
    small.launch((4, 5), (48, 63), "ncclDevKernel_AllReduce_Sum_bf16", stream=28)
    small.host(15, 33, "python")
    small.call(35, 50, "cudaStreamSynchronize")
    small.host(50, 60, "python")
    return small.build()


def test_every_pair() -> None:
    frame = overlap(busy_device()).set_index("pair")
    assert list(frame.index) == list(PAIRS)
    assert frame[["a_ns", "b_ns", "overlap_ns"]].T.to_dict("list") == {
        "copy / compute": [27, 37, 19],  # 18..37
        "compute / compute": [37, 37, 10],  # 22..32
        "communication / compute": [15, 37, 10],  # 48..58
        "host / device": [33, 50, 28],  # 0..5, 15..33, 50..60 against 10..45, 48..63; the wait is no work
    }
    assert frame.loc["copy / compute", ["a_share", "b_share"]].tolist() == [19 / 27, 19 / 37]
    assert frame.loc["communication / compute", ["a_share", "b_share"]].tolist() == [10 / 15, 10 / 37]


def test_what_is_not_there_is_0_and_said() -> None:
    small = SmallTrace()
    small.work(0, 10, correlation=3)
    frame = overlap(small.build())
    assert not frame.isna().any(axis=None)
    assert (frame["overlap_ns"] == 0).all()
    assert (frame[["a_share", "b_share"]] == 0).all(axis=None)
    assert frame.attrs["cannot_say"] == [
        "no copies recorded: their overlap is 0 because there is nothing to overlap",
        "no communication recorded (no kernel with the name of a collective): its overlap is 0",
        "no launches of the device work recorded, so nothing is known about the host that made them",
    ]


def test_devices_are_kept_apart() -> None:
    small = SmallTrace()
    small.launch((0, 1), (10, 30), device=0)
    small.launch((1, 2), (10, 30), "Memcpy DtoH", kind="memcpy", device=1)
    frame = overlap(small.build())
    assert frame["device"].tolist() == [0] * 4 + [1] * 4
    assert frame[frame["pair"] == "copy / compute"]["overlap_ns"].tolist() == [0, 0]


def test_one_stream_that_overlaps_itself_is_not_two() -> None:
    small = SmallTrace()
    small.launch((0, 1), (10, 30))
    small.launch((1, 2), (25, 40))
    frame = overlap(small.build()).set_index("pair")
    assert frame.loc["compute / compute", "overlap_ns"] == 0


@pytest.mark.parametrize(
    ("name", "talks"),
    [
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", True),
        ("void vllm::cross_device_reduce_1stage<half, 8>()", True),
        ("multimem_all_reduce_kernel<c10::BFloat16>", True),
        ("rcclGenericKernel", True),
        ("void at::native::reduce_kernel<512>()", False),
        ("fused_moe_kernel", False),
    ],
)
def test_communication_is_told_by_name(name: str, talks: bool) -> None:
    small = SmallTrace()
    small.launch((0, 1), (10, 30), name)
    frame = overlap(small.build()).set_index("pair")
    assert frame.loc["communication / compute", "a_ns"] == (20 if talks else 0)


def test_no_device() -> None:
    small = SmallTrace()
    small.host(0, 10, "op", "op")
    frame = overlap(small.build())
    assert len(frame) == 0
    assert frame.attrs["cannot_say"][0].startswith("no GPU activity recorded")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 2), st.booleans()), max_size=12))
def test_against_counting(events: list[tuple[int, int, int, bool]]) -> None:
    small = SmallTrace()
    small.work(0, 0)
    for start, length, stream, copies in events:
        small.work(start, start + length, "x", "memcpy" if copies else "kernel", stream=stream)
    frame = overlap(small.build()).set_index("pair")
    at = [
        (
            {stream for start, length, stream, copies in events if not copies and start <= now < start + length},
            any(copies and start <= now < start + length for start, length, _, copies in events),
        )
        for now in range(41)
    ]
    assert frame.loc["copy / compute", "overlap_ns"] == sum(bool(streams) and copies for streams, copies in at)
    assert frame.loc["compute / compute", "overlap_ns"] == sum(len(streams) > 1 for streams, _ in at)
    assert frame.loc["compute / compute", "a_ns"] == sum(bool(streams) for streams, _ in at)


def test_the_threads_of_many_devices_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small, calls = SmallTrace(), []
    for device in range(5):
        small.launch((10 * device, 10 * device + 2), (10 * device + 1, 10 * device + 5), device=device)
    look = overlap_module.host_threads
    monkeypatch.setattr(overlap_module, "host_threads", lambda *args: calls.append(1) or look(*args))
    found = overlap(small.build())
    assert found.loc[found["pair"] == "host / device", "overlap_ns"].tolist() == [1] * 5
    assert len(calls) == 1
