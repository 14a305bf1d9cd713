"""On a GPU the profiler's trace has the waits that the chokepoints saw."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from mrv2lab.recorder.profile import profile
from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.nesting import parents
from mrv2lab.trace.trace import Lane, Trace, TraceInfo
from tests.recorder.profiled import phase_counts, step_numbers
from tests.recorder.runs import busy_engine, work


def syncs_by_phase(trace: Trace) -> Counter[str]:
    """Calls of cudaEventSynchronize by our phase around them."""
    calls = trace.mask("runtime") & trace.named(lambda name: name.startswith("cudaEventSynchronize"))
    around = parents(trace, calls, trace.mask("phase"))
    return Counter(
        trace.name_of(int(around[i])).removeprefix("mrv2lab.phase.") if around[i] >= 0 else ""
        for i in np.flatnonzero(calls)
    )


def test_syncs_are_counted_by_the_phase_around_them() -> None:
    builder, thread = TraceBuilder(), Lane("python", "thread 7")
    builder.add(0, 100, "mrv2lab.step#3", "annotation", thread)
    builder.add(10, 20, "mrv2lab.phase.barrier_wait", "phase", thread)
    builder.add(12, 5, "cudaEventSynchronize", "runtime", thread)
    builder.add(40, 30, "mrv2lab.phase.forward", "phase", thread)
    builder.add(45, 5, "cudaLaunchKernel", "runtime", thread)
    builder.add(90, 5, "cudaEventSynchronize", "runtime", thread)
    trace = builder.build(TraceInfo("kineto", "synthetic"))
    assert syncs_by_phase(trace) == Counter({"barrier_wait": 1, "": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"runner": "v1"}, {"runner": "mrv2"}, {"runner": "mrv2", "transfer": "barrier"}])
@pytest.mark.parametrize("record", [False, True])
def test_on_a_gpu_the_trace_has_the_waits_of_the_chokepoints(options: dict[str, Any], record: bool) -> None:
    with busy_engine(device="cuda", **options) as engine, profile(engine, warmup=6, record=record) as p:
        work(engine, 24)
    assert p.problems == []
    trace = p.trace
    assert not trace.info.modelled
    assert step_numbers(trace) == [turn.step for turn in p.log.turns if turn.step >= 0]
    assert len(p.log.turns) == 18
    assert phase_counts(trace) == Counter(span.name for span in p.log.spans)
    expected = Counter(wait.phase for wait in p.waits if wait.kind == "synchronize")
    assert expected["wait_output"] > 10
    assert ("barrier_wait" in expected) == (engine.config.runner.transfer == "barrier")
    found = syncs_by_phase(trace)
    found.pop("", None)  # the profile's own ends
    assert found == expected
    copies = trace.mask("memcpy")
    assert int(copies.sum()) >= sum(mark.kind in ("h2d", "d2h") and mark.nbytes > 0 for mark in p.marks)
    assert int(trace.mask("kernel").sum()) > 100
    assert (p.recording is not None) == (record and options["runner"] == "mrv2")
    assert trace.info.extra["mrv2lab"]["config"]["runner"]["runner"] == options["runner"]
