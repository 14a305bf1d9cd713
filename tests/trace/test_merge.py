"""Several traces as one value."""

from pathlib import Path

import numpy as np
import orjson
import pytest

from mrv2lab.trace import merge as merge_module
from mrv2lab.trace.align import Alignment, align
from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.links import links
from mrv2lab.trace.merge import merge
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Lane, Trace, TraceError, TraceInfo

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
HOST = Lane("1", "main")


def part(title: str, rank: int, start: int, name: str = "gemm", modelled: bool = False) -> Trace:
    """A step with a launch and its kernel, both with arguments; every trace uses correlation id 5 and device 0."""
    builder = TraceBuilder()
    stream = Lane("GPU", "7", role="stream", device=0, stream=7)
    builder.add(start, 100, "mrv2lab.step#0", "annotation", HOST)
    builder.add(start + 10, 5, "cudaLaunchKernel", "runtime", HOST, correlation=5, arg=builder.arg(b'{"call":1}'))
    arg = builder.arg(orjson.dumps({"of": title}))
    builder.add(start + 40, 30, name, "kernel", stream, correlation=5, arg=arg)
    builder.problem("odd", count=2)
    return builder.build(
        TraceInfo(
            "kineto",
            title,
            path=f"{title}.json",
            clock="unix",
            origin_ns=1_000,
            rank=rank,
            world_size=2,
            devices=({"id": 0, "name": "H200"},),
            modelled=modelled,
            versions={"torch": "2.11", "file": title},
        )
    )


def merged_by(offset: int, *traces: Trace) -> Trace:
    return merge(traces, Alignment((0, offset), "start", None, "by hand"))


def test_all_events_on_the_first_ones_axis_in_order():
    both = merged_by(20, part("a", 0, 0), part("b", 1, 0, "softmax"))
    rows = [(both.name_of(row), str(both.lane_of(row)), int(both.start[row])) for row in range(len(both))]
    assert rows == [
        ("mrv2lab.step#0", "rank 0: 1 main", 0),
        ("cudaLaunchKernel", "rank 0: 1 main", 10),
        ("mrv2lab.step#0", "rank 1: 1 main", 20),
        ("cudaLaunchKernel", "rank 1: 1 main", 30),
        ("gemm", "rank 0: GPU 7", 40),
        ("softmax", "rank 1: GPU 7", 60),
    ]
    assert both.info.origin_ns == 1_000


def test_a_later_trace_may_begin_first():
    both = merged_by(-20, part("a", 0, 0), part("b", 1, 0))
    assert (both.start.tolist(), both.info.origin_ns) == ([0, 10, 20, 30, 40, 60], 980)
    assert both.lane_of(0).rank == 1


def launched_by_own_rank(both: Trace) -> bool:
    found = links(both).launch
    device = both.mask("kernel")
    return bool((found[device] >= 0).all()) and all(
        both.lane_of(int(launch)).rank == both.lane_of(work).rank
        for work, launch in zip(np.flatnonzero(device), found[device], strict=True)
    )


def test_equal_correlation_ids_stay_apart():
    both = merged_by(20, part("a", 0, 0), part("b", 1, 0))
    assert both.correlation.tolist() == [-1, 1, -1, 2, 1, 2]
    assert launched_by_own_rank(both)


def test_a_merge_that_keeps_the_ids_is_noticed(monkeypatch):
    monkeypatch.setattr(merge_module, "_numbered", lambda ids, first: ids)
    assert not launched_by_own_rank(merged_by(20, part("a", 0, 0), part("b", 1, 0)))


def test_arguments_follow_their_events():
    both = merged_by(20, part("a", 0, 0), part("b", 1, 0))
    assert [both.args(row) for row in range(6)] == [{}, {"call": 1}, {}, {"call": 1}, {"of": "a"}, {"of": "b"}]
    again = merge([both, part("c", 2, 0)], Alignment((0, 500), "start", None, ""))
    assert again.args(len(again) - 1) == {"of": "c"}


def test_a_selection_brings_its_arguments():
    a = part("a", 0, 0)
    both = merged_by(20, a.where("kernel"), part("b", 1, 0).where("kernel"))
    assert [both.args(row) for row in range(2)] == [{"of": "a"}, {"of": "b"}]


def test_devices_of_one_number_stay_apart_in_the_steps():
    both = merged_by(20, part("a", 0, 0), part("b", 1, 0))
    assert steps(both)[["gpu_start_ns", "gpu_ns"]].to_numpy().tolist() == [[40, 30], [60, 30]]
    assert both.info.devices == (
        {"id": 0, "name": "H200", "trace": "rank 0", "rank": 0},
        {"id": 0, "name": "H200", "trace": "rank 1", "rank": 1},
    )


@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        ([("a", 0), ("b", 1)], ["rank 0", "rank 1"]),
        ([("a", 0), ("b", 0)], ["a", "b"]),
        ([("a", -1), ("a", -1)], ["0: a", "1: a"]),
    ],
    ids=["ranks", "titles", "numbered titles"],
)
def test_prefixes(parts, prefixes):
    both = merged_by(500, *(part(title, rank, 0) for title, rank in parts))
    assert [both.lane_of(0).process, both.lane_of(5).process] == [f"{prefixes[0]}: 1", f"{prefixes[1]}: GPU"]


def test_what_is_said_about_the_whole():
    both = merged_by(20, part("a", 0, 0), part("b", 1, 0))
    assert (both.info.producer, both.info.title, both.info.clock) == ("merged", "a + b", "unix")
    assert both.info.versions == {"torch": "2.11"}
    assert [one["offset_ns"] for one in both.info.extra["traces"]] == [0, 20]
    assert both.info.extra["alignment"]["method"] == "start"
    assert [str(one) for one in both.problems] == ["rank 0: odd (2x)", "rank 1: odd (2x)"]


def test_modelled_beside_measured_is_said():
    both = merged_by(20, part("a", 0, 0), part("b", 1, 0, modelled=True))
    assert both.info.modelled
    assert "device times of rank 1 are modelled, the others' are measured (1x)" in map(str, both.problems)


def test_bad_arguments():
    with pytest.raises(TraceError, match="0 traces and an alignment of 1"):
        merge([], Alignment((0,), "start", None, ""))
    with pytest.raises(TraceError, match="1 traces and an alignment of 2"):
        merged_by(0, part("a", 0, 0))


def test_real_files_stay_themselves():
    """Every column of both files comes back out of the merged one, and every kernel keeps its launch."""
    if not SHARED.is_dir():
        pytest.skip("no shared traces")
    from mrv2lab.trace.read import load

    names = "02_vllm_v1_decode_fullgraph", "03_vllm_v1_prefilldecode_piecewise"
    parts = [load(SHARED / f"{name}.json.gz", cache=False, progress=False) for name in names]
    both = merge(parts, align(parts, "clock"))
    assert len(both) == sum(len(one) for one in parts)
    assert int((links(both).launch >= 0).sum()) == sum(int((links(one).launch >= 0).sum()) for one in parts)
    for title, one, offset in zip(names, parts, align(parts, "clock").offsets_ns, strict=True):
        back = both.select(both.by_lane(lambda lane, title=title: lane.process.startswith(title)))
        shift = offset + parts[0].info.origin_ns - both.info.origin_ns
        assert sorted((back.start - shift).tolist()) == one.start.tolist()
        assert int(back.duration.sum()) == int(one.duration.sum())
