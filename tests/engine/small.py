"""A model small enough that an engine costs milliseconds."""

from __future__ import annotations

from typing import Any

from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams

VOCAB = 61
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=64,
    eos_token_ids=(7,),
)


def small_engine(**options: Any) -> Engine:
    """4 rows, 16 blocks of 4, sequences of at most 48 tokens, on the CPU."""
    fixed = {"max_num_reqs": 4, "num_blocks": 17, "block_size": 4, "max_model_len": 48, "device": "cpu"}
    return Engine(MODEL, **fixed | options)


def sampled(max_tokens: int = 8, seed: int | None = 1) -> SamplingParams:
    """Random text of a fixed length."""
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)
