"""``mrv2lab record`` and ``mrv2lab inspect``, and the function behind the first."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from mrv2lab.engine.workload import burst, steady
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recorder.run import record_run
from tests.recorder.runs import busy_engine
from tests.test_cli import call, fails


def test_a_workload_is_recorded_to_its_end(tmp_path: Path) -> None:
    work = steady(5, every=2, prompt_len=(3, 9), max_tokens=(2, 6))
    with busy_engine() as engine:
        recording = record_run(engine, work, tmp_path / "a.mrv2rec", progress=False)
        assert all(output.finish_reason == "length" for output in engine.requests.values())
        assert not engine.has_work()
    assert len({request.req_id for step in recording.steps for request in step.new}) == 5
    assert recording.verify() == []


def test_a_cut_run_aborts_what_is_left(tmp_path: Path) -> None:
    with busy_engine() as engine:
        recording = record_run(
            engine, burst(3, prompt_len=5, max_tokens=20), tmp_path / "a.mrv2rec", steps=6, progress=False
        )
        assert [output.finish_reason for output in engine.requests.values()] == ["abort"] * 3
    assert len(recording) == 6


def test_record_and_inspect(tmp_path: Path) -> None:
    path = tmp_path / "run.mrv2rec"
    words = ["--out", str(path), "--device", "cpu", "--requests", "4", "--max-tokens", "40", "--num-blocks", "8"]
    result = call("record", *words, "--prompt-len", "14", "--top-k", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{path}: Recording of ")
    meta = json.loads((tmp_path / "run.mrv2rec.meta.json").read_text())
    assert meta["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert {"file", "date", "command", "licence", "device", "machine", "clock"} <= meta.keys()

    found = call("inspect", str(path), "--json")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert (facts["requests"], facts["differences"], facts["complete"]) == (4, [], True)
    assert facts["preemptions"] > 0
    assert facts["checked_steps"] >= 2
    assert "run.mrv2rec" in call("inspect", str(path)).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--requests", "0"], ["num_requests", "0"]),
        (["--transfer", "magic"], ["magic"]),
        (["--workload", "no/such.csv"], ["no/such.csv"]),
        (["--top-k", "-1"], ["top_k", "-1"]),
        (["--steps", "0"], ["steps", "at least 1", "0"]),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, words: list[str], said: list[str]) -> None:
    fails(call("record", "--out", str(tmp_path / "a.mrv2rec"), "--device", "cpu", *words), *said)


def test_what_a_hostile_file_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "[red]a.mrv2rec"
    with busy_engine() as engine, Recorder(engine) as recorder:
        pass
    recording = recorder.recording
    changes = {"device": "[/x] \x1b[31m\x1b]0;mine\x07", "mode": "\u202e[bold]\n"}
    recording.header = dataclasses.replace(recording.header, **changes)
    recording.problems = ["[/red] \x1b[2J"]
    recording.save(path)
    result = call("inspect", str(path))
    assert result.exit_code == 0, result.output
    for said in ("[red]a.mrv2rec", r"[/x] \x1b[31m\x1b]0;mine\x07", r"\u202e[bold]\n", r"[/red] \x1b[2J"):
        assert said in result.stdout
    assert "\x1b" not in result.stdout


def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.mrv2rec"
    path.write_bytes(b"PK nonsense")
    fails(call("inspect", str(path)), "a.mrv2rec")
    fails(call("inspect", str(tmp_path / "gone.mrv2rec")), "gone.mrv2rec")
