"""The Recording value: growing, showing, refusing to run on, frames; and a real run's file without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.recording import replay
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import RecordingError, StepRecord
from mrv2lab.recording.source import StepSource
from tests.recording.made_up import header, step
from tests.recording.runs import SYNC, random_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def real() -> Recording:
    """Thirty steps of a small engine, preemptions included."""
    run = random_run(30, SYNC, seed=1)
    return Recording(run.header, run.steps, title="real")


def test_it_is_a_list_of_steps_that_grows() -> None:
    recording = Recording(header(), title="run 1")
    assert (len(recording), recording.complete, recording.live) == (0, True, False)
    recording.append(step(5), {7: "seven"})
    recording.append(step(6), {8: "eight"})
    assert [record.step for record in recording] == [5, 6]
    assert recording[1].step == recording[-1].step == 6
    assert recording.texts == {7: "seven", 8: "eight"}


def test_two_recordings_share_nothing() -> None:
    one, other = Recording(header()), Recording(header())
    one.append(step(), {1: "x"})
    one.problems.append("a problem")
    assert (len(other), other.texts, other.problems, other.clock) == (0, {}, [], {})


def test_repr() -> None:
    assert repr(Recording(header(), [step()])) == "Recording of 1 step, mrv2 on NVIDIA H200, mode record"
    made = Recording(header(device="cpu", modelled=True, mode="step"), problems=["cut off after step 3: why"])
    assert repr(made) == "Recording of 0 steps, mrv2 on cpu, mode step, modelled times; cut off after step 3: why"


def test_no_engine_behind_it() -> None:
    with pytest.raises(RuntimeError, match=r"^run 1 is a recording: there is no engine behind it that could run"):
        Recording(header(), title="run 1").advance("step")


def test_the_title_is_the_files_name(tmp_path: Path) -> None:
    Recording(header()).save(tmp_path / "a run.mrv2rec")
    assert Recording.load(tmp_path / "a run.mrv2rec").title == "a run.mrv2rec"


def test_a_save_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.mrv2rec"
    Recording(header(), [step()]).save(path)
    before = path.read_bytes()
    loaded = Recording.load(path)
    loaded.save(path)
    assert path.read_bytes() == before
    loaded.steps[0].rows = loaded.steps[0].rows + 10_000
    with pytest.raises(RecordingError, match="the batch names row"):
        loaded.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# -- a StepSource ------------------------------------------------------------------------------------------------------


def test_views_of_a_loaded_file_are_those_of_the_run(real: Recording, tmp_path: Path) -> None:
    path = tmp_path / "real"
    real.save(path)
    loaded: StepSource = Recording.load(path)
    for index in (0, 29, 7, 8):
        one, other = real.view(index), loaded.view(index)
        assert one.meta == other.meta
        assert one.columns.keys() == other.columns.keys()
        assert all(np.array_equal(one.columns[name], other.columns[name]) for name in one.columns)


@pytest.mark.parametrize("index", [-1, 30])
def test_a_step_that_is_not_there(real: Recording, index: int) -> None:
    with pytest.raises(IndexError, match=rf"step {index} is outside 0\.\.29 of real"):
        real.view(index)


def test_one_replay_until_it_is_closed(real: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(replay.Replay):
        def __init__(self, recording: Any) -> None:
            made.append(recording)
            super().__init__(recording)

    monkeypatch.setattr(replay, "Replay", Counted)
    recording = Recording(real.header, real.steps)
    for index in (3, 2, 9):
        recording.view(index)
    assert made == [recording]
    recording.close()
    recording.view(3)
    assert made == [recording] * 2


def test_verify_says_what_the_replay_says(real: Recording, tmp_path: Path) -> None:
    real.save(tmp_path / "a")
    loaded = Recording.load(tmp_path / "a")
    assert loaded.verify() == []
    loaded[16].checksums = {"total_len": 1}
    problems = loaded.verify()
    assert len(problems) == 1 and "total_len" in problems[0]


def test_a_cut_file_replays_as_far_as_it_goes(real: Recording, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    real.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"chunks/00001/") + 40])
    cut = Recording.load(path)
    assert (len(cut), cut.complete) == (16, False)
    assert cut.view(15).columns.keys() == real.view(15).columns.keys()
    assert cut.verify() == []


def test_a_file_is_stepped_without_torch(real: Recording, tmp_path: Path) -> None:
    real.save(tmp_path / "a.mrv2rec")
    code = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # importing either raises
from mrv2lab.recording.recording import Recording
recording = Recording.load(sys.argv[1])
print(len(recording), recording.view(29).meta["step"], recording.verify())
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.mrv2rec")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stderr == ""
    assert result.stdout == f"30 {real[29].step} []\n"


# -- frames ------------------------------------------------------------------------------------------------------------


def test_spans_frame() -> None:
    frame = Recording(header(), [step(10), step(11)]).spans_frame()
    assert list(frame.columns) == "index step name depth start_ns end_ns device_end_ns added".split()
    assert frame["index"].tolist() == [0, 0, 1, 1]
    assert frame["step"].tolist() == [10, 10, 11, 11]
    assert frame["name"].tolist() == ["forward", "forward/checksum"] * 2
    assert (frame["end_ns"] - frame["start_ns"]).tolist() == [1000, 100] * 2
    assert frame["device_end_ns"].isna().tolist() == [False, True] * 2
    assert frame["device_end_ns"].sum() == 5000, "an unknown time is no number"


def test_marks_frame() -> None:
    frame = Recording(header(), [step(10)]).marks_frame()
    names = (
        "index step kind name phase stream nbytes wait_ns time_ns device_start_ns device_end_ns reads writes site added"
    )
    assert list(frame.columns) == names.split()
    first = frame.iloc[0]
    assert (first["kind"], first["name"], first["reads"], first["writes"]) == ("kernel", "gather", ("a",), ("b", "c"))
    assert (first["time_ns"], first["device_start_ns"], first["device_end_ns"]) == (1100, 1101, 1150)
    assert frame["site"].isna().tolist() == [False, True]
    assert frame.groupby("kind")["nbytes"].sum().to_dict() == {"kernel": 64, "h2d": 256}


def test_frames_of_nothing_have_their_columns() -> None:
    for recording in (Recording(header()), Recording(header(), [StepRecord(0)])):
        assert len(recording.spans_frame()) == len(recording.marks_frame()) == 0
        assert recording.marks_frame()["wait_ns"].dtype == "int64"
        assert str(recording.marks_frame()["device_end_ns"].dtype) == "Int64"
