"""The lesson on foreign traces: the made-up file is what the notebook says of it, on every seed, and the exercises know
right from wrong and why."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mrv2lab.teach import trace_exercises, trace_lesson, vllm_like_file
from mrv2lab.teach.trace_exercises import Answer, find_the_barrier, name_the_limit, predict_queue_depth, split_the_wait
from mrv2lab.teach.trace_lesson import lanes, limits, of_step, published, queue_picture, two_ways_to_cut
from mrv2lab.teach.vllm_like_file import DECODE_STEPS, GRAPH_KERNELS, LAYERS, MARK, text_like_vllm, write_like_vllm
from mrv2lab.trace.launch_queue import queue_depth
from mrv2lab.trace.links import orphans
from mrv2lab.trace.same_stream import same_stream_overlaps
from mrv2lab.trace.steps import steps
from mrv2lab.trace.syncs import frames, syncs
from mrv2lab.trace.tables import launches
from mrv2lab.trace.trace import DEVICE_KINDS, Trace, TraceError
from mrv2lab.trace.verdict import LABELS
from mrv2lab.trace.wait_marks import wait_marks
from tests.trace.hand_made import HandMade

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
SEEDS = (7, 8, 23)
PREFILL = DECODE_STEPS


def made(folder: Path, seed: int = 7) -> Trace:
    return Trace.load(write_like_vllm(folder, seed), cache=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made(tmp_path_factory.mktemp("lesson"))


# -- the made-up file --------------------------------------------------------------------------------------------------


def test_one_seed_one_file(tmp_path: Path) -> None:
    first = write_like_vllm(tmp_path, 7).read_bytes()
    assert write_like_vllm(tmp_path, 7).read_bytes() == first
    assert write_like_vllm(tmp_path, 8).read_bytes() != first


def test_the_file_says_that_it_is_invented(trace: Trace) -> None:
    assert trace.info.extra[MARK] == {"seed": 7, "note": "invented by mrv2lab; no vLLM and no GPU was there"}
    assert "synthetic" in trace.info.title
    assert "invented" in trace.info.devices[0]["name"]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_notebook_says_of_it(tmp_path: Path, seed: int) -> None:
    trace = made(tmp_path, seed)
    table = steps(trace)
    assert table["kind"].tolist() == ["decode"] * DECODE_STEPS + ["prefill"]
    assert table["source"].unique().tolist() == ["vllm"]
    # A step of decode: five copies, one graph and two kernels behind it, none of it in the step's own range.
    decode = table.iloc[:DECODE_STEPS]
    assert decode["launches"].tolist() == [8] * DECODE_STEPS
    assert decode["gpu_events"].tolist() == [7 + GRAPH_KERNELS] * DECODE_STEPS
    assert decode["gpu_events_inside"].tolist() == [0] * DECODE_STEPS
    # The eager one: six copies, twelve kernels a layer and two behind it, nearly all of it in its range.
    prefill = table.iloc[PREFILL]
    assert prefill["gpu_events"] == prefill["launches"] == 6 + 12 * LAYERS + 2
    assert prefill["gpu_events_inside"] >= prefill["gpu_events"] - 2
    assert launches(trace)["max_kernels"].max() == GRAPH_KERNELS
    assert same_stream_overlaps(trace).attrs["counts"] == {
        "zero length": 0,
        "programmatic launch": LAYERS,
        "clock noise": 0,
        "unknown": 0,
    }
    assert limits(trace)["label"].tolist()[:-1] == ["device-bound"] * DECODE_STEPS + ["host-bound"]
    assert int(orphans(trace).sum()) == 2 * GRAPH_KERNELS // 3
    (problem,) = trace.problems
    assert problem.count == 1
    assert "inf" in problem.reason


@pytest.mark.parametrize("seed", SEEDS)
def test_its_waits(tmp_path: Path, seed: int) -> None:
    found = syncs(made(tmp_path, seed))
    barrier = found[found["barrier"]]
    assert barrier["kind"].tolist() == ["event"] * DECODE_STEPS + ["python frame only"]
    assert barrier["site"].nunique() == 1
    known = barrier.iloc[:DECODE_STEPS]
    assert known["api_ns"].between(1_800, 2_600).all()
    assert (known["caller_ns"] > 30 * known["api_ns"]).all()
    assert barrier["api_ns"].iloc[-1] == -1
    assert (found["gpu_wait_ns"][found["barrier"]] == -1).all()
    assert any("cannot be told from it" in sentence for sentence in found.attrs["cannot_say"])
    (other,) = found[~found["barrier"]].to_dict("records")
    assert (other["kind"], other["host_waits"]) == ("implicit copy", False)


def test_the_profiler_is_inside_the_longest_copy(trace: Trace) -> None:
    (row,) = frames(trace, "copy_to_gpu").to_dict("records")
    assert row["calls"] == 5 * (DECODE_STEPS + 1)
    assert row["overhead_ns"] == row["longest_overhead_ns"] > 0.9 * row["longest_ns"]


def test_the_text_is_no_json_by_one_word() -> None:
    text = text_like_vllm(7)
    assert text.count(b": inf") == 1
    json.loads(text.replace(b": inf", b": 0"))


def test_host_events_of_the_file_nest(trace: Trace) -> None:
    ends: list[int] = []
    on_host = np.flatnonzero(trace.mask("python", "op", "runtime", "annotation"))
    for start, end in zip(trace.start[on_host].tolist(), trace.end[on_host].tolist(), strict=True):
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or end <= ends[-1]
        ends.append(end)


# -- what the notebook shows -------------------------------------------------------------------------------------------


def test_two_ways_to_cut_by_hand() -> None:
    hand = HandMade().step(0, 100, 1).step(100, 100, 2)
    hand.call(10, 5, "cudaLaunchKernel", 1).call(110, 5, "cudaLaunchKernel", 2)
    hand.kernel(50, 20, link=1).kernel(120, 20, link=1).kernel(150, 20, link=2).kernel(190, 30, link=2)
    found = two_ways_to_cut(hand.build())
    assert found[["its_own", "its_own_inside", "anyone_inside"]].to_numpy().tolist() == [[2, 1, 1], [2, 1, 2]]


def test_the_wrong_way_to_cut_looks_plausible(trace: Trace) -> None:
    found = two_ways_to_cut(trace)
    assert (found["its_own_inside"][:DECODE_STEPS] == 0).all()
    assert (found["anyone_inside"][:DECODE_STEPS] > 20).all()


def test_of_step_takes_the_work_that_runs_later(trace: Trace) -> None:
    part, row = of_step(trace, 1), steps(trace).iloc[1]
    work = part.select(part.mask(*DEVICE_KINDS))
    assert len(work) == row["gpu_events"]
    assert (work.start > row["host_end_ns"]).all()
    with pytest.raises(TraceError, match="there is no step 5; it has 5, counted from 0"):
        of_step(trace, 5)
    with pytest.raises(TraceError, match="there is no step -1"):
        of_step(trace, -1)


def test_lanes_by_hand() -> None:
    hand = HandMade().frame(10, 30, "a.py(1): f").frame(20, 10, "a.py(2): g").kernel(50, 7).kernel(60, 8)
    found = lanes(hand.build())
    assert found["role"].tolist() == ["thread", "stream"]
    assert found["events"].tolist() == [3, 2]
    assert found["busy_us"].tolist() == [30.0, 15.0], "the frame within a frame counts once"
    assert found[["first_us", "last_us"]].to_numpy().tolist() == [[0.0, 40.0], [50.0, 68.0]]


def test_marks_are_as_long_as_the_caller_saw(trace: Trace) -> None:
    marks, found = wait_marks(trace), syncs(trace)
    found = found[found["host_waits"]].reset_index(drop=True)
    assert (marks["end_ns"] - marks["start_ns"]).tolist() == found["caller_ns"].tolist()
    assert marks["label"].str.startswith("barrier: ").all()
    assert {str(trace.lanes[lane]) for lane in marks["lane"]} == {"thread 4711"}


def test_a_trace_without_anything_is_shown_too() -> None:
    empty = HandMade().build()
    assert two_ways_to_cut(empty).empty
    assert wait_marks(empty).empty
    assert limits(empty)["label"].tolist() == ["cannot tell"]
    assert "no GPU activity recorded" in queue_picture(empty).layout.title.text


def test_the_picture_shows_the_queue(trace: Trace) -> None:
    (line,) = queue_picture(trace).data
    depth = queue_depth(trace)
    assert max(line.y) == depth.attrs["max_depth"]
    assert len(line.x) == len(depth)


def test_the_public_files_are_known_by_their_bytes(tmp_path: Path) -> None:
    assert published(write_like_vllm(tmp_path)) == "This is none of the two public files."
    for file, where in (("01_vllm_v1_b200_eager.json.gz", "b200"), ("02_vllm_v1_decode_fullgraph.json.gz", "decode")):
        if (SHARED / file).exists():
            assert where in published(SHARED / file)


def test_reading_needs_no_torch() -> None:
    modules = ", ".join(module.__name__ for module in (trace_exercises, trace_lesson, vllm_like_file))
    code = f"import sys; sys.modules['torch'] = None; import {modules}; import mrv2lab; mrv2lab.Timeline, mrv2lab.Trace"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# -- exercises ---------------------------------------------------------------------------------------------------------


def is_(answer: Answer, state: str, *words: str) -> None:
    assert answer.state == state, answer
    assert bool(answer) == (state == "right")
    assert all(word in answer.reason for word in words), answer


@pytest.mark.parametrize("seed", SEEDS)
def test_find_the_barrier(tmp_path: Path, seed: int) -> None:
    trace = made(tmp_path, seed)
    sites = syncs(trace)
    site, copy = sites["site"].iloc[0], sites["site"].iloc[-1]
    short = site.rpartition("/")[2]
    is_(find_the_barrier(trace, None), "open", "file:line")
    for answer in (site, short, short.replace(":", "(") + "): synchronize_input_prep", f"  {site} "):
        is_(find_the_barrier(trace, answer), "right", "5 times", "execute_model > synchronize_input_prep")
    is_(find_the_barrier(trace, copy), "wrong", "implicit copy", "did not hold up the host")
    (other_end,) = (
        name
        for name in trace.names
        if name.endswith("): synchronize_input_prep") and f"({site.rpartition(':')[2]})" not in name
    )
    is_(find_the_barrier(trace, other_end), "wrong", "the barrier's other end")
    (copying,) = (name for name in trace.names if name.endswith("copy_to_gpu"))
    is_(find_the_barrier(trace, copying), "wrong", "copy_to_gpu is entered there (25 times)", "nothing waits")
    is_(find_the_barrier(trace, "elsewhere.py:1"), "wrong", "no frame of the file begins at elsewhere.py:1")
    is_(find_the_barrier(trace, "the barrier"), "wrong", "is no place")
    # The end of another file's name is not its name.
    is_(find_the_barrier(trace, short.removeprefix("gpu_")), "wrong", "no frame")


def test_a_wait_that_is_no_barrier_is_told_apart() -> None:
    hand = HandMade().frame(0, 100, "vllm/runner.py(5): execute_model")
    hand.frame(10, 30, "vllm/runner.py(7): synchronize_input_prep").call(12, 20, "cudaEventSynchronize", 1)
    hand.frame(50, 30, "vllm/other.py(9): read").call(55, 20, "cudaStreamSynchronize", 2)
    is_(find_the_barrier(hand.build(), "other.py:9"), "wrong", "the host waits there (stream)", "barrier=True")
    is_(find_the_barrier(hand.build(), "runner.py:7"), "right", "once")


def test_split_the_wait(trace: Trace) -> None:
    found = syncs(trace)
    longest = found.loc[found[found["api_ns"] >= 0]["caller_ns"].idxmax()]
    api, caller, unexplained = (longest[f"{name}_ns"] / 1e3 for name in ("api", "caller", "unexplained"))

    def answer(**changed: float | None) -> Answer:
        given = {"api_us": api, "caller_us": caller, "unexplained_us": unexplained}
        return split_the_wait(trace, **(given | changed))

    is_(answer(), "right", "neither prove nor refute")
    is_(answer(caller_us=caller * 1.019), "right")
    is_(answer(caller_us=caller * 1.021), "wrong", "caller_us", "that is not how long the caller was away")
    is_(answer(api_us=None), "open", "api_us")
    is_(answer(api_us=api * 1000), "wrong", "nanoseconds")
    is_(answer(api_us=caller), "wrong", "api_us: that is how long the caller was away")
    is_(answer(caller_us=api), "wrong", "caller_us: that is how long the runtime's call took")
    is_(answer(api_us="2.1"), "wrong", "api_us: '2.1' is no number")  # type: ignore[arg-type]
    is_(answer(unexplained_us=0), "wrong", "The rest went somewhere")
    other = found["caller_ns"].iloc[1] / 1e3
    assert abs(other - caller) > 0.02 * caller, "the longest barrier must be told from another one"
    is_(answer(caller_us=other), "wrong", "of the barrier that took its caller longest")


@pytest.mark.parametrize("seed", SEEDS)
def test_predict_queue_depth(tmp_path: Path, seed: int) -> None:
    trace = made(tmp_path, seed)
    # Nothing of a step of decode begins before the host is through: all its launches wait.
    is_(predict_queue_depth(trace, 0, 8), "right", "its 8 launches own 317 pieces", "8 of them waited at once")
    is_(predict_queue_depth(trace, 0, 7), "wrong", "too few", "who had left?")
    for text in ("8", "eight", 7.5, True, float("nan")):
        is_(predict_queue_depth(trace, 0, text), "wrong", f"{text!r} is no whole number")  # type: ignore[arg-type]
    is_(predict_queue_depth(trace, 0, 6), "wrong", "too few", "who had left?")
    is_(predict_queue_depth(trace, 0, GRAPH_KERNELS + 7), "wrong", "you counted kernels")
    is_(predict_queue_depth(trace, 0, 100), "wrong", "has 8 launches")
    is_(predict_queue_depth(trace, 0, None), "open")
    right = int(queue_depth(of_step(trace, PREFILL)).attrs["max_depth"])
    assert 10 < right < steps(trace)["launches"].iloc[PREFILL] / 2
    is_(predict_queue_depth(trace, PREFILL, right + 1), "right")
    is_(predict_queue_depth(trace, PREFILL, right + 2), "wrong", "too many")
    is_(predict_queue_depth(trace, PREFILL, right - 2), "wrong", "too few")


def test_name_the_limit(trace: Trace) -> None:
    for row, right in ((0, "device-bound"), (PREFILL, "host-bound")):
        assert [bool(name_the_limit(trace, row, label)) for label in LABELS] == [label == right for label in LABELS]
    is_(name_the_limit(trace, 0, None), "open", *LABELS)
    is_(name_the_limit(trace, 0, "gpu-bound"), "wrong", "'gpu-bound' is none of")
    is_(name_the_limit(trace, 0, " Device-bound "), "right")
    is_(name_the_limit(trace, 0, 3), "wrong", "3 is none of")  # type: ignore[arg-type]
    is_(name_the_limit(trace, 0, "waiting"), "wrong", "stood in a wait for 0%")
    is_(name_the_limit(trace, PREFILL, "device-bound"), "wrong", "of its idle time the host was at work")
    is_(name_the_limit(trace, PREFILL, "cannot tell"), "wrong", "that is enough")


def test_a_file_without_the_answer_says_so() -> None:
    hand = HandMade().step(0, 100, 1).frame(10, 30, "a.py(3): f")
    trace = hand.build()
    is_(find_the_barrier(trace, "a.py:3"), "cannot say", "no frame named synchronize_input_prep")
    is_(split_the_wait(trace, api_us=1, caller_us=1, unexplained_us=1), "cannot say", "no barrier")
    is_(predict_queue_depth(trace, 0, 1), "cannot say", "no GPU activity recorded")
    is_(name_the_limit(trace, 0, "cannot tell"), "right", "no GPU activity recorded")
    is_(name_the_limit(trace, 0, "host-bound"), "wrong", "whether there is any device work")


def test_a_barrier_without_its_call_cannot_be_split() -> None:
    hand = HandMade().frame(0, 100, "vllm/runner.py(5): execute_model")
    hand.frame(10, 30, "vllm/runner.py(7): synchronize_input_prep")
    hand.frame(11, 20, "<built-in method synchronize of torch.Event object at 0x1>")
    answer = split_the_wait(hand.build(), api_us=1, caller_us=30, unexplained_us=29)
    is_(answer, "cannot say", "of 1 barrier waits the call of the runtime was not recorded")


# -- the answers come from the analyses: a checker that knew them by heart would not notice ----------------------------


def test_another_file_has_other_answers(tmp_path: Path) -> None:
    a, b = made(tmp_path, 7), made(tmp_path, 8)
    site = syncs(a)["site"].iloc[0]
    assert find_the_barrier(a, site)
    assert not find_the_barrier(b, site)


def test_a_wrong_analysis_is_noticed(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_barrier(of: Trace) -> pd.DataFrame:
        return syncs(of).assign(barrier=False)

    site = syncs(trace)["site"].iloc[0]
    monkeypatch.setattr(trace_exercises, "syncs", no_barrier)
    assert find_the_barrier(trace, site).state == "cannot say"


def test_a_cut_by_time_would_be_noticed(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that section 3 warns of, made by the lesson itself."""

    def by_time(of: Trace, row: int) -> Trace:
        step = steps(of).iloc[row]
        return of.between(int(step["host_start_ns"]), int(step["host_end_ns"]))

    assert predict_queue_depth(trace, 0, 8)
    monkeypatch.setattr(trace_exercises, "of_step", by_time)
    assert not predict_queue_depth(trace, 0, 8)


def test_a_renamed_trace_has_the_same_answers(trace: Trace) -> None:
    renamed = dataclasses.replace(trace, info=dataclasses.replace(trace.info, title="mine", extra={}))
    assert find_the_barrier(renamed, syncs(trace)["site"].iloc[0])
    assert predict_queue_depth(renamed, 0, 8)


# -- real files --------------------------------------------------------------------------------------------------------


def real(name: str) -> Trace:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name}")
    return Trace.load(path, cache=False)


def test_the_public_decode_step() -> None:
    trace = real("02_vllm_v1_decode_fullgraph.json.gz")
    assert two_ways_to_cut(trace)[["its_own", "its_own_inside", "anyone_inside"]].to_numpy().tolist() == [[434, 0, 0]]
    assert find_the_barrier(trace, "gpu_model_runner.py:3087")
    is_(find_the_barrier(trace, "gpu_model_runner.py:3098"), "wrong", "other end")
    assert split_the_wait(trace, api_us=2.2, caller_us=157.0, unexplained_us=154.8)
    assert predict_queue_depth(trace, 0, 14)
    is_(predict_queue_depth(trace, 0, 434), "wrong", "you counted kernels")
    assert name_the_limit(trace, 0, "device-bound")


def test_the_public_eager_step() -> None:
    trace = real("01_vllm_v1_b200_eager.json.gz")
    assert two_ways_to_cut(trace)["its_own_inside"].tolist() == [929]
    assert find_the_barrier(trace, "vllm/v1/worker/gpu_model_runner.py:2711")
    is_(find_the_barrier(trace, "flashinfer.py:664"), "wrong", "did not hold up the host")
    is_(split_the_wait(trace, api_us=1, caller_us=9.2, unexplained_us=1), "cannot say", "call of the runtime")
    assert predict_queue_depth(trace, 0, 2)
    assert name_the_limit(trace, 0, "host-bound")
