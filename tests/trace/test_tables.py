from __future__ import annotations

import pandas as pd

from mrv2lab.trace.tables import copies, kernels, launches
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace


def work() -> Trace:
    small = SmallTrace()
    small.launch((0, 4), (10, 20), "gemm")
    small.launch((4, 10), (20, 40), "gemm", stream=20)
    graph = small.call(10, 30, "cudaGraphLaunch")
    small.work(40, 45, "norm", correlation=graph)
    small.work(45, 60, "gemm", correlation=graph)
    small.work(60, 61, "Memset (Device)", "memset", correlation=graph)
    small.work(100, 105, "norm", correlation=99)
    small.call(30, 31, "cudaStreamIsCapturing")
    copy = {"kind": "memcpy"}
    small.launch((40, 41), (70, 80), "Memcpy HtoD (Pinned -> Device)", nbytes=100, **copy)
    small.launch((41, 42), (80, 90), "Memcpy HtoD (Pinned -> Device)", nbytes=300, **copy)
    small.launch((42, 43), (90, 95), "Memcpy HtoD (Pageable -> Device)", nbytes=-1, **copy)
    small.launch((43, 44), (95, 99), "Memcpy HtoD (Host -> Device)", nbytes=8, **copy)
    small.launch((44, 45), (99, 99), "CopyDeviceToHost", nbytes=4, **copy)
    small.launch((45, 46), (110, 120), "a copy", nbytes=50, copy_kind="DtoH", src="device", dst="pinned", **copy)
    return small.build()


def test_kernels() -> None:
    frame = kernels(work())
    assert frame.drop(columns="share").to_dict("list") == {
        "name": ["gemm", "norm"],
        "calls": [3, 2],
        "total_ns": [45, 10],
        "median_ns": [15.0, 5.0],
        "min_ns": [10, 5],
        "max_ns": [20, 5],
        "streams": [2, 1],
        "in_graphs": [1, 1],
        "orphans": [0, 1],
    }
    assert frame["share"].tolist() == [45 / 55, 10 / 55]


def test_copies() -> None:
    frame = copies(work())
    assert frame.drop(columns="gb_per_s").values.tolist() == [
        ["HtoD", "pinned", "device", 2, 20, 400, 2],
        ["DtoH", "device", "pinned", 1, 10, 50, 1],
        ["HtoD", "unknown", "device", 1, 4, 8, 1],
        ["DtoH", "unknown", "unknown", 1, 0, 4, 1],
        ["HtoD", "pageable", "device", 1, 5, 0, 0],
    ]
    assert [None if pd.isna(one) else one for one in frame["gb_per_s"]] == [20.0, 5.0, 2.0, None, None]
    assert frame.attrs["cannot_say"] == [
        "of 2 copies the file does not say whether the host's memory is pinned or pageable",
        "of 1 copies the size is not recorded: they are missing from bytes and GB/s",
    ]


def test_an_orphan_is_in_no_graph() -> None:
    """Position -1 would be the trace's last event, here a graph's launch."""
    small = SmallTrace()
    small.work(0, 5, "lost", correlation=99)
    graph = small.call(100, 110, "cudaGraphLaunch")
    for start in (90, 95):  # clocks that disagree
        small.work(start, start + 5, "node", correlation=graph)
    assert kernels(small.build()).set_index("name")["in_graphs"].to_dict() == {"node": 2, "lost": 0}


def test_a_copys_name_goes_before_its_arguments() -> None:
    small = SmallTrace()
    small.work(0, 5, "Memcpy HtoD (Host -> Device)", "memcpy", copy_kind="DtoH", src="pageable", dst="pinned")
    assert copies(small.build())[["kind", "source", "target"]].values.tolist() == [["HtoD", "pageable", "device"]]


def test_launches() -> None:
    frame = launches(work())
    assert frame.drop(columns="work_per_launch").values.tolist() == [
        ["cudaGraphLaunch", 1, 1, 20, 20.0, 20, 3, 3, 2],
        ["cudaLaunchKernel", 8, 8, 16, 1.0, 6, 8, 1, 1],
        ["cudaStreamIsCapturing", 1, 0, 1, 1.0, 1, 0, 0, 0],
    ]
    assert [None if pd.isna(one) else one for one in frame["work_per_launch"]] == [3.0, 1.0, None]
    assert frame.attrs["cannot_say"] == [
        "1 pieces of device work have no launch in the file and are counted nowhere here"
    ]


def test_no_device_work_and_no_calls_are_said() -> None:
    small = SmallTrace()
    small.host(0, 1, "op", "op")
    for table in (kernels, copies):
        frame = table(small.build())
        assert len(frame) == 0
        assert list(frame.columns) == list(table(work()).columns)
        assert frame.attrs["cannot_say"][0].startswith("no GPU activity recorded")
    assert launches(small.build()).attrs["cannot_say"] == [
        "no calls of a runtime or driver recorded, so no launches: profile with CPU and CUDA"
    ]
    assert list(launches(small.build()).columns) == list(launches(work()).columns)


def test_whole_graphs_are_said() -> None:
    small = SmallTrace()
    small.launch((0, 1), (5, 50), "graph 3", kind="graph")
    frame = kernels(small.build())
    assert frame["name"].tolist() == ["graph 3"]
    assert any("--cuda-graph-trace=node" in said for said in frame.attrs["cannot_say"])
