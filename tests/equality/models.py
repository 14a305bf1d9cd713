"""The decoders that the equality tests run: small, random, and each with something that the others lack."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2lab.config import ModelConfig
from mrv2lab.model.load import CHECKPOINTS, LoadedModel, load_model

_SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}

CONFIGS: dict[str, ModelConfig] = {
    # Tied embeddings, two heads a KV head.
    "llama-tied": ModelConfig(
        **_SMALL,
        name="llama-tied",
        vocab_size=331,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_ids=tuple(range(5, 331, 17)),
    ),
    # A vocabulary of two argmax blocks, heads wider than the hidden size.
    "llama": ModelConfig(
        **_SMALL,
        name="llama",
        vocab_size=4500,
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        eos_token_ids=tuple(range(5, 4500, 17)),
    ),
    # Norms on q and k, one KV head, another rotary base.
    "qwen3": ModelConfig(
        **_SMALL,
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        vocab_size=331,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
        eos_token_ids=tuple(range(5, 331, 17)),
    ),
}
"""One token in 17 ends a request that does not ignore it, so that random text ends at random places."""

MODELS = (*CONFIGS, "tiny")


def source(name: str) -> ModelConfig | str:
    """What ``Engine(model=...)`` takes. Skips the test where the shipped checkpoint is not there yet."""
    if name in CONFIGS:
        return CONFIGS[name]
    if not (CHECKPOINTS / name).is_dir():
        pytest.skip(f"the shipped model {name!r} is not in this checkout")
    return name


def loaded(name: str) -> LoadedModel:
    """The model's config and host weights, as the engine gets them."""
    return load_model(source(name))


def hf_config(config: ModelConfig) -> Any:
    """The same shape as transformers spells it; written out here, not read from our own converter."""
    import transformers

    family = {"LlamaForCausalLM": transformers.LlamaConfig, "Qwen3ForCausalLM": transformers.Qwen3Config}
    return family[config.architecture](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=False,
        attn_implementation="eager",
    )


@cache
def hf_model(name: str) -> Any:
    """transformers' model in float32 on the CPU: the shipped checkpoint as transformers loads it, else our weights."""
    import transformers

    if name not in CONFIGS:
        folder: Path = CHECKPOINTS / name
        made = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return made.eval()
    return hf_from_weights(CONFIGS[name], load_model(CONFIGS[name]).weights)


def hf_from_weights(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with these weights, widened to float32."""
    import transformers

    family = {"LlamaForCausalLM": transformers.LlamaForCausalLM, "Qwen3ForCausalLM": transformers.Qwen3ForCausalLM}
    model = family[config.architecture](hf_config(config)).to(torch.float32)
    missing, unexpected = model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model.eval()
