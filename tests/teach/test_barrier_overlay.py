"""The pair of profiles in the barrier's lesson: who waits where, live and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the lesson's pictures need plotly")

from mrv2lab.bench import trace_set
from mrv2lab.recorder.side_by_side import Run
from mrv2lab.teach import barrier_lesson
from mrv2lab.teach.barrier_lesson import LATE_MS, RECORDED, late_copies, measured, recorded_pair, waits_a_step
from mrv2lab.trace.steps import steps
from mrv2lab.trace.write import write_perfetto
from tests.steady_clock import steady_clock
from tests.trace.hand_made import HandMade

BARRIER, ELSEWHERE = "in the barrier", "elsewhere"


@pytest.fixture(scope="module")
def pair() -> list[Run]:
    with steady_clock():
        return [late_copies("v1", "barrier", 6), late_copies("mrv2", "pinned_copy", 6)]


def test_the_wait_is_as_long_and_in_another_place(pair: list[Run]) -> None:
    waits = waits_a_step(*pair)
    v1, mrv2 = (waits[run.title] for run in pair)
    assert v1[BARRIER] == pytest.approx(LATE_MS * 1e3, rel=0.1)
    assert mrv2[ELSEWHERE] == pytest.approx(LATE_MS * 1e3, rel=0.1)
    assert mrv2[BARRIER] == 0
    assert v1[ELSEWHERE] < 0.1 * LATE_MS * 1e3


def test_without_late_copies_the_barrier_hardly_waits() -> None:
    with steady_clock():
        waits = waits_a_step(late_copies("v1", "barrier", 6, late_ms=0.01))
    assert waits.loc[BARRIER].item() < 0.02 * LATE_MS * 1e3


def test_as_many_steps_as_asked_for_and_modelled(pair: list[Run]) -> None:
    for run in pair:
        assert run.trace is not None
        assert run.trace.info.modelled
        assert len(steps(run.trace)) == 6
    assert [run.title for run in pair] == ["V1: v1, barrier", "MRV2: mrv2, pinned_copy"]


def test_medians_by_hand() -> None:
    hand = HandMade()
    for number, waited in enumerate((10, 90, 30)):
        begin = 1000 * number
        hand.step(begin, 900, number).frame(begin, 200, "vllm/runner.py(7): synchronize_input_prep")
        hand.call(begin + 1, waited, "cudaEventSynchronize", 1 + number)
        hand.call(begin + 500, 20 * (number == 1), "cudaStreamSynchronize", 11 + number)
    (column,) = waits_a_step(Run("a", {}, hand.build())).to_numpy().T.tolist()
    assert column == [200, 0]  # the barrier as its caller saw it; one wait elsewhere is no median


def test_files_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded_pair(tmp_path) == []
    said = capsys.readouterr().out
    assert "h200_v1_barrier_late.json.gz, h200_mrv2_pinned_copy_late.json.gz" in said
    assert "mrv2lab.bench.trace_set" in said


def test_files_that_are_there_are_read(tmp_path: Path, pair: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    for run, (_, file) in zip(pair, RECORDED.values(), strict=True):
        assert run.trace is not None
        write_perfetto(run.trace, tmp_path / file)
    read = recorded_pair(tmp_path)
    assert [run.title for run in read] == [run.title for run in pair]
    assert waits_a_step(*read).equals(waits_a_step(*pair))
    assert capsys.readouterr().out == ""
    (tmp_path / RECORDED["V1"][1]).unlink()
    assert recorded_pair(tmp_path) == []


def test_the_files_are_those_of_the_set() -> None:
    late = [f"h200_{name}_late.json.gz" for name in trace_set.LATE]
    assert [file for _, file in RECORDED.values()] == late
    assert [settings for settings, _ in RECORDED.values()] == [trace_set.SETTINGS[name] for name in trace_set.LATE]


@pytest.mark.parametrize(("kind", "module"), [("policies", "policy_bench"), ("runners", "runner_bench")])
def test_figures_that_are_missing_are_explained(
    kind: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(barrier_lesson, "newest_result", lambda kind: None)
    assert measured(kind) is None
    said = capsys.readouterr().out
    assert f"mrv2lab.bench.{module} " in said
    assert f"DATE-h200-{kind}.json" in said
