"""A recording as a trace: lanes, kinds, times and arguments, nothing lost and nothing invented."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.observer import WAITS
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import Header, MarkRecord, SpanRecord, StepRecord
from mrv2lab.trace import from_recording as module
from mrv2lab.trace.from_recording import WORK, from_recording
from mrv2lab.trace.links import links, orphans
from mrv2lab.trace.trace import Trace

TRACES = Path(__file__).parents[2] / "traces"


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "mode": "record",
        "runner": "mrv2",
        "device": "NVIDIA H200",
        "modelled": False,
        "config": {"runner": {"transfer": "pinned_copy"}},
        "backend": "triton",
        "tables": {},
        "epoch_host_ns": 1_000_000,
        "epoch_unix_ns": 7,
    }
    return Header(**values | changes)


def mark(kind: str, name: str, time: int, phase: str, stream: str = "main", **more: Any) -> MarkRecord:
    values: dict[str, Any] = {"reads": (), "writes": (), "site": None, "nbytes": 0, "wait_ns": 0} | more
    return MarkRecord(kind, name, stream, time_ns=time, phase=phase, **values)


def one_step() -> StepRecord:
    return StepRecord(
        12,
        decisions=[("budget", "b", 9, 7)],
        req_ids=["a", "b"],
        num_scheduled=np.array([1, 7], np.int32),
        has_prefill=True,
        spans=[
            SpanRecord("schedule", 100, 200),
            SpanRecord("prepare_inputs", 210, 400),
            SpanRecord("prepare_inputs/condense", 220, 240, depth=1),
            SpanRecord("wait_output", 900, 1000),
        ],
        marks=[
            mark("publish", "tmp", 230, "prepare_inputs", "", writes=("tmp",), nbytes=16, site="a.py:1"),
            mark("h2d", "tmp", 250, "prepare_inputs", reads=("tmp",), writes=("ids",), nbytes=16)
            | Times(260, 275),
            mark("kernel", "pos", 300, "prepare_inputs", reads=("ids",), writes=("pos",), nbytes=99) | Times(300, 340),
            mark("replay", "decode", 310, "prepare_inputs") | Times(340, 700),
            mark("run", "checksum", 330, "prepare_inputs", added=True) | Times(700, 710),
            mark("record", "done", 340, "prepare_inputs"),
            mark("wait_event", "done", 350, "prepare_inputs", "copy"),
            mark("d2h", "out", 360, "prepare_inputs", "copy", reads=("sampled",), writes=("out",), nbytes=8)
            | Times(710, 720),
            mark("implicit_sync", "item", 395, "prepare_inputs", wait_ns=20, reads=("pos",)),
            mark("synchronize", "copied", 990, "wait_output", "copy", wait_ns=85, site="b.py:2"),
        ],
    )  # fmt: skip


class Times:
    """``mark | Times(start, end)``: with device times."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __ror__(self, one: MarkRecord) -> MarkRecord:
        one.device_start_ns, one.device_end_ns = self.start, self.end
        return one


def converted(*steps: StepRecord, host: bool = True, **changes: Any) -> Trace:
    return from_recording(Recording(header(**changes), list(steps), title="run"), host=host)


def rows(trace: Trace) -> list[tuple[str, str, int, int, str]]:
    return [
        (trace.name_of(i), trace.kind_of(i), int(trace.start[i]) + 100, int(trace.duration[i]), str(trace.lane_of(i)))
        for i in range(len(trace))
    ]


def only(trace: Trace, name: str, kind: str) -> int:
    (event,) = np.flatnonzero(trace.mask(kind) & trace.named(lambda text: text == name))
    return int(event)


def test_one_step_in_full() -> None:
    trace = converted(one_step())
    assert rows(trace) == [
        ("mrv2lab.step#12", "annotation", 100, 900, "mrv2 steps"),
        ("schedule", "phase", 100, 100, "mrv2 host phases"),
        ("prepare_inputs", "phase", 210, 190, "mrv2 host phases"),
        ("prepare_inputs/condense", "phase", 220, 20, "mrv2 host phases"),
        ("tmp", "runtime", 230, 0, "mrv2 host calls"),
        ("tmp", "runtime", 250, 0, "mrv2 host calls"),
        ("tmp", "memcpy", 260, 15, "stream main"),
        ("pos", "kernel", 300, 40, "stream main"),
        ("pos", "runtime", 300, 0, "mrv2 host calls"),
        ("decode", "runtime", 310, 0, "mrv2 host calls"),
        ("checksum", "runtime", 330, 0, "mrv2 host calls"),
        ("decode", "graph", 340, 360, "stream main"),
        ("done", "event", 340, 0, "mrv2 host calls"),
        ("done", "sync", 350, 0, "mrv2 host calls"),
        ("out", "runtime", 360, 0, "mrv2 host calls"),
        ("item", "sync", 375, 20, "mrv2 host calls"),
        ("checksum", "kernel", 700, 10, "stream main"),
        ("out", "memcpy", 710, 10, "stream copy"),
        ("wait_output", "phase", 900, 100, "mrv2 host phases"),
        ("copied", "sync", 905, 85, "mrv2 host calls"),
    ]
    assert trace.args(0) == {
        "step": 12,
        "requests": ["a", "b"],
        "tokens": 8,
        "tokens of each": [1, 7],
        "has prefill": True,
        "decisions": [{"kind": "budget", "request": "b", "needed": 9, "free": 7}],
        "launched ns": 300,
    }
    common = {"step": 12, "phase": "prepare_inputs"}
    call, copy = (int(event) for event in np.flatnonzero(trace.named(lambda text: text == "tmp"))[1:])
    said = common | {"mark": "h2d", "stream": "main", "reads": ["tmp"], "writes": ["ids"], "nbytes": 16}
    assert trace.args(call) == said
    assert trace.args(copy) == said | {"copy_kind": "HtoD"}
    assert trace.nbytes[[call, copy]].tolist() == [-1, 16]
    assert trace.args(only(trace, "checksum", "kernel")) == common | {"mark": "run", "stream": "main", "added": True}
    assert trace.args(only(trace, "done", "sync")) == common | {
        "mark": "wait_event", "stream": "copy", "device_side": True,
    }  # fmt: skip
    assert trace.args(only(trace, "copied", "sync")) == {
        "mark": "synchronize", "step": 12, "phase": "wait_output", "site": "b.py:2", "stream": "copy",
        "waits for": "output",
    }  # fmt: skip
    assert not trace.problems


def test_every_launch_is_joined_with_its_work() -> None:
    trace = converted(one_step())
    launch = links(trace).launch
    work = np.flatnonzero(launch >= 0)
    assert [(trace.name_of(event), trace.name_of(int(launch[event]))) for event in work] == [
        (name, name) for name in ("tmp", "pos", "decode", "checksum", "out")
    ]
    assert not orphans(trace).any()


def test_the_header_goes_into_the_info() -> None:
    info = converted(one_step()).info
    assert (info.producer, info.title, info.clock, info.origin_ns, info.modelled) == (
        "recording", "run", "host", 1_000_100, False,
    )  # fmt: skip
    extra = {key: info.extra[key] for key in ("runner", "policy", "mode", "device", "epoch_unix_ns")}
    assert extra == {
        "runner": "mrv2", "policy": "pinned_copy", "mode": "record", "device": "NVIDIA H200", "epoch_unix_ns": 7,
    }  # fmt: skip


def test_modelled_times_are_called_so() -> None:
    trace = converted(one_step(), modelled=True)
    assert trace.info.modelled
    assert trace.info.clock == "session"  # a software stream's clock is its own
    assert "stream main (modelled)" in [str(lane) for lane in trace.lanes]


def test_without_the_host_steps_and_device_work_remain() -> None:
    trace = converted(one_step(), host=False)
    assert Counter(trace.kind_of(i) for i in range(len(trace))) == {
        "annotation": 1, "memcpy": 2, "kernel": 2, "graph": 1,
    }  # fmt: skip


def test_device_times_that_nobody_stamped_are_missing_not_invented() -> None:
    step = one_step()
    for one in step.marks:
        one.device_start_ns = one.device_end_ns = -1
    trace = converted(step)
    assert not trace.mask("kernel", "memcpy", "graph", "gpu_annotation").any()
    assert (trace.correlation == -1).all()
    assert [str(problem) for problem in trace.problems] == [
        "launches whose device time nobody stamped (record with device_times='launches') (5x)"
    ]


def test_stamped_phases_stand_in_for_launches() -> None:
    step = one_step()
    for one in step.marks:
        one.device_start_ns = one.device_end_ns = -1
    step.spans[1].device_end_ns = 700
    step.spans.insert(3, SpanRecord("forward", 450, 500, device_end_ns=800))
    step.spans.insert(4, SpanRecord("sample", 810, 820, device_end_ns=805))  # nothing was queued in it
    trace = converted(step)
    assert [row for row in rows(trace) if row[1] == "gpu_annotation"] == [
        ("prepare_inputs", "gpu_annotation", 210, 490, "stream main, phases"),
        ("forward", "gpu_annotation", 700, 100, "stream main, phases"),
    ]
    assert trace.args(only(trace, "forward", "phase"))["device done after ns"] == 300
    assert "only their phases were" in str(trace.problems[0])


def test_paused_steps_and_missing_parts_say_so() -> None:
    step = one_step()
    step.paused = True
    recording = Recording(header(), [step], problems=["the file was cut off"])
    trace = from_recording(recording)
    assert [str(problem) for problem in trace.problems] == [
        "the file was cut off (1x)",
        "steps during which the engine was paused: their times are the reader's, not the engine's (1x)",
    ]
    assert trace.args(0)["paused"] is True


def test_an_empty_recording_and_a_step_without_times() -> None:
    assert len(converted()) == 0
    assert len(converted(StepRecord(1))) == 0


def test_numbers_of_streams() -> None:
    step = one_step()
    step.marks.insert(0, mark("d2h", "early", 205, "schedule", "copy") | Times(205, 206))
    lanes = {lane.thread: lane.stream for lane in converted(step).lanes if lane.role == "stream"}
    assert lanes == {"main": 0, "copy": 1}


# -- recordings of real runs


def agrees(recording: Recording, trace: Trace) -> None:
    """Every span, mark and device time of the recording is in the trace once, by its own clock."""
    marks = [one for step in recording for one in step.marks]
    spans = [one for step in recording for one in step.spans]
    origin = trace.info.origin_ns - recording.header.epoch_host_ns
    assert int(trace.mask("phase").sum()) == len(spans)
    assert sorted((trace.start[trace.mask("phase")] + origin).tolist()) == sorted(span.start_ns for span in spans)
    calls = trace.by_lane(lambda lane: lane.thread == "host calls")
    assert sorted((trace.end[calls] + origin).tolist()) == sorted(one.time_ns for one in marks)
    stamped = [one for one in marks if one.device_end_ns >= 0]
    work = trace.mask("kernel", "memcpy", "graph")
    assert sorted((trace.end[work] + origin).tolist()) == sorted(one.device_end_ns for one in stamped)
    assert sorted((trace.start[work] + origin).tolist()) == sorted(one.device_start_ns for one in stamped)
    waited = trace.mask("sync") & (trace.duration > 0)
    assert int(trace.duration[waited].sum()) == sum(one.wait_ns for one in marks if one.kind in WAITS)
    assert not orphans(trace).any()
    assert Counter(trace.args(int(event))["mark"] for event in np.flatnonzero(calls)) == Counter(m.kind for m in marks)
    assert int(trace.mask("annotation").sum()) == len(recording)


@pytest.mark.parametrize(("name", "on_device"), [("h200_stories", 2977), ("h200_live", 0)])
def test_the_shipped_recordings(name: str, on_device: int) -> None:
    recording = Recording.load(TRACES / f"{name}.mrv2rec")
    trace = Trace.of(recording)
    agrees(recording, trace)
    assert int(trace.mask("kernel", "memcpy").sum()) == on_device
    assert trace.info.clock == "host"


@pytest.fixture(scope="module")
def fresh() -> Recording:
    from mrv2lab.recorder.recorder import Recorder
    from tests.recorder.runs import busy_engine, work

    with busy_engine(transfer="barrier") as engine, Recorder(engine, check_every=4) as recorder:
        work(engine, 12)
    return recorder.recording


def test_a_fresh_recording_of_the_cpu(fresh: Recording) -> None:
    trace = from_recording(fresh)
    agrees(fresh, trace)
    assert trace.info.modelled
    launches = [one for step in fresh for one in step.marks if one.kind in WORK]
    assert int(trace.mask("kernel", "memcpy", "graph").sum()) == len(launches) > 100
    assert any(trace.args(int(event)).get("added") for event in np.flatnonzero(trace.mask("kernel")))


def test_mutant_a_wait_that_begins_at_its_end_is_caught() -> None:
    recording = Recording.load(TRACES / "h200_stories.mrv2rec")
    trace = from_recording(recording)
    shifted = np.where(trace.mask("sync"), trace.duration, 0)
    object.__setattr__(trace, "start", trace.start + shifted)
    with pytest.raises(AssertionError):
        agrees(recording, trace)


def test_mutant_a_lost_copy_is_caught(fresh: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORK", {kind: work for kind, work in WORK.items() if kind != "d2h"})
    with pytest.raises(AssertionError):
        agrees(fresh, from_recording(fresh))


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; from mrv2lab.recording.recording import Recording; from mrv2lab.trace.trace import Trace; "
        f"trace = Trace.of(Recording.load({str(TRACES / 'h200_live.mrv2rec')!r})); "
        "assert len(trace) and not {'torch', 'triton', 'pandas', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
