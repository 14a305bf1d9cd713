"""Thousands of engine steps with a stub forward: arrivals, aborts, preemptions, and nothing left behind."""

from __future__ import annotations

import gc
import os
import statistics

import numpy as np
import psutil
import pytest
import torch

from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import ForwardInputs, SamplingParams

# The shipped model's vocabulary and lengths; its width does not matter behind a stub forward.
SHAPE = ModelConfig(
    vocab_size=2048,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=8,
    max_position_embeddings=1024,
    eos_token_ids=(0,),
)


class StubModel:
    """Logits that depend on the input tokens alone, without a forward."""

    def __init__(self, engine: Engine) -> None:
        self.rt = engine.rt
        self.ids: torch.Tensor | None = None
        scheduler = engine.config.scheduler
        rows = min(scheduler.max_num_reqs, scheduler.max_num_batched_tokens)
        self.logits = self.rt.zeros((rows, engine.config.model.vocab_size), torch.float32, name="stub.logits")
        self.rt.register("stub.logits", _stub_logits)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        self.ids = inputs.input_ids
        return inputs.input_ids

    def compute_logits(self, logits_indices: torch.Tensor, n: int) -> torch.Tensor:
        assert self.ids is not None
        self.rt.run("stub.logits", self.logits[:n], self.ids, logits_indices[:n])
        return self.logits[:n]


def _stub_logits(logits: torch.Tensor, ids: torch.Tensor, indices: torch.Tensor) -> None:
    logits.zero_()
    chosen = (ids[indices].to(torch.int64) * 7919 + 13) % logits.shape[1]
    logits.scatter_(1, chosen[:, None], 1.0)


def run_stress(engine: Engine, steps: int, seed: int, samples: int = 0) -> tuple[list[int], dict[str, int]]:
    """Step with random arrivals and aborts; returns resident bytes at ``samples`` moments, and what happened."""
    rng = np.random.default_rng(seed)
    process = psutil.Process(os.getpid())
    seen: list[int] = []
    done = {"submitted": 0, "aborted": 0, "finished": 0}
    live: list[str] = []
    for step in range(steps):
        if len(live) < 24 and rng.random() < 0.3:
            prompt = rng.integers(1, 2048, int(rng.integers(1, 60))).tolist()
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 40)),
                temperature=float(rng.random() < 0.3),
                ignore_eos=rng.random() < 0.5,
            )
            live.append(engine.submit(prompt, params))
            done["submitted"] += 1
        if live and rng.random() < 0.02:
            engine.abort(live.pop(int(rng.integers(len(live)))))
            done["aborted"] += 1
        for output in engine.step():
            if output.finished:
                live.remove(output.request_id)
                done["finished"] += 1
        if samples and step % (steps // samples) == 0:
            gc.collect()
            seen.append(process.memory_info().rss)
    while engine.has_work():
        engine.step()
    return seen, done


def check_nothing_left(engine: Engine) -> None:
    """Every row is free, every block is back, nothing is staged or in flight."""
    state = engine.worker.runner.req_states
    assert not state.req_id_to_index
    assert sorted(state.free_indices) == list(range(state.max_num_reqs))
    pool = engine.scheduler.kv.pool
    assert engine.scheduler.kv.num_free_blocks == pool.num_usable
    assert not engine.core.in_flight
    assert not state.staged()


def make_engine(device: str = "cpu", **options: object) -> Engine:
    """A pool for about three long requests, so that preemption never stops."""
    engine = Engine(
        SHAPE, device=device, num_blocks=24, max_num_reqs=16, max_num_batched_tokens=64, keep_finished=16, **options
    )
    engine.worker.runner.model = StubModel(engine)
    return engine


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_short_stress_leaves_nothing_behind(async_scheduling: bool) -> None:
    with make_engine(async_scheduling=async_scheduling) as engine:
        _, done = run_stress(engine, 600, seed=3)
        assert engine.scheduler.stats.num_preemptions > 10
        assert done["finished"] > 50 and done["aborted"] > 3
        check_nothing_left(engine)


def test_a_leaked_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's own mutant: abort forgets the row."""
    with make_engine() as engine:
        state = engine.worker.runner.req_states
        keep = state.remove_request

        def forgetful(req_id: str) -> int:
            row = keep(req_id)
            if row == state.max_num_reqs - 1:
                state.free_indices.remove(row)
            return row

        monkeypatch.setattr(state, "remove_request", forgetful)
        run_stress(engine, 100, seed=3)
        with pytest.raises(AssertionError):
            check_nothing_left(engine)


@pytest.mark.slow
def test_20000_steps_leak_neither_rows_nor_blocks_nor_bytes() -> None:
    with make_engine() as engine:
        seen, done = run_stress(engine, 20_000, seed=0, samples=80)
        check_nothing_left(engine)
        registered = len(engine.rt.registry)
        quarter = len(seen) // 4
        second, last = statistics.median(seen[quarter : 2 * quarter]), statistics.median(seen[3 * quarter :])
        print(
            f"{done}, preemptions {engine.scheduler.stats.num_preemptions}, second quarter {second / 1e6:.2f} MB, "
            f"last {last / 1e6:.2f} MB, {registered} registered buffers"
        )
        assert abs(last - second) < 1_000_000
        assert engine.scheduler.stats.num_preemptions > 1000


@pytest.mark.gpu
def test_20000_steps_on_the_gpu_leak_nothing() -> None:
    with make_engine("cuda") as engine:
        run_stress(engine, 2_000, seed=1)
        gc.collect()  # what earlier tests have left
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        seen, _ = run_stress(engine, 18_000, seed=2, samples=80)
        check_nothing_left(engine)
        assert abs(torch.cuda.memory_allocated() - before[0]) < 1_000_000
        assert abs(torch.cuda.memory_reserved() - before[1]) < 1_000_000
        quarter = len(seen) // 4
        assert abs(statistics.median(seen[3 * quarter :]) - statistics.median(seen[quarter : 2 * quarter])) < 1_000_000
