from __future__ import annotations

import orjson
import pandas as pd

from mrv2lab.trace.report import report, rows
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace

KEYS_OF_OTHERS = (
    "gpu_span_ns gpu_busy_ns gpu_events same_stream_overlaps orphan_gpu_events max_kernels_per_launch max_queue_depth "
    "syncs steps cannot_say"
).split()
"""What programs outside read."""


def one_step() -> Trace:
    small = SmallTrace()
    small.step(0, 1_000, "execute_context_0(0)_generation_2(2)")
    graph = small.call(10, 50, "cudaGraphLaunch")
    for start in (100, 200, 290):
        small.work(start, start + 100, correlation=graph)
    small.launch((60, 70), (500, 600), "Memcpy DtoH (Device -> Pinned)", kind="memcpy", nbytes=8)
    small.call(80, 650, "cudaStreamSynchronize")
    small.work(700, 710, "lost", correlation=77)
    small.builder.problem("an event without a name", example="<b>x</b>")
    return small.build()


def test_figures() -> None:
    facts = report(one_step())
    assert {key: facts[key] for key in KEYS_OF_OTHERS if not isinstance(facts[key], list)} == {
        "gpu_span_ns": 610,
        "gpu_busy_ns": 400,
        "gpu_events": 5,
        "same_stream_overlaps": 1,
        "orphan_gpu_events": 1,
        "max_kernels_per_launch": 3,
        "max_queue_depth": 2,
    }
    assert facts["same_stream_labels"]["clock noise"] == 1
    assert facts["gaps"] == {"device late": {"count": 1, "ns": 110}, "orphan": {"count": 1, "ns": 100}}
    assert [step["step"] for step in facts["steps"]] == ["execute_context_0(0)_generation_2(2)"]
    assert facts["steps"][0]["number"] is None
    assert [sync["kind"] for sync in facts["syncs"]] == ["stream"]
    assert facts["problems"] == ["an event without a name (1x): <b>x</b>"]
    assert len(facts["cannot_say"]) == len(set(facts["cannot_say"])) > 0
    assert facts["verdict"]["sentence"]


def test_waits_come_by_length_and_the_outside_is_told() -> None:
    small = SmallTrace()
    small.host(0, 100_000, "run")
    small.launch((10, 20), (70_000, 70_100))
    small.call(1_000, 2_000, "cudaEventSynchronize")
    small.call(3_000, 9_000, "cudaEventSynchronize")
    facts = report(small.build())
    assert [sync["api_ns"] for sync in facts["syncs"]] == [6_000, 1_000]
    assert [(row["kind"], row["count"], row["api_ns"], row["caller_ns"]) for row in facts["waits"]] == [
        ("event", 2, 7_000, None)
    ]
    assert facts["outside"] == {"before_ns": 70_000, "after_ns": 29_900, "untold_ns": 69_980}
    assert not facts["cut_off"]


def test_all_values_are_plain() -> None:
    """orjson writes neither NumPy's numbers nor pandas' NA unless it is asked to."""
    for trace in (one_step(), SmallTrace().build()):
        facts = report(trace)
        assert orjson.loads(orjson.dumps(facts)) == facts


def test_without_a_gpu() -> None:
    small = SmallTrace()
    small.host(0, 10, "aten::mm", "op")
    facts = report(small.build())
    assert [facts[key] for key in KEYS_OF_OTHERS[:7]] == [0] * 7
    assert facts["devices"] == []
    assert sum("no GPU activity recorded" in said for said in facts["cannot_say"]) == 1


def test_rows_have_none_for_what_is_missing() -> None:
    first = rows(steps(one_step()))[0]
    assert first["number"] is None
    assert (type(first["host_ns"]), first["host_ns"]) == (int, 1_000)


def test_every_kind_of_missing_value_becomes_none() -> None:
    frame = pd.DataFrame(
        {
            "whole": pd.array([1, None], "Int64"),
            "real": [0.5, float("nan")],
            "text": pd.array(["a", None], "str"),
            "any": [True, None],
        }
    )
    assert rows(frame) == [
        {"whole": 1, "real": 0.5, "text": "a", "any": True},
        {"whole": None, "real": None, "text": None, "any": None},
    ]
