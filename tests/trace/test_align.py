"""Offsets, methods, uncertainties and refusals of align."""

from pathlib import Path

import pytest

from mrv2lab.trace.align import align, match_steps
from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Lane, Trace, TraceError, TraceInfo
from tests.trace.step_runs import run_of_steps

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
HOUR = 3_600_000_000_000
FEBRUARY, MAY = 1_772_000_000_000_000_000, 1_780_000_000_000_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevComm*)"


def rank_trace(rank: int, collectives: list[tuple[int, int]], name: str = ALL_REDUCE, origin: int = FEBRUARY) -> Trace:
    """A rank whose collectives run from .. to .., by its own clock."""
    builder = TraceBuilder()
    builder.add(0, 1, "begin", "op", Lane("1", "host"))
    for start, end in collectives:
        builder.add(start, end - start, name, "kernel", Lane("GPU", "7", role="stream", device=rank, stream=7))
    info = TraceInfo("kineto", f"rank{rank}.json", clock="unix", origin_ns=origin, rank=rank, world_size=2)
    return builder.build(info)


# -- clock


def test_by_clock_the_offset_is_the_distance_of_the_origins():
    a = run_of_steps([100], title="a", clock="unix", origin_ns=FEBRUARY)
    b = run_of_steps([100], title="b", clock="unix", origin_ns=FEBRUARY + 70)
    found = align([a, b], "clock")
    assert (found.offsets_ns, found.method, found.uncertainty_ns) == ((0, 70), "clock", None)
    assert found.sentence == (
        "aligned by clock: both clocks are wall clocks and no collective shows how far they agree; "
        "the uncertainty is not known"
    )


def test_bases_months_apart_are_refused_with_both_dates():
    a = run_of_steps([100], title="a", clock="unix", origin_ns=FEBRUARY)
    b = run_of_steps([100], title="b", clock="unix", origin_ns=MAY)
    refusal = (
        "a starts at 2026-02-25 06:13:20 UTC, b at 2026-05-28 20:26:40 UTC: 2,222.2 hours lie between them; "
        "align by 'step' or 'first kernel' instead"
    )
    with pytest.raises(TraceError) as caught:
        align([a, b], "clock")
    assert str(caught.value) == refusal
    assert align([a, b]).method == "step"


def test_a_file_without_a_base_is_refused_with_both_values():
    a = run_of_steps([100], title="a", clock="unix", origin_ns=FEBRUARY)
    b = run_of_steps([100], title="b", origin_ns=5_000)
    with pytest.raises(
        TraceError, match=r"origins 1,772,000,000,000,000,000 ns and 5,000 ns.*'unix'.*'unknown'.*'step'"
    ):
        align([a, b], "clock")


@pytest.mark.parametrize(("apart", "allowed"), [(HOUR, True), (HOUR + 1, False)])
def test_an_hour_between_the_traces_is_the_limit(apart, allowed):
    a = run_of_steps([100], clock="unix", origin_ns=FEBRUARY)
    b = run_of_steps([100], clock="unix", origin_ns=FEBRUARY + 100 + apart)
    if allowed:
        assert align([a, b], "clock").offsets_ns == (0, 100 + apart)
    else:
        with pytest.raises(TraceError, match="hours lie between them"):
            align([a, b], "clock")


def host_run(origin: int, unix_at_0: int | None) -> Trace:
    extra = {} if unix_at_0 is None else {"epoch_host_ns": 4_000, "epoch_unix_ns": unix_at_0 + 4_000}
    return run_of_steps([100], clock="host", origin_ns=origin, extra=extra)


def test_host_clocks_of_one_boot_are_one_clock():
    found = align([host_run(5_000, FEBRUARY), host_run(5_060, FEBRUARY + 999_999_999)], "clock")
    assert (found.offsets_ns, found.uncertainty_ns) == ((0, 60), 0)


@pytest.mark.parametrize("other", [FEBRUARY + 1_000_000_001, None])
def test_host_clocks_of_two_boots_or_unknown_ones_are_refused(other):
    with pytest.raises(TraceError, match=r"two boots|nothing about which machine"):
        align([host_run(5_000, FEBRUARY), host_run(5_060, other)], "clock")


def test_auto_takes_the_clock_only_where_the_traces_overlap_in_time():
    a = run_of_steps([1000, 1000], clock="unix", origin_ns=FEBRUARY)
    beside = run_of_steps([1000, 1000], clock="unix", origin_ns=FEBRUARY + 3_000)
    after = run_of_steps([1000, 1000], clock="unix", origin_ns=FEBRUARY + 3_001)
    assert (align([a, beside]).method, align([a, after]).method) == ("clock", "step")


# -- collectives of several ranks


def test_a_collective_bounds_the_error_of_the_clock():
    # None ends before its last start: 0 + o <= 900 - 400, 1000 + o >= 100 - ..; see the two bounds below.
    a = rank_trace(0, [(100, 900), (2_000, 2_500)])
    b = rank_trace(1, [(400, 880), (2_300, 2_490)])
    # low = max(100 - 880, 2000 - 2490) = -490, high = min(900 - 400, 2500 - 2300) = 200
    found = align([a, b], "clock")
    assert (found.offsets_ns, found.uncertainty_ns) == ((0, 0), 490)
    assert "2 common collectives" in found.sentence


def test_a_clock_that_contradicts_the_collectives_is_refused_and_they_align_instead():
    """A naive merge: 11.56 s off where the true skew is 1.6 ms."""
    skew, off = 1_600_000, 11_560_000_000
    a = rank_trace(0, [(100_000, 5_000_000), (9_000_000, 12_000_000)])
    b = rank_trace(
        1, [(100_000 + skew, 5_000_000 + skew), (9_000_000 + skew, 12_000_000 + skew)], origin=FEBRUARY + off
    )
    with pytest.raises(
        TraceError, match=r"contradict 2 collectives of both by 11,55\d,\d+\.\d+ us; align by 'collective'"
    ):
        align([a, b], "clock")
    found = align([a, b])
    assert (found.method, found.offsets_ns) == ("collective", (0, -skew))
    assert found.uncertainty_ns == 3_000_000
    assert "not by clock" in found.sentence


@pytest.mark.parametrize(
    ("name", "count"),
    [("ncclDevKernel_Broadcast_RING_LL", 2), ("ncclDevKernel_SendRecv", 2), (ALL_REDUCE, 1), ("all_reduce_of_ours", 2)],
)
def test_what_bounds_nothing(name, count):
    """A root may be done early; unequal numbers cannot be paired; no library's collective."""
    a = rank_trace(0, [(0, 10), (20, 30)], name)
    b = rank_trace(1, [(0, 10), (20, 30)][:count], name)
    with pytest.raises(TraceError, match="no collective that all ranks"):
        align([a, b], "collective")


def test_collectives_of_two_runs_of_one_rank_bound_nothing():
    a, b = rank_trace(0, [(0, 10)]), rank_trace(0, [(0, 10)])
    with pytest.raises(TraceError, match="no collective"):
        align([a, b], "collective")


# -- steps


def test_by_step_the_median_distance_and_half_the_quartiles():
    # Starts of a: 0, 1100, 2200, 3300, 4400; of b: 0, 1000, 2010, 3030, 4070 from 50 on.
    a = run_of_steps([100] * 5)
    b = run_of_steps([0, 10, 20, 40, 10], start=50)
    found = align([a, b], "step")
    # distances 0, 100, 190, 270, 330 (both traces begin at their own 0)
    assert (found.offsets_ns, found.uncertainty_ns) == ((0, 190), 85)
    assert found.sentence == "aligned by step: the starts of 5 common steps; uncertain by 0.085 us"


def test_one_chosen_step_starts_at_the_same_moment():
    a, b = run_of_steps([100] * 5), run_of_steps([0, 10, 20, 40, 10])
    assert align([a, b], step=3).offsets_ns == (0, 270)
    assert align([a, b], "step", step="mrv2lab.step#1").offsets_ns == (0, 100)
    with pytest.raises(TraceError, match=r"step 9 is not in both traces: they share run has 'mrv2lab\.step#0' to"):
        align([a, b], "step", step=9)


def test_steps_are_matched_by_number_not_by_place():
    a, b = run_of_steps([100] * 5), run_of_steps([100] * 5, first_number=3)
    assert align([a, b], "step").offsets_ns == (0, 3_300)


def test_one_common_step_has_no_known_uncertainty():
    found = align([run_of_steps([100] * 5), run_of_steps([100] * 5, first_number=4)], "step")
    assert (found.offsets_ns, found.uncertainty_ns) == ((0, 4_400), None)
    assert found.sentence.endswith("1 common step; the uncertainty is not known")


def test_without_a_common_step_the_refusal_names_what_there_is():
    a, b = run_of_steps([100] * 2, title="a"), run_of_steps([100], title="b", first_number=7)
    with pytest.raises(TraceError, match=r"a has 'mrv2lab.step#0' to 'mrv2lab.step#1', b has 'mrv2lab.step#7'"):
        align([a, b], "step")


VLLM = "execute_context_1(8)_generation_0(0)", "execute_context_0(0)_generation_1(1)"


@pytest.mark.parametrize(
    ("names_a", "names_b", "expected"),
    [
        (["mrv2lab.step#4", "mrv2lab.step#5"], ["mrv2lab.step#5", "mrv2lab.step#6"], ([1], [0], "number")),
        ([VLLM[1], VLLM[0], VLLM[1]], [VLLM[0], VLLM[1], VLLM[1]], ([0, 1, 2], [1, 0, 2], "name")),
        (["ProfilerStep#1", "ProfilerStep#2"], ["ProfilerStep#9"], ([0], [0], "order")),
        (["ProfilerStep#1"], ["mrv2lab.step#1"], ([], [], "")),
        ([], ["mrv2lab.step#1"], ([], [], "")),
    ],
    ids=["number", "name", "order", "two sources", "none"],
)
def test_match_steps(names_a, names_b, expected):
    frames = [steps(run_of_steps([10] * len(names), names=names)) for names in (names_a, names_b)]
    left, right, how = match_steps(*frames)
    assert (left.tolist(), right.tolist(), how) == expected


# -- device work and starts


def test_by_first_kernel_of_the_first_common_step():
    a = run_of_steps([100] * 3, gpu_ns=[40] * 3)
    b = run_of_steps([100] * 3, gpu_ns=[40] * 3, device_late_ns=900, first_number=1)
    # Step 1: in a at 1100 + 500, in b at 900.
    found = align([a, b], "first kernel")
    assert (found.offsets_ns, found.uncertainty_ns) == ((0, 700), None)
    assert align([a, b], "first kernel", step=2).offsets_ns == (0, 700)


def test_by_first_kernel_of_the_file_without_steps():
    names = ["x"] * 3
    a, b = (run_of_steps([100] * 3, gpu_ns=[40] * 3, names=names, device_late_ns=late) for late in (500, 900))
    found = align([a, b])
    assert (found.offsets_ns, found.method) == ((0, -400), "first kernel")
    assert found.sentence.startswith(
        "aligned by first kernel: the first device work of each file; the uncertainty is not"
    )


def test_no_device_work_is_no_zero():
    a, b = run_of_steps([100], gpu_ns=[4], names=["x"], title="a"), run_of_steps([100], names=["x"], title="b")
    with pytest.raises(TraceError, match="no GPU activity recorded in b"):
        align([a, b], "first kernel")
    assert align([a, b]).method == "start"


def test_starts_of_selections():
    a, b = run_of_steps([100] * 3), run_of_steps([100] * 3)
    assert align([a.between(1_100, 9_000), b], "start").offsets_ns == (0, 1_100)


def test_several_traces_are_as_uncertain_as_the_worst():
    a, b = run_of_steps([100] * 5), run_of_steps([100] * 5)
    c = run_of_steps([0, 10, 20, 40, 10])
    assert align([a, b, c], "step").uncertainty_ns == 85
    assert align([a, b, run_of_steps([1])], "step").uncertainty_ns is None
    assert align([a]).offsets_ns == (0,)


def test_bad_arguments():
    a = run_of_steps([100])
    with pytest.raises(TraceError, match="nothing to align"):
        align([])
    with pytest.raises(TraceError, match="by='moon' is no way"):
        align([a, a], "moon")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="run holds no events"):
        align([a, run_of_steps([])])


def test_real_files():
    """02 and 03 are 130 s apart on one clock, 01 was recorded two months before."""
    if not SHARED.is_dir():
        pytest.skip("no shared traces")
    from mrv2lab.trace.read import load

    files = ["01_vllm_v1_b200_eager", "02_vllm_v1_decode_fullgraph", "03_vllm_v1_prefilldecode_piecewise"]
    one, two, three = (load(SHARED / f"{name}.json.gz", cache=False, progress=False) for name in files)
    assert align([two, three], "clock").offsets_ns == (0, -130_420_188_179)
    with pytest.raises(TraceError, match=r"2026-01-16 .* 2026-03-17 "):
        align([one, two], "clock")
    assert align([two, three]).method == "first kernel"
