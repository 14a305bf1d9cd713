"""What the timeline calls its lanes and steps, and what its module's text loses on the way to the page."""

from __future__ import annotations

import pandas as pd
import pytest

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import Lane, TraceInfo
from mrv2lab.widgets.assets import tight
from mrv2lab.widgets.timeline.slices import slices_of
from tests.widgets.timeline_page import Caught, small_trace, steps_frame


@pytest.mark.parametrize(
    ("lanes", "labels"),
    [
        ([Lane("v1", "steps"), Lane("v1", "host phases")], ["calls · steps", "calls · host phases"]),
        ([Lane("", "thread 851")], ["calls"]),
        (
            [Lane("p", "1", label="python3 7: thread 7 (python3)"), Lane("q", "2", label="p: thread 8")],
            ["calls · 7", "calls · 8"],
        ),
        (
            [Lane("p", "1", label="p: thread 7"), Lane("q", "2", label="q: thread 7")],
            ["calls · p: thread 7", "calls · q: thread 7"],
        ),
        ([Lane("p", "main"), Lane("p", "main calls")], ["calls · p main", "calls · p main calls"]),
        ([Lane("x", "profiler overhead", "other")], ["calls · x profiler overhead"]),
    ],
    ids=["process", "alone", "threads", "equal", "equal without its last word", "no thread"],
)
def test_a_label_begins_with_what_tells_it_from_its_neighbours(lanes: list[Lane], labels: list[str]) -> None:
    builder = TraceBuilder()
    for lane in lanes:
        builder.add(0, 5, "x", "op", lane)
    found = slices_of([builder.build(TraceInfo("t", "t"))], [0]).lanes[: len(lanes)]
    assert [one.label for one in found] == labels
    assert [one.full for one in found] == [f"calls · {lane}" for lane in lanes]


def test_labels_of_streams() -> None:
    def labels(*devices: int, modelled: bool = False) -> list[str]:
        builder = TraceBuilder()
        for device in devices:
            builder.add(0, 5, "k", "kernel", Lane("g", "s", "stream", device, 7, label=f"GPU {device} stream 7"))
        return [lane.label for lane in slices_of([builder.build(TraceInfo("t", "t", modelled=modelled))], [0]).lanes]

    assert labels(3) == ["stream 7"] and labels(3, 4) == ["GPU 3 stream 7", "GPU 4 stream 7"]
    assert labels(3, modelled=True) == ["stream 7 (modelled)"]


def test_a_step_ends_with_its_number() -> None:
    trace = small_trace()
    frame = steps_frame(trace).assign(
        step=["mrv2lab.step#5", "decode", "step 7", "execute_12(3)"], number=pd.array([5, 6, 7, None], "Int64")
    )
    steps = Caught(trace, steps=frame).messages[0][0]["steps"][0]
    assert [row[0] for row in steps] == ["mrv2lab.step#5", "decode #6", "step 7", "execute_12(3)"]


def test_only_spaces_at_punctuation_go() -> None:
    assert tight("if (a < 1 && b) { return [a, b]; }") == "if(a<1&&b){return[a,b];}"
    assert tight('say("a, b = c", d + -1, x ? "" : e);') == 'say("a, b = c",d + -1,x?"":e);'
    for line in (
        "`${a} , b`",
        "a = /x , y/.test(b)",
        "a = '\\' , b",
        'a = "b, c',
        'f("it\'s , so", b)',
        "a = b / c , d",
    ):
        assert tight(line) == line
