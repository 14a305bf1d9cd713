"""The master invariants on random schedules, and what the host waits for in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mrv2lab.runner.model_runner as model_runner
from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.ops.slot_mapping import slot_mapping
from mrv2lab.protocol import RequestData, SamplingParams
from mrv2lab.state.request_state import RequestState
from tests.runner.invariants import check_invariants, waits_of_a_step
from tests.runner.schedules import MOVES, OPTIONS, Move, drive

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=64,
    eos_token_ids=(7,),
)
SLOTS = {"max_num_reqs": 4, "max_model_len": 48, "block_size": 4}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


options = st.fixed_dictionaries(OPTIONS | {"fused_prepare": st.booleans()})


def play(moves: list[Move], options: dict[str, Any], check: Callable[[Engine], None] = check_invariants) -> None:
    """Do the moves, with a check after each step, then run to the end."""
    with Engine(MODEL, **{"device": "cpu"} | SLOTS | options) as engine:
        drive(engine, moves, check)
        assert len(engine.worker.runner.req_states.free_indices) == 4


@settings(max_examples=30)
@given(MOVES, options)
def test_master_invariants(moves: list[Move], options: dict[str, Any]) -> None:
    play(moves, options)


@pytest.mark.slow
@settings(max_examples=1500)
@given(MOVES, options)
def test_master_invariants_on_many_schedules(moves: list[Move], options: dict[str, Any]) -> None:
    play(moves, options)


# -- invariant 5: the host waits for outputs only ----------------------------------------------------------------------


def waits(policy: str, async_scheduling: bool = True) -> list[list[str]]:
    """Names of the host's waits, one list a step, over a run with arrivals, ends, preemptions and hits."""
    log = EventLog()
    made = []
    with Engine(
        MODEL, device="cpu", observer=log, transfer=policy, num_blocks=14, async_scheduling=async_scheduling, **SLOTS
    ) as engine:
        rng = np.random.default_rng(0)
        for i in range(40):
            if i < 12:
                prompt = [1, 2, 3, 4, *rng.integers(0, 61, 6).tolist()]
                engine.submit(prompt, SamplingParams(max_tokens=16, temperature=0.5 * (i % 2), ignore_eos=i % 3 > 0))
            log.clear()
            engine.step()
            made.append([mark.name for mark in log.waits()])
        assert engine.scheduler.stats.num_preemptions and engine.scheduler.stats.prefix_hit_tokens
    return made


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_a_step_waits_for_its_output_only(policy: str, loop: str) -> None:
    made = waits(policy, loop == "async")
    for names in made:
        assert waits_of_a_step(names, policy) == []
    most = 2 if policy == "barrier" else 1
    assert max(map(len, made)) == most
    assert [len(names) for names in made[5:30]] == [most] * 25


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["pinned_copy", "uva_pool"])
def test_a_step_on_a_gpu_has_no_implicit_sync(policy: str) -> None:
    """As torch's sync debug mode sees it (it misses event.synchronize, the one wait there should be)."""
    with Engine(MODEL, device="cuda", transfer=policy, num_blocks=60, **SLOTS) as engine:
        for i in range(3):
            engine.submit([1 + i, 2, 3], SamplingParams(max_tokens=30, temperature=0.5 * i, ignore_eos=True))
        for _ in range(8):  # kernels are compiled here
            engine.step()
        with engine.rt.watch_syncs() as seen:
            for _ in range(10):
                engine.step()
        assert seen == []


# -- mutants: what the checks find -------------------------------------------------------------------------------------


def test_an_item_in_the_runner_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = model_runner.prepare_inputs

    def mutant(rt: Any, state: RequestState, *rest: Any) -> Any:
        if int(state.total_len.gpu[0].item()) < 0:
            raise AssertionError("never")
        return prepare(rt, state, *rest)

    monkeypatch.setattr(model_runner, "prepare_inputs", mutant)
    found = [name for names in waits("uva_pool") for name in waits_of_a_step(names, "uva_pool")]
    assert set(found) == {"item"} and len(found) >= 30


SCHEDULE: list[Move] = [
    ("submit", 9, 6, 0),
    ("step", 3, 0, 0),
    ("submit", 5, 4, 1),
    ("submit", 14, 8, 2),
    ("step", 3, 0, 0),
    ("preempt", 1, 0, 0),
    ("step", 2, 0, 0),
    ("abort", 0, 0, 0),
    ("submit", 3, 8, 1),
    ("step", 3, 0, 0),
]
PLAIN = {"num_blocks": 60}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_schedule_of_the_mutants_is_fine(device: str) -> None:
    play(SCHEDULE, PLAIN | {"device": device})


def test_a_forgotten_total_len_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token depends on it: the state's own check must find it."""
    add = RequestState.add_request

    def mutant(self: RequestState, request: RequestData) -> int:
        row = add(self, request)
        self.total_len.unstage(row)
        return row

    monkeypatch.setattr(RequestState, "add_request", mutant)
    with pytest.raises(AssertionError, match="<="):
        play(SCHEDULE, PLAIN)


def test_a_stale_slot_tail_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """mrv2.md 4.3 #22: the tail keeps the slots of a larger step. Nothing pads yet, so no token shows it."""
    spec = slot_mapping.spec

    def mutant(*args: Any) -> None:
        slots = args[-2]
        before = slots.copy()
        spec(*args)
        np.copyto(slots, before, where=slots == -1)

    monkeypatch.setattr(slot_mapping, "spec", mutant)
    with pytest.raises(AssertionError, match="stale"):
        play(SCHEDULE, PLAIN)


def test_a_leaked_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = RequestState.remove_request

    def mutant(self: RequestState, req_id: str) -> int:
        row = remove(self, req_id)
        self.free_indices.pop()
        return row

    monkeypatch.setattr(RequestState, "remove_request", mutant)
    with pytest.raises(AssertionError, match="4: rows leaked"):
        play(SCHEDULE, PLAIN)


def test_a_row_freed_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = RequestState.remove_request

    def mutant(self: RequestState, req_id: str) -> int:
        row = remove(self, req_id)
        self.free_indices.append(row)
        return row

    monkeypatch.setattr(RequestState, "remove_request", mutant)
    with pytest.raises(AssertionError, match="4: rows leaked"):
        play(SCHEDULE, PLAIN)


def test_they_are_mrv2s() -> None:
    options: dict[str, Any] = {"max_num_reqs": 2, "max_model_len": 32, "num_blocks": 8}
    with (
        Engine(runner="v1", device="cpu", **options) as engine,
        pytest.raises(
            ValueError, match="invariants of MRV2's rows, and this engine's runner is 'v1'; use runner='mrv2'"
        ),
    ):
        check_invariants(engine)
