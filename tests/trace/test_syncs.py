"""Each kind of wait on a trace of a few events, every figure by hand (microseconds)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2lab.trace import sync_points, syncs
from mrv2lab.trace.sync_kinds import KINDS_OF_WAIT
from mrv2lab.trace.syncs import blocked, blocking, frames
from mrv2lab.trace.trace import Trace
from tests.trace.hand_made import MAIN, OTHER, US, HandMade

EVENT = "<built-in method synchronize of torch.Event object at 0x7f>"
ITEM = "<built-in method item of Tensor object at 0x7f>"
FIGURES = "api_ns frame_ns caller_ns gpu_wait_ns overhead_ns unexplained_ns".split()


def only(trace: Trace) -> dict[str, Any]:
    """The only row, its times in microseconds."""
    table = syncs.syncs(trace)
    assert len(table) == 1, table
    assert set(table["kind"]) <= set(KINDS_OF_WAIT)
    row: dict[str, Any] = table.iloc[0].to_dict()
    return row | {name: row[name] / US if row[name] >= 0 else None for name in [*FIGURES, "start_ns"]}


def figures(row: dict[str, Any]) -> list[float | None]:
    return [row[name] for name in FIGURES]


def test_a_device_sync_with_frames_and_overhead() -> None:
    made = HandMade().call(10, 5, "cudaLaunchKernel", 1).kernel(20, 80, link=1)
    made.frame(30, 100, "me/run.py(3): step").frame(40, 80, "torch/cuda/__init__.py(9): synchronize")
    made.frame(45, 70, "<built-in function _cuda_synchronize>").call(50, 60, "cudaDeviceSynchronize")
    made.overhead(112, 6).step(25, 200, 4)
    row = only(made.build())
    assert figures(row) == [60, 70, 80, 50, 6, 14], "of 80 the call took 60 and overhead 6; the device was busy for 50"
    assert (row["kind"], row["call"], row["start_ns"]) == ("device", "cudaDeviceSynchronize", 50)
    assert (row["site"], row["caller"], row["step"]) == ("me/run.py:3", "step", "mrv2lab.step#4")
    assert row["host_waits"] and not row["barrier"]


def test_overhead_inside_the_call_is_not_subtracted_twice() -> None:
    made = HandMade().frame(0, 100, EVENT).call(10, 50, "cudaEventSynchronize").overhead(40, 40)
    assert figures(only(made.build())) == [50, 100, 100, None, 40, 30]


def test_a_barrier_as_vllm_writes_it() -> None:
    """The call took 2 us, the frame 155, and nothing in the file says what filled the rest."""
    made = HandMade().frame(0, 300, "vllm/v1/worker/gpu_model_runner.py(33): execute_model")
    made.frame(9, 160, "contextlib.py(132): __enter__").frame(9.5, 158, "<built-in function next>")
    made.frame(10, 157, "vllm/v1/worker/gpu_model_runner.py(30): synchronize_input_prep")
    made.frame(11, 155, EVENT).call(14, 2, "hipEventSynchronize", 9).call(200, 5, "hipLaunchKernel", 10)
    trace = made.kernel(400, 10, link=10).build()
    row = only(trace)
    assert figures(row) == [2, 155, 157, None, 0, 155]
    assert (row["kind"], row["api"], row["barrier"]) == ("event", "hipEventSynchronize", True)
    assert row["site"] == "vllm/v1/worker/gpu_model_runner.py:30"
    assert row["caller"] == "execute_model > synchronize_input_prep"
    sentences = " ".join(syncs.syncs(trace).attrs["cannot_say"])
    assert "155.0 us of the 157.0 us" in sentences and "one host thread only" in sentences


def test_a_frame_without_a_call_of_the_runtime() -> None:
    made = HandMade().frame(10, 9, "vllm/v1/worker/gpu_model_runner.py(27): synchronize_input_prep")
    made.frame(12, 3, EVENT).call(50, 1, "cudaLaunchKernel", 1).kernel(60, 5, link=1)
    row = only(made.build())
    assert figures(row) == [None, 3, 9, None, 0, 9]
    assert (row["kind"], row["call"], row["api"]) == ("python frame only", "torch.Event.synchronize", "")
    assert row["barrier"] and row["host_waits"]


def test_nested_frames_without_a_call_are_one_wait() -> None:
    made = HandMade().frame(10, 9, "torch/cuda/streams.py(20): synchronize").frame(12, 3, EVENT)
    row = only(made.build())
    assert (row["frame_ns"], row["caller_ns"], row["start_ns"]) == (3, 9, 12)


def test_the_users_code_ends_what_the_caller_sees() -> None:
    """A subclass of Tensor may run the user's code within a conversion; that is not the wait's machinery."""
    made = HandMade().frame(10, 90, ITEM).frame(12, 80, "me/tensor.py(7): convert").frame(20, 30, EVENT)
    row = only(made.call(25, 20, "cudaEventSynchronize").build())
    assert (row["frame_ns"], row["caller_ns"], row["site"]) == (30, 30, "me/tensor.py:7")


def test_item_is_one_row_with_the_operator_named() -> None:
    made = HandMade().call(5, 2, "cudaLaunchKernel", 1).kernel(10, 70, "k", 1).frame(18, 90, "me/a.py(7): loop")
    made.frame(20, 80, ITEM).op(21, 78, "aten::item").op(22, 70, "aten::_local_scalar_dense")
    made.call(23, 5, "cudaMemcpyAsync", 2).copy(81, 1, "DtoH (Device -> Pinned)", 2)
    made.call(30, 55, "cudaStreamSynchronize", 3)
    row = only(made.build())
    assert (row["kind"], row["call"], row["api"]) == ("item", "aten::item", "cudaStreamSynchronize")
    assert figures(row) == [60, 70, 80, 52, 0, 20], "the copy's stream was busy until 82, and the wait began at 30"
    assert (row["device"], row["stream"], row["site"]) == (0, 7, "me/a.py:7")


def test_nvtx_ranges_of_operators_count_as_operators() -> None:
    made = HandMade().add(20, 60, "aten::item, op_id = 7", "annotation", MAIN)
    made.call(23, 5, "cudaMemcpyAsync_v3020", 2).copy(40, 1, "DtoH (Device -> Pinned)", 2)
    row = only(made.call(30, 20, "cudaStreamSynchronize_v3020", 3).build())
    assert (row["kind"], row["call"], row["api"]) == ("item", "aten::item", "cudaStreamSynchronize")


def test_item_of_a_tensor_of_the_host_is_no_wait() -> None:
    made = HandMade().frame(20, 9, ITEM).op(21, 7, "aten::item").op(22, 5, "aten::_local_scalar_dense")
    table = syncs.syncs(made.call(40, 1, "cudaLaunchKernel").build())
    assert len(table) == 0 and table.attrs["cannot_say"] == []


def test_a_copy_of_pageable_memory_that_blocked() -> None:
    made = HandMade().op(10, 50, "aten::copy_").call(12, 40, "cudaMemcpyAsync", 1)
    row = only(made.copy(20, 30, "HtoD (Pageable -> Device)", 1).build())
    assert (row["kind"], row["call"], row["host_waits"]) == ("implicit copy", "aten::copy_", True)
    assert (row["api_ns"], row["gpu_wait_ns"]) == (40, 38)


def test_a_copy_of_pageable_memory_that_returned_before_it_was_done() -> None:
    made = HandMade().call(12, 5, "cudaMemcpyAsync", 1).copy(16, 3, "HtoD (Pageable -> Device)", 1)
    trace = made.call(30, 5, "cudaMemcpyAsync", 2).copy(40, 3, "HtoD (Pinned -> Device)", 2).build()
    row = only(trace)
    assert (row["kind"], row["host_waits"], row["gpu_wait_ns"]) == ("implicit copy", False, 0)
    assert blocked(trace).total_ns == 0


def test_a_pageable_copy_and_its_stream_sync_are_one_row() -> None:
    made = HandMade().op(10, 60, "aten::to").op(11, 58, "aten::copy_").call(12, 5, "cudaMemcpyAsync", 1)
    made.copy(30, 20, "DtoH (Device -> Pageable)", 1).call(20, 40, "cudaStreamSynchronize", 2)
    trace = made.build()
    row = only(trace)
    assert (row["kind"], row["call"], row["api"]) == ("implicit copy", "aten::to", "cudaStreamSynchronize")
    assert figures(row) == [45, 58, 60, 30, 0, 15]
    assert blocked(trace).total_ns == 40 * US, "the copy's own call was back before the copy was done"


def test_a_synchronous_copy_by_name() -> None:
    row = only(HandMade().call(10, 5, "hipMemcpyWithStream", 1).copy(11, 2, "HtoD (Host -> Device)", 1).build())
    assert (row["kind"], row["call"], row["api_ns"]) == ("implicit copy", "hipMemcpyWithStream", 5)


def test_a_copy_within_the_device_returns_at_once() -> None:
    made = HandMade().call(10, 5, "cudaMemcpy", 1).copy(12, 9, "DtoD (Device -> Device)", 1)
    assert len(syncs.syncs(made.build())) == 0


def test_our_own_phase_is_the_barrier() -> None:
    """As ``profile(engine)`` annotates a run on a GPU."""
    made = HandMade().add(10, 50, "mrv2lab.phase.barrier_wait", "phase", MAIN).call(15, 20, "cudaEventSynchronize")
    table = syncs.syncs(made.call(70, 20, "cudaEventSynchronize").build())
    assert table["barrier"].tolist() == [True, False]


def test_records_say_which_work_was_waited_for() -> None:
    made = HandMade().call(1, 1, "cudaLaunchKernel", 1).kernel(5, 95, link=1, on=20)
    made.call(10, 1, "cudaEventRecord", 32).call(12, 1, "cudaLaunchKernel", 2).kernel(100, 500, link=2, on=20)
    made.call(40, 70, "cudaEventSynchronize", 54)
    made.record(41, 68, "Event Sync", 54, wait_on_stream=20, wait_on_cuda_event_record_corr_id=32, device=0)
    row = only(made.build())
    assert (row["kind"], row["gpu_wait_ns"]) == ("event", 60), (
        "until 100; what was launched behind the event is not its"
    )


def test_a_record_that_names_no_event_leaves_it_open() -> None:
    made = HandMade().call(1, 1, "cudaLaunchKernel", 1).kernel(5, 95, link=1, on=20)
    made.call(40, 70, "cudaEventSynchronize", 54)
    made.record(41, 68, "Event Sync", 54, wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1)
    row = only(made.build())
    assert row["gpu_wait_ns"] is None


def test_a_stream_sync_with_its_record() -> None:
    made = HandMade().call(1, 1, "cudaLaunchKernel", 1).kernel(5, 95, link=1, on=20).kernel(5, 500, on=21)
    made.call(40, 70, "cudaStreamSynchronize", 54).record(41, 68, "Stream Sync", 54, on=20, device=0)
    row = only(made.build())
    assert (row["kind"], row["stream"], row["gpu_wait_ns"]) == ("stream", 20, 60)


def test_records_alone_are_rows() -> None:
    made = HandMade().record(41, 68, "Context Sync", 54).record(200, 2, "Stream Wait Event", 55, on=24)
    table = syncs.syncs(made.record(300, 1, "Strange", 56).build())
    assert table["kind"].tolist() == ["device", "device-side wait"]
    assert table["api_ns"].tolist() == [-1, -1]
    assert table["host_waits"].tolist() == [True, False]
    assert any("'Strange'" in sentence for sentence in table.attrs["cannot_say"])


def test_asking_is_not_waiting() -> None:
    """CUPTI writes an ``Event Sync`` record for ``cudaEventQuery`` as well."""
    made = HandMade().call(10, 5, "cudaEventQuery", 24).record(11, 4, "Event Sync", 24)
    trace = made.call(30, 5, "cudaEventQuery", 25).build()
    row = only(trace)
    assert (row["kind"], row["host_waits"]) == ("event query", False)
    assert blocked(trace).total_ns == 0


def test_a_device_side_wait_is_none_of_the_host() -> None:
    made = HandMade().call(10, 5, "cudaStreamWaitEvent", 3).record(11, 2, "Stream Wait Event", 3, on=24)
    trace = made.build()
    row = only(trace)
    assert (row["kind"], row["stream"], row["host_waits"]) == ("device-side wait", 24, False)
    assert blocked(trace).total_ns == 0


@pytest.mark.parametrize(("until", "waited"), [(70, True), (50, False), (71, False)])
def test_memory_is_a_wait_only_if_the_device_ended_within_the_second_half_of_the_call(until: int, waited: bool) -> None:
    made = HandMade().call(1, 1, "cudaLaunchKernel", 1).kernel(5, until - 5, link=1).call(30, 40, "cudaFree")
    table = syncs.syncs(made.build())
    assert table["kind"].tolist() == ["allocator"] * waited


def test_several_devices_leave_a_device_sync_open() -> None:
    made = HandMade().kernel(5, 30, device=0).kernel(5, 90, device=1).call(10, 100, "cudaDeviceSynchronize")
    assert only(made.build())["gpu_wait_ns"] is None


def test_blocking_is_a_union_over_threads_or_of_one() -> None:
    made = HandMade().call(10, 20, "cudaStreamSynchronize").call(20, 30, "cudaStreamSynchronize", lane=OTHER)
    trace = made.call(90, 5, "cudaStreamWaitEvent").build()
    start, end = np.array([0, 25, 60]) * US, np.array([100, 30, 70]) * US
    assert (blocking(trace, start, end) // US).tolist() == [40, 5, 0]
    assert blocked(trace, trace.lanes.index(OTHER)).total_ns == 30 * US


def test_without_calls_of_the_runtime() -> None:
    said = syncs.syncs(HandMade().op(1, 2, "aten::item").op(5, 2, "aten::mm").build()).attrs["cannot_say"]
    assert len(said) == 1 and "1 operators that read a value" in said[0] and "record with CUDA activities" in said[0]


def test_an_empty_trace() -> None:
    trace = HandMade().build().select(np.empty(0, np.int64))
    table = syncs.syncs(trace)
    assert len(table) == 0 and "cannot_say" in table.attrs and blocked(trace).total_ns == 0
    assert len(frames(trace, "f")) == 0


def unexplained(of: Trace) -> list[list[int]]:
    table = syncs.syncs(of)
    return [
        [int(value) // US if value >= 0 else int(value) for value in row]
        for row in table[["caller_ns", "unexplained_ns", "before_ns", "after_ns"]].to_numpy()
    ]


def waits_in_frames() -> HandMade:
    """A call of 4 us, 10 us after its caller's beginning and 85 us before its end, with 5 us of overhead behind it."""
    made = HandMade().frame(0, 500, "user/app.py(3): run")
    for at in (0, 200):
        made.frame(at, 99, "torch/cuda/streams.py(5): synchronize", MAIN)
        made.call(at + 10, 4, "cudaEventSynchronize", at + 1).overhead(at + 20, 5)
    return made.call(450, 3, "cudaStreamSynchronize", 900)


def test_where_the_unexplained_time_lies() -> None:
    assert unexplained(waits_in_frames().build()) == [[99, 90, 10, 80], [99, 90, 10, 80], [-1, -1, -1, -1]]


def test_sentences_about_one_place_are_one_with_a_count() -> None:
    said = [one for one in syncs.syncs(waits_in_frames().build()).attrs["cannot_say"] if "neither the runtime" in one]
    (sentence,) = said
    assert sentence.startswith(
        "180.0 us of the 198.0 us that cudaEventSynchronize took for its caller at user/app.py:3"
    )
    assert "in 2 calls together are neither the runtime's call (20.0 us before it, 160.0 us after it)" in sentence


def test_mutant_the_wrong_end_of_a_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = syncs._unexplained

    def swapped(*given: Any) -> dict[str, Any]:
        found = real(*given)
        return found | {"before_ns": found["after_ns"], "after_ns": found["before_ns"]}

    monkeypatch.setattr(syncs, "_unexplained", swapped)
    with pytest.raises(AssertionError):
        test_where_the_unexplained_time_lies()


def test_overhead_with_several_threads_is_said_to_be_nobodys() -> None:
    made = HandMade().call(10, 20, "cudaDeviceSynchronize").call(10, 5, "cudaMalloc", lane=OTHER).overhead(15, 5)
    said = " ".join(syncs.syncs(made.build()).attrs["cannot_say"])
    assert "overhead records name no thread" in said


def test_frames_by_function() -> None:
    made = HandMade().frame(10, 20, "a.py(3): copy").frame(40, 90, "a.py(3): copy").overhead(50, 60).overhead(15, 1)
    table = frames(made.frame(200, 5, "b.py(3): copy").frame(210, 5, "a.py(9): copies").build(), "copy")
    assert table.drop(columns="longest_event").to_numpy().tolist() == [
        ["a.py", "copy", 2, 110 * US, 61 * US, 90 * US, 60 * US],
        ["b.py", "copy", 1, 5 * US, 0, 5 * US, 0],
    ]
    assert table.attrs["cannot_say"] == []


def test_frames_that_are_not_there() -> None:
    assert "with_stack=True" in frames(HandMade().build(), "copy").attrs["cannot_say"][0]
    made = HandMade().frame(1, 1, "a.py(1): f")
    assert frames(made.build(), "copy").attrs["cannot_say"] == ["no Python frame of a function named 'copy'"]


# -- deliberate bugs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "bug", "test"),
    [
        (sync_points, "NOT_OF_HOST", frozenset(), test_a_device_side_wait_is_none_of_the_host),
        (sync_points, "READING_OPS", frozenset(), test_item_is_one_row_with_the_operator_named),
        (sync_points, "between", lambda kind, name: True, test_the_users_code_ends_what_the_caller_sees),
        (sync_points, "synchronises", lambda name: False, test_a_frame_without_a_call_of_the_runtime),
        (sync_points.Finder, "_returned_early", lambda *_: False, test_a_pageable_copy_and_its_stream_sync_are_one_row),
        (sync_points, "_recorded_at", lambda trace: {}, test_records_say_which_work_was_waited_for),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mutants_die(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, bug: Any, test: Any) -> None:
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("number", [2**70, -(2**70), 1e300])
def test_an_id_that_no_column_holds_is_none(number: float) -> None:
    made = HandMade().call(0, 2, "cudaStreamSynchronize", 1)
    trace = made.add(0, 2, "Stream Sync", "sync", MAIN, 1, stream=number, device=number, wait_on_stream=number).build()
    row = only(trace)
    assert (row["device"], row["stream"]) == (-1, -1)
