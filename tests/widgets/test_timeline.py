"""The timeline's Python side: slices, axis, state, messages, selection, details. No browser."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pandas as pd
import pytest
import traitlets

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.trace import KINDS, Lane, Trace, TraceError, TraceInfo
from mrv2lab.widgets.timeline import Timeline
from mrv2lab.widgets.timeline.palette import LOOKS
from mrv2lab.widgets.timeline.slices import slices_of
from tests.widgets.test_step_explorer import foreign
from tests.widgets.timeline_page import COMPUTE, MAIN, Caught, event_named, random_trace, small_trace, steps_frame

# -- slices


def test_a_thread_becomes_a_lane_a_level_and_streams_come_last() -> None:
    trace = small_trace()
    slices = slices_of([trace], [0])
    assert [(lane.label, int(n)) for lane, n in zip(slices.lanes, np.diff(slices.offsets), strict=True)] == [
        ("annotations", 4),
        ("phases", 4),
        ("Python", 8),
        ("calls", 13),
        ("stream 7", 12),
        ("stream 20", 4),
    ]
    assert sorted(slices.event.tolist()) == list(range(len(trace)))


@pytest.mark.parametrize("shuffled", [False, True])
def test_slices_are_sorted_by_lane_start_and_falling_duration(shuffled: bool) -> None:
    trace = random_trace(2000, lanes=5)
    if shuffled:
        trace = trace.select(np.random.default_rng(1).permutation(2000))
    slices = slices_of([trace], [7])
    for first, last in zip(slices.offsets[:-1], slices.offsets[1:], strict=True):
        start, duration = slices.start[first:last], slices.duration[first:last].astype(np.int64)
        later = np.diff(start) > 0
        assert (later | ((np.diff(start) == 0) & (np.diff(duration) <= 0))).all()
    assert (slices.start.astype(np.int64) == trace.start[slices.event] + 7).all()
    assert (slices.duration == trace.duration[slices.event]).all()


def test_nanoseconds_survive_and_long_durations_fall_back() -> None:
    builder = TraceBuilder()
    builder.add(0, 2**32 - 1, "a", "kernel", COMPUTE)
    builder.add(2**52 + 1, 1, "b", "kernel", COMPUTE)
    slices = slices_of([builder.build(TraceInfo("t", "t"))], [0])
    assert slices.duration.dtype == np.uint32 and slices.start.tolist() == [0.0, 2.0**52 + 1]
    builder = TraceBuilder()
    builder.add(0, 2**32, "a", "kernel", COMPUTE)
    slices = slices_of([builder.build(TraceInfo("t", "t"))], [0])
    assert slices.duration.dtype == np.float64 and slices.duration.tolist() == [2.0**32]


def test_names_are_sent_once_and_only_those_in_use() -> None:
    trace = small_trace()
    slices = slices_of([trace, trace.where("kernel")], [0, 0])
    assert len(slices.names) == len(set(slices.names)) == len(set(trace.names))
    assert slices_of([trace.where("kernel")], [0]).names == ("kernel_0", "kernel_1", "kernel_2")


def test_an_empty_lane_says_why() -> None:
    slices = slices_of([small_trace(device=False)], [0])
    assert [lane.empty for lane in slices.lanes] == ["", "", "", "", "no GPU activity recorded"]
    empty = TraceBuilder().build(TraceInfo("t", "nothing"))
    assert [lane.empty for lane in slices_of([empty], [0]).lanes] == ["no events recorded"]
    assert not any(lane.empty for lane in slices_of([small_trace()], [0]).lanes), "the check must be able to fail"


def test_find_is_the_inverse_of_event() -> None:
    a, b = small_trace(), random_trace(50, lanes=3)
    slices = slices_of([a, b], [0, 5])
    for trace, one in enumerate((a, b)):
        for event in range(len(one)):
            found = slices.find(trace, event)
            assert slices.event[found] == event and slices.lane_of(found).trace == trace
    assert slices.find(0, 10_000) == -1


def test_every_kind_has_a_look_of_its_own() -> None:
    looks = [LOOKS[kind] for kind in KINDS]
    assert len({look.letter for look in looks}) == len(KINDS)
    assert len({(look.hue, look.hatch) for look in looks}) == len(KINDS)


# -- axis


def test_alignments() -> None:
    a, b = small_trace(), small_trace("B", 300)
    late = b.select(b.start >= 10_000)
    assert Caught(a, b).offsets == (0, 0)
    assert Caught(a, late).offsets == (0, -int(late.start.min()))
    assert Caught(a, late, align="first kernel").offsets == (0, 1000 - int(late.where("memcpy").start.min()))
    assert Caught(a, b, align=(5, -7)).offsets == (5, -7)
    frames = [steps_frame(a, range(1, 5)), steps_frame(b)]
    assert Caught(a, b, align="step", steps=frames).offsets == (0, -10_600), "the middle one of steps 1 to 3"
    frames = [steps_frame(a), steps_frame(b, range(100, 104))]
    unlike = Caught(a, b, align="step", steps=frames)
    assert unlike.offsets == (0, 0), "no step in common: the first ones"
    assert unlike.messages[0][0]["note"] == "The runs share no step number: their first steps lie together."
    assert Caught(a, b, align="step", steps=[steps_frame(a), steps_frame(b)]).messages[0][0]["note"] == ""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"align": "end"}, "align='end' is not known: choose one of 'start', 'step', 'first kernel' or offsets"),
        ({"align": (1,)}, r"align=\(1,\) has 1 offset\(s\) for 2 trace\(s\); give one each"),
        ({"align": "step"}, "run A: align='step' needs the steps of each trace"),
        ({"align": "first kernel"}, "cpu: no GPU activity recorded, so align='first kernel' has no moment"),
        ({"titles": ["x"]}, r"titles= has 1 for 2 trace\(s\)"),
        ({"view": (5, 5)}, r"view=\(5, 5\) is no stretch: give \(start_ns, end_ns\)"),
        ({"kinds": ["kernels"]}, "kinds has 'kernels', which is no kind; there are python, op"),
        ({"marks": pd.DataFrame({"start_ns": [1]})}, "marks= lacks the column 'end_ns'"),
        ({"steps": [None, None, None]}, r"steps= has 3 frames for 2 trace\(s\)"),
    ],
)
def test_what_cannot_be_shown_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        Caught(small_trace(), small_trace("cpu", device=False), **options)


def test_one_or_two_traces() -> None:
    with pytest.raises(TraceError, match="one trace or two on one axis, not 0"):
        Caught()
    with pytest.raises(TraceError, match="shows Trace values, not str"):
        Caught("file.json")  # type: ignore[arg-type]
    wrong = pd.DataFrame({"start_ns": [1], "end_ns": [2], "kind": ["race"], "label": ["x"]})
    with pytest.raises(TraceError, match="marks= has the kind 'race': a mark is 'sync' or 'hazard'"):
        Caught(small_trace(), marks=wrong)


# -- messages and state


def test_the_constructor_pushes_once_and_a_reload_gets_it_again() -> None:
    timeline = Caught(small_trace())
    (content, buffers), *more = timeline.messages
    assert more == [] and content["type"] == "data" and timeline.pushed
    assert content["offsets"] == [0, 4, 8, 16, 29, 41, 45] and content["domain"] == [0.0, 39000.0]
    assert len(orjson.loads(buffers[0])) == len(set(small_trace().names))
    assert [len(buffer) for buffer in buffers[1:]] == [45 * 8, 45 * 4, 45 * 2, 45]
    timeline._receive(timeline, {"type": "ready"}, [])
    assert timeline.messages[1][0] == content and timeline.messages[1][1] == buffers


def test_lone_surrogates_in_names_do_not_stop_the_message() -> None:
    builder = TraceBuilder()
    builder.add(0, 5, "bad \ud800 name", "kernel", COMPUTE)
    timeline = Caught(builder.build(TraceInfo("t", "t")))
    assert orjson.loads(timeline.messages[0][1][0]) == ["bad ? name"]
    timeline._receive(timeline, {"type": "details", "id": 0}, [])
    assert orjson.loads(orjson.dumps(timeline.messages[-1][0]))["name"] == "bad ? name"
    assert timeline._repr_mimebundle_()[0]["text/html"].encode()


def test_only_small_named_state_is_saved() -> None:
    two = [Timeline(random_trace(5000)) for _ in range(2)]
    state = two[0].get_state()
    ours = {name: value for name, value in state.items() if name in Timeline.class_own_traits()}
    assert len(ours.pop("channel")) == 32
    assert ours == {
        "selection_ns": None, "kinds": list(KINDS), "hidden_lanes": [], "selected_slice": -1, "pushed": True
    }  # fmt: skip
    assert sum(len(orjson.dumps(one.get_state())) for one in two) < 150_000, (
        "of 300 KB, both instances' modules included"
    )


def test_module_text_is_small_and_reaches_for_nothing() -> None:
    module, style = Timeline._esm, Timeline._css
    assert len(module.encode()) < 60 * 1024
    assert len(style.encode()) < 16_000
    for word in ("import ", "import(", "http://", "https://", "innerHTML", "insertAdjacent", "eval(", "outerHTML"):
        assert word not in module, word
    assert "url(" not in style and "@import" not in style
    assert module.count("export default") == 1
    assert foreign(style) == []


def test_closing_frees_everything_and_twice_is_fine() -> None:
    timeline = Timeline(small_trace())
    timeline.close()
    timeline.close()
    assert timeline.traces == () and len(timeline._slices) == 0 and timeline.comm is None
    assert repr(timeline) == "Timeline (closed)"


@pytest.mark.parametrize("message", [{}, {"type": "details"}, {"type": "details", "id": 99}, {"type": "eval"}, None])
def test_a_message_that_makes_no_sense_is_answered(message: Any) -> None:
    timeline = Caught(small_trace())
    timeline._receive(timeline, message, [])
    assert timeline.messages[-1][0]["type"] == "status" and timeline.messages[-1][0]["text"]


# -- selection


def same(a: Trace, b: Trace) -> bool:
    """The same events."""
    return a.to_frame().equals(b.to_frame())


def test_selection_is_what_the_trace_says_is_between() -> None:
    trace = small_trace()
    timeline = Caught(trace)
    assert same(timeline.selection, trace)
    for start, end in [(0, 10_000), (1_000, 1_001), (700, 700), (39_000, 50_000), (2_000, 12_345)]:
        timeline.selection_ns = (start, end)
        assert same(timeline.selection, trace.between(start, end)), (start, end)
        assert timeline.messages[-1][0]["type"] == "selection"
    timeline.selection_ns = (2_000, 1_000)
    assert timeline.selection_ns == (1_000, 2_000)
    assert not same(timeline.selection, trace), "the check must be able to fail"
    timeline.selection_ns = None
    assert same(timeline.selection, trace)
    timeline.set_state({"selection_ns": [700, 1_000]})  # as the page sends it
    assert timeline.selection_ns == (700, 1_000) and same(timeline.selection, trace.between(700, 1_000))


def test_selection_of_two_traces_is_a_pair_each_in_its_own_time() -> None:
    a, b = small_trace(), small_trace("B", 300)
    timeline = Caught(a, b, align=(0, -10_300))
    timeline.selection_ns = (0, 5_000)
    first, second = timeline.selection
    assert same(first, a.between(0, 5_000)) and same(second, b.between(10_300, 15_300))
    assert timeline.messages[-1][0]["text"] == (
        f"5,000 ns selected, from 0 to 5,000 ns. A: {len(first)} events, B: {len(second)} events; "
        ".selection holds them."
    )


def test_a_stretch_with_nothing_in_it_is_no_count() -> None:
    timeline = Caught(small_trace())
    timeline.selection_ns = (100_000, 100_500)
    assert timeline.messages[-1][0]["text"] == (
        "500 ns selected, from 100,000 to 100,500 ns: nothing that is shown lies in it."
    )


def test_hidden_kinds_and_lanes_are_not_selected() -> None:
    trace = small_trace()
    timeline = Caught(trace, kinds=["kernel", "memcpy", "python"])
    timeline.selection_ns = (0, 10_000)
    assert same(timeline.selection, trace.where("kernel", "memcpy", "python").between(0, 10_000))
    timeline.hidden_lanes = [2, 5]
    assert same(timeline.selection, trace.where("kernel").between(0, 10_000))


def test_selected_is_one_event() -> None:
    trace = small_trace()
    timeline = Caught(trace)
    assert timeline.selected is None
    launch = event_named(trace, "cudaGraphLaunch", 1)
    timeline.select(launch)
    assert timeline.selected is not None and same(timeline.selected, trace.select(np.array([launch])))
    assert timeline.messages[-1][0] == {"type": "show", "start": 9_400, "end": 12_300}
    with pytest.raises(TraceError, match="there is no event 99 in trace 0: it has 45, from 0"):
        timeline.select(99)
    with pytest.raises((traitlets.TraitError, TraceError), match="selected_slice=45 is no slice"):
        timeline.selected_slice = 45


# -- details


def details(timeline: Caught, event: int, trace: int = 0) -> dict[str, Any]:
    """Python's answer about an event."""
    number = timeline._slices.find(trace, event)
    timeline._receive(timeline, {"type": "details", "id": number}, [])
    answer: dict[str, Any] = timeline.messages[-1][0]
    assert answer["type"] == "details" and answer["id"] == number
    return answer


def test_details_of_a_launch_name_its_call_site_and_its_work() -> None:
    trace = small_trace()
    timeline = Caught(trace)
    found = details(timeline, event_named(trace, "cudaGraphLaunch", 1))
    assert dict(found["facts"]) == {
        "start": "10,700 ns",
        "end": "11,000 ns",
        "duration": "300 ns",
        "start on Unix time": "1,700,000,000,000,010,700 ns",
        "kind": "runtime",
        "lane": "python main",
        "correlation": "101",
        "device work": "3 pieces",
    }
    assert found["args"] == [["cbid", "7"]]
    assert found["stack"] == [["runner.py:88", "execute_model"], ["engine.py:12", "step"]]
    assert found["inside"] == [["op", "aten::linear"], ["phase", "forward"], ["annotation", "mrv2lab.step#1"]]
    kernels = [event_named(trace, f"kernel_{k}", 1) for k in range(3)]
    assert [int(timeline._slices.event[number]) for number in found["work"]] == kernels
    assert found["launch"] == -1 and found["missing"] == []


def test_details_of_device_work_go_through_its_launch() -> None:
    trace = small_trace(modelled=True)
    timeline = Caught(trace, small_trace("B"), align=(0, 50))
    found = details(timeline, event_named(trace, "kernel_2", 1))
    assert int(timeline._slices.event[found["launch"]]) == event_named(trace, "cudaGraphLaunch", 1)
    assert found["stack"][0] == ["runner.py:88", "execute_model"]
    facts = dict(found["facts"])
    assert facts["launched by"] == "cudaGraphLaunch" and facts["launch to start"] == "4,300 ns"
    assert facts["times"].startswith("modelled") and facts["trace"] == "A run A"
    facts = dict(details(timeline, event_named(trace, "kernel_2", 1), trace=1)["facts"])
    assert facts["start"] == "15,000 ns" and facts["start on the axis"] == "15,050 ns" and "times" not in facts


def test_details_say_what_the_file_does_not() -> None:
    trace = small_trace()
    timeline = Caught(trace)
    found = details(timeline, event_named(trace, "Memcpy HtoD"))
    assert found["missing"] == [
        "Its launch is not in the file: it happened before the recording, or host calls were not recorded."
    ]
    assert dict(found["facts"])["rate"] == "5.85 GB/s"
    builder = TraceBuilder()
    builder.add(0, 10, "cudaLaunchKernel", "runtime", MAIN, correlation=1)
    found = details(Caught(builder.build(TraceInfo("t", "t"))), 0)
    assert found["missing"] == ["No Python frames around it: record with_stack=True to see the call site."]


def test_nanoseconds_beyond_what_javascript_can_hold_are_exact_text() -> None:
    builder = TraceBuilder()
    builder.add(2**60 + 1, 7, "late", "kernel", Lane("g", "s", "stream", 0, 0))
    trace = builder.build(TraceInfo("t", "t", clock="unix"))
    facts = dict(details(Caught(trace), 0)["facts"])
    assert facts["start on Unix time"] == f"{2**60 + 1:,} ns" == "1,152,921,504,606,846,977 ns"


# -- overlays


def test_marks_lie_on_the_calls_of_their_thread() -> None:
    trace = small_trace()
    marks = pd.DataFrame({"start_ns": [6_000], "end_ns": [8_000], "kind": ["sync"], "label": ["barrier"]})
    timeline = Caught(trace, trace, align=(0, 100), marks=[marks, marks], steps=steps_frame(trace))
    content = timeline.messages[0][0]
    assert content["marks"] == [[6000, 8000, "sync", "barrier", 3], [6100, 8100, "sync", "barrier", 9]]
    assert content["steps"] == [[[f"step {i}", 10_000 * i, 10_000 * i + 9_000] for i in range(4)], []]
    on_stream = marks.assign(lane=[trace.lanes.index(COMPUTE)])
    assert Caught(trace, marks=on_stream).messages[0][0]["marks"][0][4] == 4
    by_text = marks.assign(lane=[str(COMPUTE)])
    assert Caught(trace, marks=by_text).messages[0][0]["marks"][0][4] == 4


def test_what_is_too_much_to_draw_is_said() -> None:
    many = pd.DataFrame({"start_ns": range(20_001), "end_ns": range(20_001), "kind": "sync", "label": "x"})
    content = Caught(small_trace(), marks=many).messages[0][0]
    assert len(content["marks"]) == 20_000
    assert content["note"] == "Not drawn: 1 of 20,001 rows of marks=."
    assert Caught(small_trace(), marks=many[:20_000]).messages[0][0]["note"] == ""


def test_the_difference_lies_on_the_axis() -> None:
    frame = pd.DataFrame({"start_ns": [0], "end_ns": [9000], "delta_ns": [-400], "label": ["step 0"]})
    content = Caught(small_trace(), small_trace(), align=(50, 0), difference=frame).messages[0][0]
    assert content["difference"] == [[50, 9050, -400, "step 0"]]
