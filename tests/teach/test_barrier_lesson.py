"""The picture of the barrier's lesson: its rows agree with what V1 queues, and the figure with its rows."""

from __future__ import annotations

import pandas as pd
import pytest

pytest.importorskip("plotly", reason="the pictures need plotly")

from mrv2lab.bench.stand_in import StandIn
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.teach.barrier_pictures import LOOKS, stream_picture, wait_picture
from mrv2lab.teach.stream_times import COPIES, FORWARD, WORK, StreamTimes, typical_steps
from tests.steady_clock import steady_clock


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    with steady_clock(), Engine("tiny", "v1", device="cpu", num_blocks=64, max_num_reqs=4) as engine:
        assert isinstance(engine.rt, CpuRuntime)
        larger = StandIn(engine.rt, 20.0)
        engine.worker.runner.force = lambda ids, sampled: larger.queue()
        engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        for _ in range(4):
            engine.step()
        engine.observer = times = StreamTimes(engine.rt)
        for _ in range(6):
            engine.step()
    return times.frame()


def test_the_event_lies_between_copies_and_forward(frame: pd.DataFrame) -> None:
    events = frame[frame["lane"] == "event"].set_index(["step", "work"])["start_us"]
    stretches = frame[frame["lane"] == "main stream"].set_index(["step", "work"])
    for step in range(1, 4):
        assert events[step, "E"] == stretches.loc[(step, COPIES), "end_us"]
        assert events[step, "E"] <= stretches.loc[(step, FORWARD), "start_us"]
        assert events[step, "C"] > stretches.loc[(step, FORWARD), "end_us"]


def test_the_barrier_is_passed_behind_the_event_of_the_step_before(frame: pd.DataFrame) -> None:
    events = frame[frame["lane"] == "event"].set_index(["step", "work"])["start_us"]
    host = frame[frame["lane"] == "host"].set_index(["step", "work"])
    for step in range(2, 5):
        assert host.loc[(step, "prepare"), "start_us"].min() >= events[step - 1, "E"]
        assert host.loc[(step, "prepare"), "start_us"].min() < events[step - 1, "C"], "the forward is overlapped"
        assert host.loc[(step, "wait for the output"), "end_us"].max() >= events[step, "C"]


def test_the_picture_has_a_look_for_every_work(frame: pd.DataFrame) -> None:
    assert set(WORK) <= set(LOOKS)
    figure = stream_picture(frame, range(1, 4), "a title")
    assert {bar.name for bar in figure.data} <= set(WORK)
    assert all(bar.marker.pattern is not None and bar.orientation == "h" for bar in figure.data)
    labels = [note.text for note in figure.layout.annotations]
    assert {"E<sub>1</sub>", "C<sub>1</sub>", "E<sub>3</sub>", "C<sub>3</sub>"} <= set(labels)
    assert "us" in figure.layout.xaxis.title.text


def test_steps_that_are_not_there(frame: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match=r"no events E and C of steps range\(90, 92\)"):
        stream_picture(frame, range(90, 92), "")


def test_typical_steps_avoid_a_hiccup() -> None:
    ends = [0, 10, 20, 30, 90, 100, 111, 121, 131]  # step 4 takes 60
    rows = [(step, "event", "C", end, end) for step, end in enumerate(ends)]
    rows += [(step, "event", "E", end - 8, end - 8) for step, end in enumerate(ends)]
    made = pd.DataFrame(rows, columns=["step", "lane", "work", "start_us", "end_us"])
    assert typical_steps(made) == range(1, 4)
    assert typical_steps(made[made["step"] > 1]) == range(5, 8)
    with pytest.raises(ValueError, match="no 5 neighbours with events E and C"):
        typical_steps(made[made["step"] > 4], 5)


def test_the_legend_lies_above_the_bars(frame: pd.DataFrame) -> None:
    figure = stream_picture(frame, typical_steps(frame), "a title")
    assert figure.layout.legend.yref == "container"
    assert figure.layout.legend.y < figure.layout.title.y < 1
    assert 0 < (1 - figure.layout.legend.y) * figure.layout.height < figure.layout.margin.t


def test_stream_times_need_a_deferred_stream() -> None:
    rt = CpuRuntime(stream="threaded")
    try:
        with pytest.raises(TypeError, match="deferred software stream, got CpuRuntime"):
            StreamTimes(rt)
    finally:
        rt.close()


def test_wait_picture_adds_up_to_the_step() -> None:
    row = {"case": "host-bound", "runner": "v1", "policy": "barrier", "step_us": 1000.0, "barrier_wait_us": 100.0}
    row |= {"wait_output_us": 300.0, "step_min_us": 900.0, "step_max_us": 1200.0}
    figure = wait_picture(pd.DataFrame([row]), "a title")
    assert [(bar.name, bar.x[0]) for bar in figure.data] == [
        ("wait at the barrier", 0.1),
        ("wait for the output", 0.3),
        ("everything else on the host", 0.6),
    ]
    assert figure.data[-1].error_x.array[0] == pytest.approx(0.2)
