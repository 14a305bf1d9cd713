"""The benchmarks import and their parts run in a tiny form; no figure is judged here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrv2lab.bench import noise_bench, step_bench
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import PHASES


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A benchmark sets the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_preparation_is_what_grows_with_the_requests() -> None:
    assert set(PHASES) > step_bench.PREPARATION_PHASES
    assert {"update_states", "prepare_inputs", "sample"} <= step_bench.PREPARATION_PHASES
    assert not {"forward", "logits"} & step_bench.PREPARATION_PHASES


def test_phase_timer_adds_up_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 5, 10, 17, 20, 21])
    monkeypatch.setattr(step_bench.time, "perf_counter_ns", lambda: next(now))
    timer = step_bench.PhaseTimer()
    for _ in range(2):
        with timer.span("gather"):
            pass
    timer.end_step(30)
    with timer.span("gather"):
        pass
    timer.end_step(4)
    assert timer.steps == [{"gather": 12, "step": 30}, {"gather": 1, "step": 4}]


def test_decodes_are_one_token_a_step() -> None:
    with Engine("tiny", device="cpu", lag=0, num_blocks=64) as engine:
        step_bench.start_decodes(engine, 3, 10, 20, 0.0)
        before = [len(output.token_ids) for output in engine.requests.values()]
        figures = step_bench.time_steps(engine, 4)
        assert [len(output.token_ids) for output in engine.requests.values()] == [n + 4 for n in before]
    assert {"step", "preparation", "schedule", "forward", "sample"} <= set(figures)
    assert all(figure["n"] == 4 for figure in figures.values())
    assert figures["forward"]["median"] < figures["step"]["max"]


def test_step_bench_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    step_bench.main(out, "cpu", 2)
    made = json.loads(out.read_text())
    assert capsys.readouterr().out.strip() == out.read_text().strip()
    assert made["name"] == "step_cpu"
    assert (made["figures"]["requests"], made["figures"]["lag"]) == (8, 0)
    for temperature in (0, 1):
        assert made["figures"][f"temperature_{temperature}_us"]["step"]["n"] == 2


def test_noise_bench_batch() -> None:
    batch = noise_bench.batch(6, 40, device="cpu")
    assert batch["logits"].shape == (6, 40)
    assert sorted(batch["expanded_idx_mapping"].tolist()) == list(range(6))
    assert bool((batch["temperature"] >= 0.3).all())
    tokens, peaks, arguments = noise_bench.outputs(6, 3, device="cpu")
    assert (tokens.shape, peaks.shape, arguments.shape) == ((6,), (6, 3), (6, 3))


def test_noise_bench_writes_what_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for part in ("agreement", "timings", "flat_law"):
        monkeypatch.setattr(noise_bench, part, lambda part=part: {"of": part})
    noise_bench.main(tmp_path / "x.json")
    made = json.loads((tmp_path / "x.json").read_text())
    assert (made["name"], made["machine"]["gpu"]) == ("noise_cuda", "NVIDIA H200")
    assert made["figures"]["rows"] == noise_bench.ROWS
    assert made["figures"]["flat_law"] == {"of": "flat_law"}


def test_noise_bench_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        noise_bench.main(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()
