"""Waits, paths and verdicts of real files, in the figures that ``reference/peers.md`` measured."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from mrv2lab.trace.critical_path import critical_path
from mrv2lab.trace.hazards import FOREIGN, hazards
from mrv2lab.trace.read import load
from mrv2lab.trace.steps import steps
from mrv2lab.trace.syncs import blocked, frames, syncs
from mrv2lab.trace.trace import Trace
from mrv2lab.trace.verdict import verdict
from tests.trace.shared_files import shared_file


@cache
def loaded(path: str) -> Trace:
    return load(path, cache=False, progress=False)


def real(prefix: str) -> Trace:
    return loaded(str(shared_file(prefix)))


def row(table: pd.DataFrame, **wanted: object) -> pd.Series:
    chosen = table[np.all([table[name] == value for name, value in wanted.items()], axis=0)]
    assert len(chosen) == 1
    return chosen.iloc[0]


def test_02_the_barrier_takes_2_us_or_157() -> None:
    table = syncs(real("02"))
    barrier = row(table, kind="event", barrier=True)
    assert barrier["call"] == "hipEventSynchronize"
    assert [barrier[name] for name in ("api_ns", "frame_ns", "caller_ns")] == [2_190, 155_249, 156_969]
    assert [barrier[name] for name in ("gpu_wait_ns", "overhead_ns", "unexplained_ns")] == [-1, 0, 154_779]
    assert barrier["site"] == "vllm/v1/worker/gpu_model_runner.py:3087"
    assert barrier["caller"] == "execute_model > synchronize_input_prep"
    said = " ".join(table.attrs["cannot_say"])
    assert "154.8 us of the 157.0 us" in said and "one host thread only" in said


def test_01_the_barrier_has_no_call_of_the_runtime() -> None:
    table = syncs(real("01"))
    barrier = row(table, kind="python frame only")
    assert barrier["call"] == "torch.Event.synchronize"
    assert [barrier[name] for name in ("api_ns", "frame_ns", "caller_ns", "barrier")] == [-1, 3_004, 9_168, True]
    assert table["kind"].value_counts().to_dict() == {
        "implicit copy": 2,
        "device-side wait": 2,
        "python frame only": 1,
    }
    copies = table[table["kind"] == "implicit copy"]
    assert copies["host_waits"].tolist() == [False, False], "both calls were back before their copy was done"
    assert copies["call"].tolist() == ["aten::to"] * 2
    assert copies["site"].tolist() == ["vllm/v1/attention/backends/flashinfer.py:664"] * 2


def test_01_most_of_the_longest_copy_to_gpu_is_the_profiler() -> None:
    copies = row(frames(real("01"), "copy_to_gpu"), file="vllm/v1/utils.py")
    assert [copies[name] for name in ("calls", "total_ns", "longest_ns")] == [9, 1_923_265, 1_693_759]
    assert copies["longest_overhead_ns"] == 1_526_826


@pytest.mark.parametrize(("prefix", "longest"), [("01", 18_734), ("02", 156_969), ("03", 13_740)])
def test_both_ends_of_the_barrier(prefix: str, longest: int) -> None:
    ends = frames(real(prefix), "synchronize_input_prep").iloc[0]
    assert (ends["calls"], ends["longest_ns"]) == (2, longest)


def test_03_names_what_its_copies_do_not_say() -> None:
    table = syncs(real("03"))
    assert row(table, kind="event")[["api_ns", "caller_ns", "barrier"]].tolist() == [4_070, 13_740, True]
    assert any("4 of 10 copies do not say" in sentence for sentence in table.attrs["cannot_say"])


def test_04_device_syncs_and_an_operator_that_reads() -> None:
    table = syncs(real("04"))
    assert table["call"].tolist() == ["cudaDeviceSynchronize", "aten::is_nonzero", "cudaDeviceSynchronize"]
    assert table["caller_ns"].tolist() == [14_163_641, 33_420, 2_223_100]
    assert table["gpu_wait_ns"].tolist() == [14_094_709, 3_773, 2_162_737], "orphans before the window included"
    assert (table["gpu_wait_ns"] <= table["api_ns"]).all()
    assert table["site"].tolist()[1] == "transformers/modeling_attn_mask_utils.py:243"


def test_06_synchronisation_records() -> None:
    table = syncs(real("06"))
    assert table["kind"].tolist() == ["event query", "event query", "device-side wait", "event query", "device"]
    assert table["call"].tolist()[2:] == ["cudaStreamWaitEvent", "cudaEventQuery", "cudaDeviceSynchronize"]
    assert table["gpu_wait_ns"].tolist() == [-1, 0, -1, 0, 7_000]
    assert table["stream"].tolist() == [-1, -1, 24, -1, -1]
    assert blocked(real("06")).total_ns == 20_000


def test_07_says_that_it_cannot_say() -> None:
    table = syncs(real("07"))
    assert len(table) == 0 and "10 operators that read a value" in table.attrs["cannot_say"][0]


def test_10_the_host_was_blocked_for_428_6_of_960_5_ms() -> None:
    trace = real("10")
    table = syncs(trace)
    assert blocked(trace).total_ns == 428_616_499
    streams = table[table["api"] == "cudaStreamSynchronize"]
    assert len(streams) == 8 and streams["host_waits"].all()
    assert streams["kind"].value_counts().to_dict() == {"item": 4, "implicit copy": 4}
    assert (streams.nlargest(2, "gpu_wait_ns")["gpu_wait_ns"] // 1000).tolist() == [428_445, 428_409]
    waits = table[table["kind"] == "device-side wait"]
    assert len(waits) == 236 and not waits["host_waits"].any()
    assert sum(trace.duration[waits["event"]]) // 1000 == 542


@pytest.mark.parametrize("prefix", ["01", "02", "03", "04", "06", "07", "09a", "09b", "10"])
def test_every_path_adds_up(prefix: str) -> None:
    trace = real(prefix)
    for step in [None, *range(len(steps(trace)))]:
        path = critical_path(trace, step)
        start, end = path["start_ns"].to_numpy(), path["end_ns"].to_numpy()
        assert (start[1:] == end[:-1]).all() and (path["duration_ns"] > 0).all()
        assert path["duration_ns"].sum() == end[-1] - start[0]


def test_paths_lead_through_host_or_device() -> None:
    by_resource = critical_path(real("01"), 0).groupby("resource")["duration_ns"].sum()
    assert by_resource.sum() == 87_128_842
    assert by_resource["host"] + by_resource["launch"] > 0.99 * by_resource.sum()
    graph = critical_path(real("02"), 0)
    device = graph[graph["resource"] == "device"]
    assert len(device) > 420, "the kernels of the graph are on the path"
    assert device["duration_ns"].sum() == 10_674_517


@pytest.mark.parametrize(
    ("prefix", "label"),
    [
        ("01", "host-bound"),
        ("02", "device-bound"),
        ("03", "device-bound"),
        ("04", "device-bound"),
        ("06", "cannot tell"),
        ("07", "cannot tell"),
        ("09a", "cannot tell"),
        ("10", "device-bound"),
    ],
)
def test_verdicts(prefix: str, label: str) -> None:
    assert verdict(real(prefix)).label == label


def test_sentences() -> None:
    assert str(verdict(real("01"))) == (
        "Host-bound: the device worked 13.7% of the 84.5 ms from its first work to its last; of 72.9 ms idle, 97% "
        "while the launching thread was at work, 3% while the work was launched already; at most 2 launches waited in "
        "a queue. Outside of that lie 2.6 ms of the trace before it and 0.3 ms after it."
    )
    assert str(verdict(real("02"))) == (
        "Device-bound: the device worked 99.8% of the 10.7 ms from its first work to its last; the host kept it fed, "
        "which is healthy. Outside of that lie 8.4 ms of the trace before it and 0.0 ms after it; 7.8 ms of them are "
        "between the launch of the first work and its start: whether the device was busy with what is not in the trace "
        "cannot be told."
    )
    assert "98% of that with copies alone" in str(verdict(real("10")))


def test_foreign_traces_have_no_hazards_and_say_why() -> None:
    for prefix in ("01", "10"):
        table = hazards(real(prefix))
        assert len(table) == 0 and table.attrs["cannot_say"] == [FOREIGN]
