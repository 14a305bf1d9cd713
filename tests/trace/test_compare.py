"""compare: comparability, phases, counts, structure and the sentence."""

from pathlib import Path

import numpy as np
import orjson
import pytest

from mrv2lab.trace import compare_phases
from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.compare import compare
from mrv2lab.trace.compare_phases import counts, phases
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Lane, TraceError, TraceInfo
from tests.trace.step_runs import BATCH, COUNT, noisy, run_of_steps, verdicts

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"

# -- times


def test_phases_that_differ_and_phases_that_do_not():
    a = run_of_steps(noisy(1), {"prepare_inputs": noisy(2, 20_000), "forward": noisy(3, 40_000, 0.01)}, batches=BATCH)
    b = run_of_steps(noisy(4), {"prepare_inputs": noisy(5, 15_000), "forward": noisy(6, 40_000, 0.01)}, batches=BATCH)
    found = compare(a, b)
    assert verdicts(found) == {
        "host": "same within noise",
        "device": "cannot tell",
        "device busy": "cannot tell",
        "host phases": "b faster",
        "prepare_inputs": "b faster",
        "forward": "same within noise",
    }
    row = found.frame.set_index("phase").loc["prepare_inputs"]
    of_a, of_b = noisy(2, 20_000), noisy(5, 15_000)
    assert (row["n_a"], row["n_b"]) == (COUNT, COUNT)
    assert (row["median_a_ns"], row["median_b_ns"]) == (round(np.median(of_a)), round(np.median(of_b)))
    assert row["q1_a_ns"] == round(np.percentile(of_a, 25))
    assert row["q3_b_ns"] == round(np.percentile(of_b, 75))
    assert row["difference_ns"] == row["median_b_ns"] - row["median_a_ns"]
    assert row["ratio"] == pytest.approx(row["median_b_ns"] / row["median_a_ns"])
    assert row["p"] < 0.01
    assert found.label == "b faster"
    assert "a step's host time in phases: shorter in b" in found.verdict.lower()
    assert "time of a step is not throughput" in found.verdict
    assert any(reason.startswith("one run each") for reason in found.reasons)


def test_a_phase_of_one_side_alone():
    a = run_of_steps(noisy(1), {"barrier_wait": [300] * COUNT}, batches=BATCH, title="v1")
    b = run_of_steps(noisy(2), {"gather": [200] * COUNT}, batches=BATCH, title="mrv2")
    found = compare(a, b)
    rows = found.frame.set_index("phase")
    assert rows.loc["barrier_wait", ["n_a", "n_b", "median_a_ns", "verdict", "reason"]].tolist() == [
        COUNT,
        0,
        300,
        "cannot tell",
        "only in v1",
    ]
    assert "only in v1: barrier_wait (0.300 us); only in mrv2: gather (0.200 us)" in found.verdict


def test_a_phase_absent_in_a_step_took_no_time_there():
    lengths = [100, 0] * (COUNT // 2)
    found = phases(one := run_of_steps([1000] * COUNT, {"propose": lengths}), steps(one))
    assert (found.source, found.times["propose"].tolist()) == ("phases", lengths)
    assert found.seen["propose"].tolist() == [length > 0 for length in lengths]
    assert found.where_seen("propose").tolist() == [100] * (COUNT // 2)
    assert found.where_seen("gather").tolist() == []


def rarely(seed: int, every: int):
    lengths = [300 if step % every == 0 else 0 for step in range(COUNT)]
    return run_of_steps(noisy(seed), {"propose": lengths, "forward": [500] * COUNT}, batches=BATCH)


def test_a_phase_counts_in_the_steps_that_have_it():
    found = compare(rarely(1, 1), rarely(2, 2))
    row = found.frame.set_index("phase").loc["propose"]
    assert row[["n_a", "n_b", "median_a_ns", "median_b_ns"]].tolist() == [COUNT, COUNT // 2, 300, 300]
    assert row["verdict"] == "same within noise"
    assert row["reason"].endswith("in 16 of 16 common steps of a, 8 of b")
    of_step = found.frame.set_index("phase").loc["host phases"]
    assert of_step[["n_a", "n_b", "median_a_ns", "median_b_ns"]].tolist() == [COUNT, COUNT, 800, 650]


def test_mutant_zeros_that_count_silently_are_noticed(monkeypatch):
    monkeypatch.setattr(compare_phases.Phases, "where_seen", lambda self, name: self.times[name])
    with pytest.raises(AssertionError):
        test_a_phase_counts_in_the_steps_that_have_it()


def test_device_times_of_steps():
    a = run_of_steps(noisy(1), gpu_ns=noisy(2, 50_000), batches=BATCH)
    b = run_of_steps(noisy(3), gpu_ns=noisy(4, 80_000), batches=BATCH)
    found = compare(a, b, "first kernel")
    assert (verdicts(found)["device"], verdicts(found)["device busy"]) == ("a faster", "a faster")
    assert found.alignment.method == "first kernel"
    assert found.kernels[["name", "change"]].to_numpy().tolist() == [["gemm", "time"]]


def test_steps_for_the_difference_lane():
    a = run_of_steps([100, 200, 300], gpu_ns=[50, 60, 70], title="a")
    b = run_of_steps([90, 260, 300], gpu_ns=[55, 60, 70], title="b", first_number=1)
    found = compare(a, b)
    assert found.steps[
        ["step", "start_ns", "end_ns", "a_ns", "b_ns", "delta_ns", "delta_gpu_ns"]
    ].to_numpy().tolist() == [
        ["mrv2lab.step#1", 1_100, 1_300, 200, 90, -110, -5],
        ["mrv2lab.step#2", 2_300, 2_600, 300, 260, -40, -10],
    ]
    # Starts of b on a's axis: 0 and 1090 moved by the median of 1100 and 1210.
    assert found.steps["b_start_ns"].tolist() == [1_155, 2_245]
    assert found.steps["label"].iloc[0] == "mrv2lab.step#1: 0.110 us shorter on the host in b"
    assert "1 of 3 steps of a are in it alone" in found.reasons
    assert found.verdict.startswith("Cannot tell which is faster: too few steps: 2 common steps, at least 8 are needed")


# -- what may be compared


def base(seed: int, median: int = 100_000, **changes):
    options = {"batches": BATCH, "gpu_ns": noisy(seed + 50, median // 2), "title": f"run {seed}"} | changes
    return run_of_steps(noisy(seed, median), **options)


def test_the_same_workload_on_the_same_device_is_judged():
    found = compare(base(1), base(2, 50_000))
    assert (found.label, verdicts(found)["device"]) == ("b faster", "b faster")


H100, H200 = ({"devices": ({"id": 0, "name": name},)} for name in ("H100", "H200"))


@pytest.mark.parametrize(
    ("of_a", "of_b", "reason"),
    [
        (
            {},
            {"batches": [*BATCH[:3], (4, 5), *BATCH[4:]]},
            "the workloads differ in 1 of 16 common steps, first in 'mrv2lab.step#3': "
            "4 requests, 4 tokens against 4 requests, 5 tokens",
        ),
        ({"modelled": True}, {}, "the device times of run 1 are modelled and those of run 2 measured"),
        (H100, H200, "different devices: H100 and H200"),
        ({"world_size": 2}, {"world_size": 4}, "different numbers of ranks: 2 and 4"),
        ({"extra": {"mode": "step"}}, {}, "run 1 paused between phases: such times are no run's"),
        (
            {"extra": {"config": {"model": {"layers": 2}}}},
            {"extra": {"config": {"model": {"layers": 3}}}},
            "different models by the recordings' configurations",
        ),
        ({}, {"names": ["x"] * COUNT}, "no step of one is a step of the other"),
    ],
    ids=["workload", "modelled", "device", "ranks", "paused", "model", "steps"],
)
def test_incomparable_traces_are_never_judged(of_a, of_b, reason):
    found = compare(base(1, **of_a), base(2, 50_000, **of_b))
    assert found.reasons[0] == reason
    assert set(found.frame["verdict"]) == {"cannot tell"}
    assert set(found.frame["reason"]) == {reason}
    assert (found.label, found.verdict.startswith(f"Cannot tell which is faster: {reason}")) == ("cannot tell", True)


def test_two_instruments_leave_the_device_times():
    found = compare(base(1), base(2, 50_000, producer="kineto"))
    assert (verdicts(found)["host"], verdicts(found)["device"]) == ("cannot tell", "b faster")
    assert found.reasons[0].startswith("run 1 was recorded by chrome, run 2 by kineto")


def test_two_cost_models_leave_the_host_times():
    found = compare(base(1, modelled=True), base(2, 50_000, modelled=True))
    assert (verdicts(found)["host"], verdicts(found)["device"]) == ("b faster", "cannot tell")


def test_what_is_only_noted():
    a = base(1, versions={"torch": "2.10"}, names=[f"ProfilerStep#{i}" for i in range(COUNT)], batches=None)
    b = base(
        2, 50_000, versions={"torch": "2.11"}, names=[f"ProfilerStep#{i + 99}" for i in range(COUNT)], batches=None
    )
    found = compare(a, b)
    assert found.label == "b faster"
    for note in (
        "no device is named in run 1 and run 2, so they may be different ones",
        "different versions: torch 2.10 and 2.11",
        "requests and tokens are not in both files for 16 of 16 common steps, "
        "so whether the workloads are the same cannot be told",
        "the steps carry no common number or name: the k-th step of each is taken for the same",
    ):
        assert note in found.reasons


def test_vllm_names_say_the_workload():
    decode = [f"execute_context_0(0)_generation_{2 + i % 2}({2 + i % 2})" for i in range(COUNT)]
    found = compare(base(1, names=decode, batches=None), base(2, 50_000, names=decode, batches=None))
    assert found.label == "b faster"
    prefill = [name.replace("context_0(0)", "context_1(7)") for name in decode]
    found = compare(base(1, names=decode, batches=None), base(2, 50_000, names=prefill, batches=None))
    assert "0 context requests, 0 context tokens, 2 generation requests" in found.reasons[0]


def test_overlapping_steps_are_said():
    a = base(1)
    late = a.select(np.arange(len(a)))
    late.duration[late.mask("annotation")] += 5_000
    assert any("overlap (several in flight)" in reason for reason in compare(late, base(2)).reasons)


def test_a_trace_beside_itself_is_called_that():
    a, b = base(1), base(1)
    found = compare(a, b)
    assert found.verdict.startswith("A trace beside itself (both hold the same events). A step's host time: same")
    assert found.reasons[0] == "a and b hold the same events: a trace beside itself"
    assert "beside itself" not in compare(base(1), base(2)).verdict
    moved = a.select(np.arange(len(a)))
    moved.start[-1] += 1
    assert "beside itself" not in compare(a, moved).verdict


@pytest.mark.parametrize("given", ["a.json", None, 3, Path("a.json")])
def test_something_else_than_traces(given):
    with pytest.raises(TypeError, match=rf"takes two Traces, got {type(given).__name__}: Trace.load\(path\) reads"):
        compare(given, base(1))
    with pytest.raises(TypeError, match="takes two Traces"):
        compare(base(1), given)


def test_bad_arguments():
    with pytest.raises(TraceError, match="run holds no events, so there is nothing to compare"):
        compare(run_of_steps([]), base(1))
    with pytest.raises(TraceError, match="no step is in both"):
        compare(base(1), base(2, first_number=100), "step")


# -- counts, structure, plain values


def test_counts_and_waits_of_a_barrier():
    found = compare(base(1, barrier=True), base(2))
    counted = found.counts.set_index("what")[["mean_a", "mean_b"]]
    assert counted.loc["host waits"].tolist() == [1.0, 0.0]
    assert counted.loc["launches"].tolist() == [1.0, 1.0]
    assert "a step has in run 1 and run 2 on average host waits 1 and 0" in found.verdict
    row = found.syncs.to_dict("records")[0]
    assert (row["kind"], row["count_a"], row["count_b"], row["api_a_ns"], row["api_b_ns"]) == ("event", 16, 0, 320, 0)


def named_kernels(**lengths: list[int]):
    """Kernels one after the other, by name, and a step's range."""
    builder = TraceBuilder()
    builder.add(0, 10, "mrv2lab.step#0", "annotation", Lane("1", "main"))
    at = 0
    for name, durations in lengths.items():
        for duration in durations:
            builder.add(at, duration, name, "kernel", Lane("GPU", "7", role="stream", device=0, stream=7))
            at += duration
    return builder.build(TraceInfo("kineto", "kernels"))


def test_what_is_in_one_trace_alone():
    steady = [100, 101] * 8
    a = named_kernels(gone=[40], twice=[10, 10], same=steady, slower=steady, few=[5])
    b = named_kernels(twice=[10], same=steady, slower=[150, 151] * 8, few=[50], fresh=[70])
    found = compare(a, b)
    assert found.kernels.drop(columns=["kind", "total_a_ns"]).to_numpy().tolist() == [
        ["gone", "removed", 1, 0, 0, -40],
        ["fresh", "added", 0, 1, 70, 70],
        ["twice", "count", 2, 1, 10, -10],
        ["slower", "time", 16, 16, 2_408, 800],
        ["few", "none", 1, 1, 50, 45],
        ["same", "none", 16, 16, 1_608, 0],
    ]
    assert "1 kernel only in a (gone) and 1 kernel only in b (fresh)" in found.reasons


def test_structure_of_the_golden_pair():
    """09: three operators added, one kernel and one all-reduce less, nothing else; two steps are too few."""
    if not SHARED.is_dir():
        pytest.skip("no shared traces")
    from mrv2lab.trace.read import load

    a, b = (
        load(SHARED / f"09{x}_hta_compare_{y}.json.gz", cache=False, progress=False)
        for x, y in (("a", "base"), ("b", "test"))
    )
    found = compare(a, b)
    changed = found.kernels[found.kernels["change"] != "none"]
    rows = changed[["kind", "change", "count_a", "count_b", "difference_ns"]].to_numpy().tolist()
    assert rows == [
        ["op", "added", 0, 1, 311_000],
        ["op", "added", 0, 1, 207_000],
        ["op", "added", 0, 1, 11_000],
        ["annotation", "count", 2, 1, -67_000],
        ["kernel", "count", 3, 2, -4_000],
    ]
    assert changed["name"].tolist()[:4] == ["All2All_Pooled_Req", "AddmmBackward0", "CatBackward0", "nccl:all_reduce"]
    assert found.verdict.startswith("Cannot tell which is faster: too few steps")


def test_real_steps_of_vllm():
    """02 decodes, 03 mixes: never compared, and the phases are the model runner's functions."""
    if not SHARED.is_dir():
        pytest.skip("no shared traces")
    from mrv2lab.trace.read import load

    names = "02_vllm_v1_decode_fullgraph", "03_vllm_v1_prefilldecode_piecewise"
    found = compare(*(load(SHARED / f"{name}.json.gz", cache=False, progress=False) for name in names))
    assert found.label == "cannot tell"
    assert "32 generation tokens against 9 context requests, 8,155 context tokens" in found.reasons[0]
    rows = found.frame.set_index("phase")
    # Both ends of vLLM's barrier: 157.0 us and what records the event.
    assert rows.loc["synchronize_input_prep", "median_a_ns"] == 163_499
    assert {"execute_model", "_update_states", "_prepare_inputs", "_model_forward"} <= set(rows.index)
    assert "_may_reorder_batch" not in rows.index


def in_flight(added: bool = False):
    """A recording of two steps in flight: step 0 is settled, and its output copied, within the range of step 1."""
    builder = TraceBuilder()

    def event(start, length, name, kind, lane, **args):
        builder.add(start, length, name, kind, Lane("mrv2", lane), arg=builder.arg(orjson.dumps(args)))

    event(0, 900, "mrv2lab.step#0", "annotation", "steps", requests=["r"], tokens=3)
    event(500, 900, "mrv2lab.step#1", "annotation", "steps", requests=["r"], tokens=1)
    event(0, 400, "forward", "phase", "host phases", step=0)
    event(500, 300, "forward", "phase", "host phases", step=1)
    event(800, 100, "wait_output", "phase", "host phases", step=0)
    event(900, 60, "forward", "phase", "host phases", step=1, added=True)
    event(10, 0, "tokens.tmp", "runtime", "host calls", step=0, mark="h2d", nbytes=64)
    event(20, 0, "rows", "runtime", "host calls", step=0, mark="publish", nbytes=8)
    event(810, 0, "out", "runtime", "host calls", step=0, mark="d2h", nbytes=4)
    event(820, 0, "gemm", "runtime", "host calls", step=1, mark="run")
    event(830, 0, "checksum", "runtime", "host calls", step=1, mark="kernel", added=True)
    event(850, 40, "done", "sync", "host calls", step=0, mark="synchronize", phase="wait_output", stream="main")
    return builder.build(TraceInfo("recording", "flight", clock="host"))


def test_a_recording_says_which_step_an_event_belongs_to():
    trace = in_flight()
    frame = steps(trace)
    assert {name: times.tolist() for name, times in phases(trace, frame).times.items()} == {
        "forward": [400, 300],
        "wait_output": [100, 0],
    }
    assert {what: values.tolist() for what, values in counts(trace, frame).items() if values.any()} == {
        "launches": [2, 1],
        "copies HtoD": [1, 0],
        "bytes HtoD": [64, 0],
        "copies DtoH": [1, 0],
        "bytes DtoH": [4, 0],
        "publishes": [1, 0],
        "bytes published": [8, 0],
        "host waits": [1, 0],
    }


def test_counting_what_the_recorder_did_is_noticed(monkeypatch):
    monkeypatch.setattr(compare_phases, "_owners", lambda trace, frame: (compare_phases.step_of(trace, frame), {}))
    trace = in_flight()
    assert phases(trace, steps(trace)).times["forward"].tolist() == [400, 360]


def test_two_frames_of_one_name_within_each_other_count_once():
    builder = TraceBuilder()
    lane = Lane("1", "main")
    builder.add(0, 1000, "execute_context_1(8)_generation_0(0)", "annotation", lane)
    file = "vllm/v1/worker/gpu_model_runner.py"
    builder.add(100, 800, f"{file}(10): execute_model", "python", lane)
    builder.add(150, 300, f"{file}(20): _prepare_inputs", "python", lane)
    builder.add(200, 100, f"{file}(30): _prepare_inputs", "python", lane)
    builder.add(320, 50, f"{file}(40): _get_cumsum_and_arange", "python", lane)
    builder.add(500, 90, "torch/nn/modules/module.py(1): _call_impl", "python", lane)
    builder.add(600, 40, f"{file}(50): synchronize_input_prep", "python", lane)
    builder.add(700, 30, f"{file}(55): synchronize_input_prep", "python", lane)
    builder.add(900, 20, "nccl:all_gather", "annotation", lane)
    builder.add(905, 10, "nccl:all_gather", "annotation", lane)
    trace = builder.build(TraceInfo("kineto", "one"))
    found = phases(trace, steps(trace))
    assert (found.source, {name: times.tolist() for name, times in found.times.items()}) == (
        "frames",
        {"nccl:all_gather": [20], "execute_model": [800], "_prepare_inputs": [300], "synchronize_input_prep": [70]},
    )


def test_plain_values():
    found = compare(base(1, barrier=True), base(2, 50_000))
    plain = orjson.loads(orjson.dumps(found.to_dict()))
    assert plain["label"] == "b faster"
    assert plain["alignment"]["method"] == "step"
    assert len(plain["steps"]) == COUNT
    assert {row["verdict"] for row in plain["frame"]} <= {"a faster", "b faster", "same within noise", "cannot tell"}
    assert plain["frame"][0]["median_a_ns"] == round(np.median(noisy(1)))
    assert repr(found) == f"Comparison of run 1 (a) and run 2 (b): {found.verdict}"
