"""The recorder and the replay together: a run that was only listened to can be rewound to what the device held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.replay import Replay, hash_tables
from mrv2lab.recording.view import step_view
from mrv2lab.runner.model_runner import ModelRunner
from tests.engine.small import MODEL
from tests.recording.runs import ASYNC, SIZES, SYNC, abort, preempt, submit
from tests.slow import mostly_slow


def record(
    num_steps: int, options: dict[str, Any], path: Path | None = None, **how: Any
) -> tuple[Recording, list[str]]:
    """A recording of ``num_steps`` random steps, and the hash of every table on the device after each."""
    rng, live = np.random.default_rng(3), []
    with Engine(MODEL, device="cpu", **SIZES | options) as engine:
        with Recorder(engine, path, **how) as recorder:
            while len(live) < num_steps:
                for move, chance in ((submit, 0.35), (abort, 0.04), (preempt, 0.04)):
                    if rng.random() < chance:
                        move(engine, rng)
                before = engine.core.last_schedule
                engine.step()
                if engine.core.last_schedule is not before:
                    tables = engine.worker.runner.tables()
                    live.append(hash_tables({name: engine.rt.read(t).numpy() for name, t in tables.items()}))
        return recorder.recording, live


@pytest.mark.parametrize(
    "options", mostly_slow([ASYNC, SYNC, ASYNC | {"transfer": "pinned_copy"}], 1), ids=["async", "sync", "pinned"]
)
def test_rewind_is_exact(options: dict[str, Any]) -> None:
    recording, live = record(200, options)
    assert sum(new.resumed for step in recording.steps for new in step.new) > 3
    replay = Replay(recording)
    known = len(recording.steps)
    assert 198 <= known <= 200, "all but what is in flight at the end"
    for order in (range(known), range(known - 1, -1, -1), np.random.default_rng(0).permutation(known).tolist()):
        for index in order:
            replay.seek(index)
            assert replay.state_hash() == live[index], f"step {index}"
    assert recording.verify() == []
    assert sum(bool(step.checksums) for step in recording.steps) >= 11


def test_from_a_file(tmp_path: Path) -> None:
    _, live = record(60, ASYNC, tmp_path / "run.mrv2")
    recording = Recording.load(tmp_path / "run.mrv2")
    replay = Replay(recording)
    for index in np.random.default_rng(0).permutation(len(recording.steps)).tolist():
        replay.seek(index)
        assert replay.state_hash() == live[index]
        assert recording.view(index).meta["diverged"] is None


@pytest.mark.parametrize("table", ["total_len", "block_table.0", "all_token_ids"])
def test_a_recorder_that_drops_a_diff_is_found(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    staged = ModelRunner.staged
    monkeypatch.setattr(
        ModelRunner, "staged", lambda self: {name: d for name, d in staged(self).items() if name != table}
    )
    recording, _ = record(40, SYNC, check_every=4)
    said = recording.verify()
    assert any(f"{table} on the device differs" in sentence for sentence in said)
    assert step_view(Replay(recording), len(recording.steps) - 1).meta["diverged"] in said
