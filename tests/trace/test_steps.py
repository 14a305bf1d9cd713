from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mrv2lab.trace import steps as steps_module
from mrv2lab.trace.steps import step_of, steps
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace

DECODE = "execute_context_0(0)_generation_4(4)"


def run_ahead() -> Trace:
    """Two steps. The host is 20 ns into the second when the first one's work begins."""
    small = SmallTrace()
    small.step(0, 100, DECODE)
    copy = {"kind": "memcpy", "nbytes": 64}
    small.launch((10, 12), (120, 124), "Memcpy HtoD (Pinned -> Device)", **copy)
    graph = small.call(20, 40, "cudaGraphLaunch")
    for start in (124, 130, 140):
        small.work(start, start + 10, f"k{start}", correlation=graph)
    small.step(100, 150, DECODE)
    small.launch((110, 112), (150, 156), "Memcpy DtoH (Device -> Pinned)", **copy)
    small.launch((160, 162), (170, 171), "after the steps")
    small.work(1, 2, "from before", correlation=999)
    return small.build()


def check_run_ahead() -> None:
    frame = steps(run_ahead())
    expected = {
        "step": [DECODE, DECODE],
        "source": ["vllm", "vllm"],
        "kind": ["decode", "decode"],
        "context_requests": [0, 0],
        "generation_requests": [4, 4],
        "generation_tokens": [4, 4],
        "lane": ["p 1", "p 1"],
        "host_start_ns": [0, 100],
        "host_end_ns": [100, 150],
        "host_ns": [100, 50],
        "gpu_start_ns": [120, 150],
        "gpu_end_ns": [150, 156],
        "gpu_ns": [30, 6],
        "gpu_busy_ns": [30, 6],  # 4 + 10 + 10 + 10, less the 4 that two kernels share
        "gpu_events": [4, 1],
        "gpu_events_inside": [0, 0],
        "launches": [2, 1],
        "bytes_h2d": [64, 0],
        "bytes_d2h": [0, 64],
    }
    for column, values in expected.items():
        assert frame[column].tolist() == values, column
    assert frame["number"].isna().all()
    assert frame.attrs["source"] == "vllm"
    assert frame.attrs["cannot_say"] == [
        "1 of 7 pieces of device work belong to no step: their launch is not in the file (it came before the profiler "
        "started, or was cut from the file)",
        "1 pieces of device work were launched outside every step",
    ]


def test_device_work_belongs_to_the_step_that_launched_it() -> None:
    check_run_ahead()


def test_a_cut_by_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: device work belongs to whatever the host was doing while it ran."""

    def by_time(trace: Trace, events: np.ndarray) -> np.ndarray:
        ranges = np.flatnonzero(trace.mask("annotation"))
        place = np.searchsorted(trace.start[ranges], trace.start[events], side="right") - 1
        return np.where(trace.start[events] < trace.end[ranges[place]], ranges[place], -1)

    monkeypatch.setattr(steps_module, "callers", by_time)
    with pytest.raises(AssertionError):
        check_run_ahead()


def test_step_of_every_event() -> None:
    trace = run_ahead()
    found = {
        (trace.name_of(event), int(trace.start[event])): step for event, step in enumerate(step_of(trace).tolist())
    }
    assert found == {
        (DECODE, 0): 0,
        ("from before", 1): -1,
        ("cudaLaunchKernel", 10): 0,
        ("cudaGraphLaunch", 20): 0,
        (DECODE, 100): 1,
        ("cudaLaunchKernel", 110): 1,
        ("Memcpy HtoD (Pinned -> Device)", 120): 0,
        ("k124", 124): 0,
        ("k130", 130): 0,
        ("k140", 140): 0,
        ("Memcpy DtoH (Device -> Pinned)", 150): 1,
        ("cudaLaunchKernel", 160): -1,
        ("after the steps", 170): -1,
    }


def test_step_of_counts_rows_of_the_frame_that_it_is_given() -> None:
    trace = run_ahead()
    second = steps(trace).iloc[1:]
    assert step_of(trace, second).max() == 0
    assert [trace.name_of(event) for event in np.flatnonzero(step_of(trace, second) == 0)] == [
        DECODE,
        "cudaLaunchKernel",
        "Memcpy DtoH (Device -> Pinned)",
    ]


def test_any_thread_of_the_process_and_no_other_process() -> None:
    small = SmallTrace()
    small.step(0, 100)
    small.launch((10, 12), (20, 30), "mine", thread="2")
    small.launch((10, 12), (40, 50), "theirs", process="q")
    trace = small.build()
    frame = steps(trace)
    assert frame["gpu_events"].tolist() == [1]
    assert {trace.name_of(event) for event in np.flatnonzero(step_of(trace) == 0)} == {
        "ProfilerStep#1",
        "cudaLaunchKernel",
        "mine",
    }


def test_two_processes_have_steps_of_their_own() -> None:
    small = SmallTrace()
    for process in ("p", "q"):
        small.step(0, 100, process=process)
        small.launch((10, 12), (20, 30), f"of {process}", process=process, device=int(process == "q"))
    trace = small.build()
    assert steps(trace)["gpu_events"].tolist() == [1, 1]
    own = step_of(trace)
    assert own[trace.named(lambda name: name == "of p")] != own[trace.named(lambda name: name == "of q")]


def test_overlapping_steps_of_two_threads_keep_their_own_work() -> None:
    """Pipelined workers: 1 begins, 2 begins, 1 launches, 2 launches."""
    small = SmallTrace()
    small.step(0, 100, "mrv2lab.step#1", thread="1")
    small.step(50, 150, "mrv2lab.step#2", thread="2")
    small.launch((60, 62), (70, 80), "first", thread="1")
    small.launch((90, 92), (95, 99), "second", thread="2")
    small.launch((110, 111), (120, 130), "helper", thread="3")
    trace = small.build()
    assert steps(trace)["number"].tolist() == [1, 2]
    own = {trace.name_of(event): row for event, row in enumerate(step_of(trace)) if trace.kind_of(event) == "kernel"}
    assert own == {"first": 0, "second": 1, "helper": 1}


def test_the_most_telling_source_names_the_steps() -> None:
    small = SmallTrace()
    small.step(0, 100, "ProfilerStep#3")
    small.step(10, 40, DECODE)
    small.step(50, 90, DECODE)
    frame = steps(small.build())
    assert frame["step"].tolist() == [DECODE, DECODE]
    assert frame.attrs["source"] == "vllm"


def test_nested_and_repeated_ranges_of_one_name_are_one_step() -> None:
    small = SmallTrace()
    small.step(0, 100, DECODE)
    small.step(0, 100, DECODE)
    small.step(5, 95, DECODE, thread="2")
    small.step(100, 200, DECODE)
    small.step(150, 210, DECODE)  # crosses: two steps of one name that overlap
    assert steps(small.build())["host_start_ns"].tolist() == [0, 100, 150]


def test_a_range_on_the_device_is_no_step() -> None:
    small = SmallTrace()
    small.host(0, 1, "first")
    small.work(10, 20, DECODE, "gpu_annotation")
    assert len(steps(small.build())) == 0


def test_what_begins_with_a_step_and_outlasts_it_is_not_in_it() -> None:
    small = SmallTrace()
    small.host(0, 300, "main loop")
    small.step(0, 100)
    small.host(90, 110, "crosses the end")
    trace = small.build()
    assert [trace.name_of(event) for event in np.flatnonzero(step_of(trace) == 0)] == [
        "ProfilerStep#1",
        "crosses the end",
    ]


def test_records_on_a_stream_belong_to_the_step_of_their_call() -> None:
    small = SmallTrace()
    small.step(0, 100)
    correlation = small.call(10, 12, "cudaStreamWaitEvent")
    small.work(500, 510, "Stream Wait Event", "sync", correlation=correlation)
    assert step_of(small.build()).tolist() == [0, 0, 0]


def test_a_recording_says_which_step_an_event_is_of() -> None:
    """The output of step 0 is waited for in the range of step 1, and the copy that brings it is launched there."""
    small = SmallTrace()
    batch = {"requests": ["a", "b"], "tokens": 2, "has prefill": False}
    small.host(0, 90, "mrv2lab.step#0", "annotation", "steps", step=0, **batch)
    small.host(
        50, 150, "mrv2lab.step#1", "annotation", "steps", step=1, requests=["a"], tokens=7, **{"has prefill": True}
    )
    small.host(55, 60, "forward", "phase", "host phases", step=1)
    small.host(70, 80, "wait_output", "phase", "host phases", step=0)
    small.host(85, 86, "schedule", "phase", "host phases", step=-1)
    trace = small.build(producer="recording")
    found = {trace.name_of(event): row for event, row in enumerate(step_of(trace).tolist())}
    assert found == {"mrv2lab.step#0": 0, "mrv2lab.step#1": 1, "forward": 1, "wait_output": 0, "schedule": -1}
    columns = ["kind", "context_requests", "context_tokens", "generation_requests", "generation_tokens"]
    assert steps(trace)[columns].values.tolist() == [["decode", 0, 0, 2, 2], ["prefill", 1, 7, 0, 0]]


def test_device_work_drawn_on_a_host_thread_is_device_work() -> None:
    """Old exports and other tools put kernels on rows that do not look like streams."""
    small = SmallTrace()
    small.step(0, 100)
    small.host(50, 60, "launched elsewhere", "kernel")
    assert step_of(small.build()).tolist() == [0, -1]


def test_a_trace_without_steps_says_how_to_get_them() -> None:
    small = SmallTrace()
    small.launch((0, 2), (5, 9))
    trace = small.build()
    frame = steps(trace)
    assert len(frame) == 0
    assert step_of(trace).tolist() == [-1, -1]
    assert list(frame.columns) == list(steps(run_ahead()).columns)
    assert frame.dtypes.to_dict() == steps(run_ahead()).dtypes.to_dict()
    assert frame.attrs["source"] == ""
    assert frame.attrs["cannot_say"][0].startswith("no steps: no range is named by vLLM")


def test_without_a_gpu_the_steps_are_there_and_their_device_half_is_said_to_be_missing() -> None:
    small = SmallTrace()
    small.step(0, 100)
    frame = steps(small.build())
    assert frame.loc[0, ["gpu_start_ns", "gpu_end_ns", "gpu_ns", "gpu_busy_ns", "gpu_events"]].tolist() == [
        -1,
        -1,
        0,
        0,
        0,
    ]
    assert any("no GPU activity recorded" in said for said in frame.attrs["cannot_say"])


def test_a_step_that_never_ended_owns_nothing_and_says_so() -> None:
    small = SmallTrace()
    small.step(0, 0)
    small.launch((5, 6), (8, 9))
    frame = steps(small.build())
    assert frame["launches"].tolist() == [0]
    assert "1 step ranges have no length (never ended?), so nothing belongs to them" in frame.attrs["cannot_say"]


def test_an_empty_trace() -> None:
    trace = SmallTrace().build()
    assert len(steps(trace)) == 0
    assert step_of(trace).tolist() == []


def test_the_frame_survives_parquet_like_dtypes() -> None:
    frame = steps(run_ahead())
    assert frame["number"].dtype == pd.Int64Dtype()
    assert {str(frame[column].dtype) for column in frame if column.endswith("_ns")} == {"int64"}


def test_a_foreign_argument_named_step_is_no_step() -> None:
    small = SmallTrace()
    small.step(0, 100, "mrv2lab.step#1", thread="steps")
    small.host(10, 20, "call", thread="host calls", step=[1])
    small.host(5, 50, "mrv2lab.step#2", "annotation", "steps", step={"a": 1})
    assert step_of(small.build()).tolist() == [0, 1, 1]
