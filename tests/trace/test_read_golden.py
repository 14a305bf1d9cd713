"""Real traces: counts and times that were measured with other tools. Skipped where the files are not."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from mrv2lab.trace.intervals import union
from mrv2lab.trace.links import links, orphans
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import DEVICE_KINDS, KINDS, Trace
from tests.trace.shared_files import shared_file

COUNTS = {
    "01": {
        "python": 15230,
        "op": 4809,
        "annotation": 3,
        "runtime": 1372,
        "overhead": 9,
        "kernel": 768,
        "memcpy": 161,
        "gpu_annotation": 3,
    },
    "02": {"python": 984, "op": 100, "annotation": 1, "runtime": 20, "kernel": 425, "memcpy": 9},
    "03": {"python": 17038, "op": 642, "annotation": 1, "runtime": 381, "kernel": 413, "memcpy": 10},
    "04": {
        "python": 4262,
        "op": 4186,
        "annotation": 1,
        "runtime": 1922,
        "kernel": 1465,
        "memcpy": 1,
        "memset": 241,
        "gpu_annotation": 1,
        "instant": 2452,
        "other": 1,
    },
    "06": {"op": 6, "runtime": 39, "sync": 5, "kernel": 3, "memset": 3, "instant": 2, "other": 1},
    "07": {"op": 2424, "annotation": 43},
    "09a": {"op": 6, "annotation": 4, "runtime": 5, "kernel": 6, "memcpy": 6, "memset": 6},
    "09b": {"op": 9, "annotation": 3, "runtime": 5, "kernel": 5, "memcpy": 6, "memset": 6},
}


@cache
def real(number: str) -> Trace:
    return load(shared_file(number), cache=False)


@pytest.mark.parametrize("number", COUNTS)
def test_events_by_kind(number: str) -> None:
    trace = real(number)
    assert Counter(KINDS[kind] for kind in trace.kind.tolist()) == COUNTS[number]
    assert trace.problems == ()
    assert trace.info.producer == "kineto"
    assert trace.info.clock == "unix"


def test_01_gpu_span_and_overlap_to_the_nanosecond() -> None:
    trace = real("01").where(*DEVICE_KINDS)
    assert len(trace) == 929
    assert trace.span_ns == 84_487_178
    busy = union(trace.start, trace.end).total_ns
    assert busy == 11_596_482
    assert int(trace.duration.sum()) - busy == 69_278
    assert {str(lane) for lane in trace.lanes} >= {"GPU 0 stream 7"}


def test_01_says_its_devices_versions_and_rank() -> None:
    info = real("01").info
    assert info.devices[0]["name"] == "NVIDIA B200"
    assert (info.rank, info.world_size) == (0, 8)
    assert info.versions["nccl_version"] == "2.27.5"
    assert info.versions["cuda_runtime_version"] == "12090"
    assert info.extra["traceName"].endswith(".json")
    assert info.origin_ns == 1768554939862757064


def test_02_one_graph_launch_owns_421_kernels_on_stream_0() -> None:
    trace = real("02")
    launch = int(links(trace).work.argmax())
    assert int(links(trace).work[launch]) == 421
    assert trace.name_of(launch) == "hipGraphLaunch"
    assert trace.duration[launch] == pytest.approx(506_800, abs=50)
    assert [lane.stream for lane in trace.lanes if lane.role == "stream"] == [0]


def test_03_graph_launches() -> None:
    trace = real("03")
    graphs = trace.named(lambda name: name == "hipGraphLaunch")
    assert (int(graphs.sum()), int(links(trace).work[graphs].max())) == (25, 15)


def test_04_orphans() -> None:
    trace = real("04")
    assert int(trace.mask(*DEVICE_KINDS).sum()) == 1707
    assert int(orphans(trace).sum()) == 509
    step = trace.where("annotation").start[0]
    assert int(trace.where(*DEVICE_KINDS).start[0]) == pytest.approx(int(step) - 274_000, abs=1000)


def test_06_synchronisation_records_stay_out_of_the_streams() -> None:
    trace = real("06")
    assert sorted(lane.stream for lane in trace.lanes if lane.role == "stream") == [20, 24, 28]
    assert {str(trace.lane_of(int(row))) for row in np.flatnonzero(trace.mask("sync"))} == {
        "GPU 0 sync",
        "GPU 0 stream 24 sync",
    }


def test_09_orphans() -> None:
    assert [int(orphans(real(number)).sum()) for number in ("09a", "09b")] == [16, 16]
