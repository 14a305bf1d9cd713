from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.links import callers, links, orphans
from mrv2lab.trace.trace import DEVICE_KINDS, Lane, TraceInfo
from tests.trace.small_trace import SmallTrace

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.sampled_from(["runtime", "kernel", "memcpy", "memset", "graph", "op", "sync"]),
        st.integers(-1, 4),
    ),
    max_size=20,
)


@given(EVENTS)
def test_links(events: list[tuple[int, str, int]]) -> None:
    builder = TraceBuilder()
    for start, kind, correlation in events:
        builder.add(start, 1, "x", kind, Lane("p", kind), correlation=correlation)
    trace = builder.build(TraceInfo("kineto", "links"))
    ids, kinds = trace.correlation.tolist(), [trace.kind_of(event) for event in range(len(trace))]

    def call(event: int) -> int:
        calls = [one for one in range(len(trace)) if kinds[one] == "runtime" and ids[one] == ids[event] >= 0]
        return max(calls, default=-1)

    launch = [call(event) if kinds[event] in DEVICE_KINDS else -1 for event in range(len(trace))]
    found = links(trace)
    assert found.launch.tolist() == launch
    assert found.work.tolist() == [launch.count(event) for event in range(len(trace))]
    assert orphans(trace).tolist() == [k in DEVICE_KINDS and at < 0 for k, at in zip(kinds, launch, strict=True)]
    assert callers(trace, np.arange(len(trace))).tolist() == [call(event) for event in range(len(trace))]
    assert all(
        found.work_of(event).tolist() == [w for w, at in enumerate(launch) if at == event]
        for event in range(len(trace))
    )


def test_one_graph_launch_owns_many_kernels_and_the_driver_call_inside_a_runtime_call_is_the_launch() -> None:
    small = SmallTrace()
    small.call(0, 10, "cudaGraphLaunch", correlation=5)
    small.call(2, 8, "cuGraphLaunch", correlation=5)
    for start in (20, 30, 40):
        small.work(start, start + 5, correlation=5)
    small.work(50, 55, "lost", correlation=77)
    small.work(60, 65, "without an id")
    trace = small.build()
    assert links(trace).work.tolist() == [0, 3, 0, 0, 0, 0, 0]
    assert links(trace).launch.tolist() == [-1, -1, 1, 1, 1, -1, -1]
    assert [trace.name_of(event) for event in np.flatnonzero(orphans(trace))] == ["lost", "without an id"]


def test_found_once_and_not_shared_between_selections() -> None:
    small = SmallTrace()
    small.launch((0, 2), (5, 9))
    trace = small.build()
    assert links(trace) is links(trace)
    without = trace.select(trace.mask("kernel"))
    assert links(without).launch.tolist() == [-1]
