"""Who waits for log-probabilities and penalties: MRV2's host for nothing but a step's output, V1's for the previous
step's tokens as well, which it needs on the host (AS2). By marks, on deferred streams."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check.waits import cause
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog, Mark
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.replay import Replay
from mrv2lab.sample.penalties import Penalties
from mrv2lab.sample.sampler import Sampler
from tests.engine.small import small_engine

STEPS = 10

ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs": {"logprobs": 3},
    "whole vocabulary": {"logprobs": -1},
    "prompt logprobs": {"prompt_logprobs": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "penalties and logprobs": {"frequency_penalty": 0.7, "logprobs": 20},
    "bad words": {"bad_words": ((3, 4), (5,))},
    "masks": {"allowed_token_ids": tuple(range(30)), "min_tokens": 5, "stop_token_ids": (9,), "logit_bias": {3: 1.0}},
    "cuts": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
}
REPAIRED = {"penalties", "penalties and logprobs", "bad words"}
"""Where V1 reads output ids."""


def submit(engine: Engine, asked: dict[str, Any]) -> None:
    for i in range(3):
        params = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.5 * i} | asked
        engine.submit([1 + i, 2, 3], SamplingParams(**params))


def waits(runner: Any, transfer: str, asked: dict[str, Any]) -> list[Counter[str]]:
    """Of each decode step: what its host waited for, output's events by their part behind the dot."""
    log = EventLog()
    with small_engine(runner=runner, transfer=transfer, observer=log, max_logprobs=-1, num_blocks=60) as engine:
        submit(engine, asked)
        for _ in range(3):
            engine.step()
        seen = []
        for _ in range(STEPS):
            log.clear()
            engine.step()
            seen.append(Counter(word(mark) for mark in log.waits()))
    return seen


def word(mark: Mark) -> str:
    return mark.name.rpartition(".")[2] if mark.kind == "synchronize" else mark.kind


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("transfer", ["pinned_copy", "uva_pool", "barrier"])
def test_mrv2_waits_for_its_output_alone(transfer: str, asked: str) -> None:
    barrier = {"prepare_inputs": 1} if transfer == "barrier" else {}
    assert waits("mrv2", transfer, ASKED[asked]) == [Counter({"copied": 1} | barrier)] * STEPS


@pytest.mark.parametrize("asked", ASKED)
def test_v1_waits_for_the_output_repair_too(asked: str) -> None:
    repair = {"output_repair": 1} if asked in REPAIRED else {}
    assert waits("v1", "barrier", ASKED[asked]) == [Counter({"prepare_inputs": 1, "copied": 1} | repair)] * STEPS


def test_prompt_logprobs_make_v1_wait_for_all_of_the_device() -> None:
    """Once a prompt is complete; MRV2 does not."""
    found = {}
    for runner in ("v1", "mrv2"):
        log = EventLog()
        with small_engine(runner=runner, transfer="pinned_copy", observer=log, max_logprobs=-1) as engine:
            submit(engine, ASKED["prompt logprobs"])
            engine.step()
            found[runner] = [mark.name for mark in log.waits()]
    assert found["mrv2"] == []
    assert len(found["v1"]) > 0 and {cause(Mark("synchronize", name)) for name in found["v1"]} == {"explicit"}


@pytest.mark.parametrize("where", ["sampler", "penalties"])
def test_an_item_in_the_sampler_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant reads one number of the device in the middle of sampling."""
    owner: Any = {"sampler": Sampler, "penalties": Penalties}[where]
    method = {"sampler": "sample", "penalties": "count_sampled"}[where]
    original = getattr(owner, method)

    def peeks(self: Any, *args: Any) -> Any:
        made = original(self, *args)
        tensor = args[0] if where == "sampler" else args[1]
        assert isinstance(tensor, torch.Tensor)
        tensor.view(-1)[0].item()
        return made

    monkeypatch.setattr(owner, method, peeks)
    assert all(one["implicit_sync"] == 1 for one in waits("mrv2", "uva_pool", ASKED["penalties and logprobs"]))


@pytest.mark.parametrize("asked", ASKED)
def test_a_recording_verifies_and_replays(asked: str, tmp_path: Path) -> None:
    """Its checksums are the device's, every step; saved, read and replayed to the end, its tables are the engine's."""
    file = tmp_path / "run.mrv2"
    with small_engine(max_logprobs=-1, num_blocks=60) as engine:
        with Recorder(engine, file, check_every=1):
            submit(engine, ASKED[asked])
            for _ in range(3 + STEPS):
                engine.step()
        tables = {name: engine.rt.read(table).numpy().copy() for name, table in engine.worker.runner.tables().items()}
    recording = Recording.load(file)
    assert len(recording) == 3 + STEPS
    assert recording.verify() == []
    assert all(step.checksums for step in recording.steps[:-2])
    replay = Replay(recording)
    replay.seek(len(recording) - 1)
    assert [name for name, table in tables.items() if not np.array_equal(table, replay.tables[name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ASKED)
def test_on_a_gpu_mrv2_synchronises_nowhere(asked: str) -> None:
    with small_engine(device="cuda", max_logprobs=-1, num_blocks=60) as engine:
        submit(engine, ASKED[asked])
        for _ in range(6):
            engine.step()
        with engine.rt.watch_syncs() as seen:
            for _ in range(STEPS):
                engine.step()
        assert seen == []
