"""Random traffic for the race detector's tests: arrivals, aborts and preemptions, as many steps as one wants."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams

MODEL = ModelConfig(
    name="race",
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=128,
    eos_token_ids=(3, 5),
)
STORM: dict[str, Any] = {
    "max_num_reqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "num_blocks": 14,
    "block_size": 4,
}
"""A KV pool for some three requests of the six."""


def small_engine(**options: Any) -> Engine:
    """A very small random decoder on the CPU, with a KV pool that makes it preempt."""
    return Engine(MODEL, device="cpu", keep_finished=64, **{**STORM, **options})


def storm(engine: Engine, steps: int, seed: int) -> None:
    """``steps`` turns: a request arrives in two steps of three, one in ten is aborted, some end by their EOS."""
    rng = np.random.default_rng(seed)
    vocab = engine.config.model.vocab_size
    for _ in range(steps):
        if rng.random() < 0.66 and len(engine.scheduler.waiting) < 4:
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 16)),
                temperature=float(rng.choice([0.0, 0.8])),
                ignore_eos=bool(rng.random() < 0.5),
            )
            engine.submit(rng.integers(0, vocab, int(rng.integers(1, 20))).tolist(), params)
        unfinished = [req_id for req_id, output in engine.requests.items() if not output.finished]
        if unfinished and rng.random() < 0.1:
            engine.abort(str(rng.choice(unfinished)))
        engine.step()
