"""Names of calls, records, frames and operators, in the spellings that files have."""

from __future__ import annotations

import pytest

from mrv2lab.trace.sync_kinds import api_kind, operator, part_of_wait, plain, record_kind, synchronises


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaDeviceSynchronize", "device"),
        ("hipDeviceSynchronize", "device"),
        ("cuCtxSynchronize", "device"),
        ("cudaStreamSynchronize_v3020", "stream"),
        ("cudaStreamSynchronize_ptsz_v7000", "stream"),
        ("cuStreamSynchronize", "stream"),
        ("hipEventSynchronize", "event"),
        ("cudaEventQuery", "event query"),
        ("cudaStreamWaitEvent_v3020", "device-side wait"),
        ("hipStreamWaitEvent", "device-side wait"),
        ("cudaMemcpy", "copy"),
        ("hipMemcpyWithStream", "copy"),
        ("cudaMemcpyAsync_v3020", "async copy"),
        ("cuMemcpyHtoD_v2", "copy"),
        ("cudaMemcpyPeer", None),
        ("cudaFree", "allocator"),
        ("cudaFreeAsync", None),
        ("cudaMalloc", "allocator"),
        ("cudaLaunchKernel", None),
        ("cudaEventRecord", None),
        ("cudaStreamIsCapturing", None),
        ("synchronize", None),
        ("", None),
    ],
)
def test_calls(name: str, kind: str | None) -> None:
    assert api_kind(name) == kind


def test_plain_names() -> None:
    assert plain("cudaMemcpyAsync_v3020") == "cudaMemcpyAsync"
    assert plain("cudaStreamGetCaptureInfo_v2") == "cudaStreamGetCaptureInfo"
    assert plain("hipGraphLaunch") == "hipGraphLaunch"
    assert operator("aten::item, op_id = 317135") == "aten::item"
    assert operator("aten::item") == "aten::item"


@pytest.mark.parametrize(
    ("name", "args", "kind"),
    [
        ("Event Sync", {}, "event"),
        ("Stream Wait Event", {}, "device-side wait"),
        ("Stream Sync", {}, "stream"),
        ("Context Sync", {}, "device"),
        ("unnamed", {"cuda_sync_kind": "Context Sync"}, "device"),
        ("Unknown Sync", {}, None),
    ],
)
def test_records(name: str, args: dict[str, str], kind: str | None) -> None:
    assert record_kind(name, args) == kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("<built-in method synchronize of torch.Event object at 0x7f>", True),
        ("<built-in method synchronize of Stream object at 0x7f>", True),
        ("<built-in function _cuda_synchronize>", True),
        ("torch/cuda/__init__.py(975): synchronize", True),
        ("<built-in method synchronize of Logger object at 0x7f>", False),
        ("me/db.py(3): synchronize", False),
        ("vllm/v1/worker/gpu_model_runner.py(27): synchronize_input_prep", False),
        ("<built-in method item of Tensor object at 0x7f>", False),
    ],
)
def test_frames_that_only_synchronise(name: str, expected: bool) -> None:
    assert synchronises(name) is expected


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("op", "aten::item", True),
        ("annotation", "aten::_local_scalar_dense, op_id = 3", True),
        ("op", "aten::to", True),
        ("op", "aten::mm", False),
        ("python", "<built-in method item of Tensor object at 0x7f>", True),
        ("python", "<built-in method item of numpy.int32 object at 0x7f>", False),
        ("python", "vllm/v1/worker/gpu_model_runner.py(27): synchronize_input_prep", True),
        ("python", "torch/cuda/streams.py(9): wait_stream", True),
        ("python", "torch/nn/modules/module.py(17): _call_impl", False),
        ("python", "me/model.py(17): to", False),
        ("phase", "barrier_wait", False),
    ],
)
def test_parts_of_a_wait(kind: str, name: str, expected: bool) -> None:
    assert part_of_wait(kind, name) is expected
