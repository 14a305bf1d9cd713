"""The runners' benchmark and its tables in a tiny form on a CPU; no figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrv2lab.bench import runner_bench
from mrv2lab.bench.frames import no_gain, phase_frame, runner_frame
from mrv2lab.bench.runner_bench import Load
from mrv2lab.engine.engine import Engine


def live(engine: Engine) -> list[int]:
    """Tokens so far of every unfinished request."""
    return [len(output.token_ids) for output in engine.requests.values() if not output.finished]


@pytest.mark.parametrize("runner", runner_bench.RUNNERS)
def test_steady_load_outlives_the_measurement(runner: Any) -> None:
    with Engine("tiny", runner, device="cpu", num_blocks=128, max_num_reqs=8) as engine:
        load = Load(engine, 3, 16, "steady", 30)
        assert len(live(engine)) == 3
        before = live(engine)
        figures = runner_bench.host_times(load, 4)
        assert [after - b for after, b in zip(live(engine), before, strict=True)] == [4, 4, 4]
        counts = runner_bench.counts(load, 2)
    assert {"schedule", "update_states", "forward", "wait_output", "step", "runner's own phases"} <= set(figures)
    assert figures["runner's own phases"] < figures["step"]
    assert counts["waits: synchronize"] == (2 if runner == "v1" else 1)
    assert counts["h2d copies"] == counts["h2d_copies"] > 0


def test_one_ends_and_one_comes_in_a_step_of_churn() -> None:
    with Engine("tiny", "v1", device="cpu", num_blocks=128, max_num_reqs=16) as engine:
        load = Load(engine, 4, 16, "churn", 0)
        for _ in range(8):
            load.step()
        finished = []
        for _ in range(10):
            before = sum(output.finished for output in engine.requests.values())
            load.step()
            finished.append(sum(output.finished for output in engine.requests.values()) - before)
        # Whoever comes starts a step after somebody's end was settled: 4 of 5 steps have one here, 64 of 65 there.
        assert sorted(finished) == [0] * 2 + [1] * 8
        assert len(live(engine)) == 4
        assert runner_bench.counts(load, 4)["row_moves"] > 0


@pytest.mark.slow
def test_whole_bench_and_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner_bench, "tqdm", lambda sizes, **kwargs: sizes[:2])
    out = tmp_path / "runners.json"
    runner_bench.main(out, "cpu", 1, 1)
    made = json.loads(out.read_text())
    assert capsys.readouterr().out.strip() == out.read_text().strip()
    assert made["name"] == "runners_cpu"
    figures = made["figures"]
    loads = [("steady", 1), ("steady", 16), ("churn", 1), ("churn", 16)]
    frame = runner_frame(figures)
    assert list(frame.index) == loads
    steady = frame.loc["steady"]
    assert (steady["waits", "v1"] == 2).all()
    assert (steady["waits", "mrv2"] == 1).all()
    assert (frame["row moves", "mrv2"] == 0).all()
    assert set(no_gain(figures)) <= set(loads)
    phases = phase_frame(figures, "churn")
    assert list(phases.columns) == [(1, "v1"), (1, "mrv2"), (16, "v1"), (16, "mrv2")]
    assert list(phases.index[-2:]) == ["runner's own phases", "step"]
    assert not any("/" in phase for phase in phases.index)


def test_no_gain_is_judged_by_the_medians() -> None:
    def part(us: float) -> dict[str, Any]:
        return {"host_us": {"runner's own phases": {"median": us, "max": us + 2, "min": us - 1}}, "a_step": {}}

    figures = {"repeats": 5, "steady 1 v1": part(10), "steady 1 mrv2": part(10)}
    figures |= {"churn 64 v1": part(30), "churn 64 mrv2": part(12)}
    assert no_gain(figures) == [("steady", 1)]
    assert runner_frame(figures)["spread us"].to_numpy().tolist() == [[3, 3], [3, 3]]
