"""Dummy runs go through ``execute_model`` and leave nothing behind, whoever is in the rows."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

import mrv2lab.runner.dummy as dummy
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runner.dummy import fabricate
from mrv2lab.state import BlockTables
from tests.engine.small import small_engine
from tests.slow import mostly_slow

INPUTS = ("input_ids", "positions", "seq_lens", "idx_mapping", "query_start_loc", "logits_indices", "slot_mappings")
"""What a step fills anew, and reads nothing of from the step before."""
SHAPES = ((1, 1), (4, 4), (3, 2), (40, 1), (64, 4), (17, None))
GRAPHS = {"cudagraph_mode": "full_and_piecewise", "progress": False}


def digest(engine: Engine) -> dict[str, str]:
    """Hashes of every table that is state, of the KV cache and of the host's tables."""
    engine.rt.synchronize()
    runner, raw = engine.worker.runner, engine.rt.raw
    tables = {
        name: raw(table)
        for name, table in runner.tables().items()
        if not name.startswith(("input_block_table", *INPUTS))
    }
    for layer, pair in enumerate(engine.worker.kv_caches):
        tables |= {f"{kind}.{layer}": raw(cache) for kind, cache in zip("kv", pair, strict=True)}
    host = runner.host_tables() | {"num_computed_tokens_np": runner.req_states.num_computed_tokens_np}
    found = {name: hashlib.sha256(table.cpu().numpy().tobytes()).hexdigest() for name, table in tables.items()}
    found |= {f"host {name}": hashlib.sha256(table.tobytes()).hexdigest() for name, table in host.items()}
    states = runner.req_states
    return found | {"rows": repr((states.free_indices, states.req_id_to_index, states.index_to_req_id))}


def run(engine: Engine, dummies: bool, look: bool = True) -> list[list[int]]:
    """Requests that come and go; dummy runs in front of every step, and a look at everything around them."""
    params = [
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, seed=4, ignore_eos=True, prompt_logprobs=1),
    ]
    ids = [engine.submit([1 + i, 2, 3, 4, 5][: 2 + i], one) for i, one in enumerate(params * 2)]
    step = 0
    while engine.has_work():
        if dummies:
            before = digest(engine) if look else {}
            engine.worker.runner.dummy_run(*SHAPES[step % len(SHAPES)])
            assert not look or digest(engine) == before
            step += 1
        engine.step()
    return [engine.output(req_id).token_ids for req_id in ids]


WAYS = [
    ("deferred", "barrier", GRAPHS),
    ("threaded", "uva_pool", GRAPHS | {"fused_prepare": True}),
    ("deferred", "pinned_copy", {}),
    ("threaded", "barrier", {}),
    ("deferred", "uva_pool", {}),
    ("deferred", "uva_pool", GRAPHS),
    ("threaded", "pinned_copy", GRAPHS),
    ("threaded", "uva_pool", {}),
]


@pytest.mark.parametrize(("stream", "transfer", "graphs"), mostly_slow(WAYS, 4))
def test_nothing_is_left_behind(stream: str, transfer: str, graphs: dict[str, Any]) -> None:
    options = {"stream": stream, "transfer": transfer, "num_blocks": 9} | graphs
    with small_engine(**options) as engine:
        wanted = run(engine, dummies=False)
    with small_engine(**options) as engine:
        assert run(engine, dummies=True) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_nothing_is_left_behind_on_a_gpu(graphs: dict[str, Any]) -> None:
    with small_engine(device="cuda", num_blocks=9, **graphs) as engine:
        wanted = run(engine, dummies=False)
    with small_engine(device="cuda", num_blocks=9, **graphs) as engine:
        assert run(engine, dummies=True) == wanted


def test_a_dummy_decode_replays_the_graph_of_its_shape() -> None:
    with small_engine(**GRAPHS) as engine:
        log = EventLog()
        engine.worker.runner.dummy_run(3, 3)
        engine.rt.observer = log
        decision = engine.worker.runner.forward_pass.dispatch(fabricate(3, 3, max_num_reqs=4, max_model_len=48))
        assert decision.padded_reqs == 4
        assert log.gauges == [("graph_tokens", 4)]
        assert not engine.worker.runner.graphs.stats.recent, "a dummy run is no step"


def test_an_observer_is_not_told_and_the_latest_batch_stays() -> None:
    log = EventLog()
    with small_engine(observer=log) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        batch = engine.worker.runner.batch
        log.clear()
        engine.worker.runner.dummy_run(5, 2)
        assert not (log.spans or log.marks or log.gauges)
        assert engine.worker.runner.batch is batch and engine.rt.observer is log


def test_a_recording_is_not_disturbed() -> None:
    def recorded(dummies: bool) -> Any:
        with small_engine() as engine, Recorder(engine) as recorder:
            run(engine, dummies, look=False)
        assert recorder.recording is not None
        return recorder.recording

    one, other = recorded(False), recorded(True)
    assert [step.sampled for step in one.steps] == [step.sampled for step in other.steps]
    # The first step of all publishes the penalties' tables, which the dummy run in front of it has published already.
    assert [len(step.marks) for step in one.steps[1:]] == [len(step.marks) for step in other.steps[1:]]


# -- the fabricated batch ----------------------------------------------------------------------------------------------


def test_tokens_are_dealt_evenly() -> None:
    host = fabricate(8, 3, max_num_reqs=5, max_model_len=9)
    assert host.num_scheduled_tokens.tolist() == [2, 3, 3]
    assert host.query_start_loc.tolist() == [0, 2, 5, 8, 8, 8]
    assert host.rows.tolist() == [-1, -1, -1] and host.num_logits == 3 and host.has_prefill
    assert fabricate(8, 3, max_num_reqs=5, max_model_len=9, context=99).seq_lens_upper_bound.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("tokens", "reqs", "words"),
    [
        (0, 1, "1 to max_num_batched_tokens = 2048"),
        (2049, 4, "1 to max_num_batched_tokens"),
        (3, 4, "1 to 3 requests, got 4"),
        (6, 5, "1 to 4 requests, got 5"),
        (6, 0, "got 0"),
        (97, 2, "spread them over 3 requests"),
    ],
)
def test_impossible_batches_are_refused(tokens: int, reqs: int, words: str) -> None:
    with small_engine() as engine:
        with pytest.raises(ValueError, match=words):
            engine.worker.runner.dummy_run(tokens, reqs)
        assert engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0].finished


def test_between_the_two_calls_of_a_step_it_is_refused() -> None:
    with small_engine(async_scheduling=False) as engine:
        runner = engine.worker.runner
        runner._forwarded = object()
        with pytest.raises(RuntimeError, match="before sample_tokens"):
            runner.dummy_run(2, 2)


# -- mutants -----------------------------------------------------------------------------------------------------------


def _write_slot_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding goes to slot 0 rather than nowhere."""
    compute = BlockTables.compute_slot_mappings

    def mutant(self: BlockTables, *args: Any) -> torch.Tensor:
        slots = compute(self, *args)
        if "test.slot_0" not in self.rt._functions:
            self.rt.register("test.slot_0", lambda slots: slots.clamp_(min=0))
        self.rt.run("test.slot_0", slots, writes=(slots,))
        return slots

    monkeypatch.setattr(BlockTables, "compute_slot_mappings", mutant)


def _somebodys_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's requests take the rows of the highest one's owner."""
    monkeypatch.setattr(dummy, "NOBODY", 3)


def _sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's mirror is advanced for nobody too."""
    execute = dummy.fabricate

    def mutant(*args: Any, **options: Any) -> Any:
        host = execute(*args, **options)
        for state in STATES:
            state.num_computed_tokens_np[host.rows] += host.num_scheduled_tokens
        return host

    monkeypatch.setattr(dummy, "fabricate", mutant)


STATES: list[Any] = []


@pytest.mark.parametrize("mutant", [_write_slot_0, _somebodys_row, _sampled])
def test_mutants_are_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with small_engine(num_blocks=9) as engine:
        STATES[:] = [engine.worker.runner.req_states]
        with pytest.raises(AssertionError):
            run(engine, dummies=True)
