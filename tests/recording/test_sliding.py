"""A run with two KV-cache groups rewinds exactly: the device's tables hold what was appended, nulled or not."""

from __future__ import annotations

import dataclasses

import pytest

from mrv2lab.recording.replay import Replay
from tests.recording import runs
from tests.recording.rewind import complete, differences, way


def test_rewind_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("full_attention", "sliding_attention")
    model = dataclasses.replace(runs.MODEL, num_hidden_layers=2, sliding_window=6, layer_types=kinds)
    monkeypatch.setattr(runs, "MODEL", model)
    run = runs.random_run(60, options=runs.ASYNC)
    assert run.header.tables["block_table.1"] == run.header.tables["block_table.0"]
    replay = Replay(run)
    for index in way(complete(run), "random"):
        assert differences(replay, run, index) == [], f"step {index}"
