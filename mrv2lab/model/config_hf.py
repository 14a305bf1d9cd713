"""Hugging Face's ``config.json`` <-> ModelConfig. What the decoder cannot do is refused by name, never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast, get_args

from mrv2lab.config import ARCHITECTURES, DType, LayerType, ModelConfig
from mrv2lab.model.errors import CheckpointError, listed

Json = dict[str, Any]

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MODEL_TYPE = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen3ForCausalLM": "qwen3"}
_DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128}
_DEFAULT_LENGTH = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131_072, "Qwen3ForCausalLM": 32_768}
_DEFAULT_WINDOW = {"MistralForCausalLM": 4096, "Qwen3ForCausalLM": 4096}
_DEFAULT_FULL_LAYERS = 28
"""Qwen3's ``max_window_layers``: that many layers at the bottom do not slide."""


def read_json(path: Path) -> Json:
    """A JSON object from a file. Raises :class:`CheckpointError` naming the file."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a model folder holds config.json and model.safetensors") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(made, dict):
        raise CheckpointError(f"{path} holds a JSON {type(made).__name__}, expected an object")
    return made


def config_from_folder(folder: Path) -> ModelConfig:
    """The config of a Hugging Face folder, with the eos ids of ``generation_config.json`` where it has any."""
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists() and read_json(generation).get("eos_token_id") is not None:
        config["eos_token_id"] = read_json(generation)["eos_token_id"]
    return config_from_hf(config, name=folder.name, source=str(folder / "config.json"))


def config_from_hf(hf: Json, *, name: str = "model", source: str = "config.json") -> ModelConfig:
    """Raises :class:`CheckpointError` for an unsupported architecture or feature, and for missing or bad fields."""
    architectures = hf.get("architectures") or [f"(none; model_type {hf.get('model_type')!r})"]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: unsupported architecture {architecture}; supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        problems = unsupported_features(hf)
    except (AttributeError, TypeError) as error:  # a rope_scaling that is no object, say
        raise CheckpointError(f"{source}: a setting is not of the type it should have: {error}") from error
    if problems:
        raise CheckpointError(f"{source}: this decoder does not support {'; '.join(problems)}")
    missing = [key for key in _REQUIRED if hf.get(key) is None]
    if missing:
        raise CheckpointError(f"{source}: missing {listed(missing)}")
    heads = hf["num_attention_heads"]
    rope = hf.get("rope_parameters") or {}
    head_dim = hf.get("head_dim") or _DEFAULT_HEAD_DIM.get(architecture)
    eos = hf.get("eos_token_id")
    stored = hf.get("dtype") or hf.get("torch_dtype")
    try:
        window, layer_types = sliding_layers(hf, architecture)
        return ModelConfig(
            name=name,
            architecture=architecture,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            num_hidden_layers=hf["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim or hf["hidden_size"] // heads,
            intermediate_size=hf["intermediate_size"],
            max_position_embeddings=hf.get("max_position_embeddings") or _DEFAULT_LENGTH[architecture],
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=ARCHITECTURES[architecture],
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            dtype=cast(DType, stored) if stored in get_args(DType) else "float32",
            sliding_window=window,
            layer_types=layer_types,
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{source}: {error}") from error


def sliding_layers(hf: Json, architecture: str) -> tuple[int | None, tuple[LayerType, ...]]:
    """``ModelConfig.sliding_window`` and ``layer_types``, which are (None, ()) where no layer slides.

    As transformers reads them: in Qwen3 ``use_sliding_window`` switches it on, for the layers that ``layer_types``
    names or, without it, from ``max_window_layers`` up; in Mistral every layer slides unless ``sliding_window`` is
    null. A Llama slides where ``layer_types`` says so (as in vLLM; transformers ignores it). Raises ``ValueError``.
    """
    window = hf.get("sliding_window", _DEFAULT_WINDOW.get(architecture))
    kinds: list[Any] | None = hf.get("layer_types")
    if not hf.get("use_sliding_window", architecture != "Qwen3ForCausalLM"):
        window = None
    if window is not None and kinds is None:
        layers = hf["num_hidden_layers"]
        if architecture == "LlamaForCausalLM":
            raise ValueError(f"sliding-window attention ({window}) of which layers? a Llama's layer_types says so")
        full = 0
        if architecture == "Qwen3ForCausalLM":
            full = min(hf.get("max_window_layers", _DEFAULT_FULL_LAYERS), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if kinds is None or all(kind == "full_attention" for kind in kinds):
        return None, ()
    if window is None:
        raise ValueError(f"sliding-window attention in layer_types {kinds}, but sliding_window is null or not in use")
    if all(kind == "sliding_attention" for kind in kinds):
        return window, ()
    return window, tuple(kinds)


def unsupported_features(hf: Json) -> list[str]:
    """The settings of a ``config.json`` that would change the numbers and that this decoder does not have."""
    problems = []
    for rope in (hf.get("rope_scaling"), hf.get("rope_parameters")):
        kind = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        if kind != "default":
            problems.append(f"rope scaling of type {kind!r}")
    partial = hf.get("partial_rotary_factor") or (hf.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        problems.append(f"partial_rotary_factor {partial}")
    problems += [f"{key} true" for key in ("attention_bias", "mlp_bias") if hf.get(key)]
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act {hf['hidden_act']!r} (silu only)")
    if hf.get("quantization_config"):
        problems.append(f"quantization_config ({hf['quantization_config'].get('quant_method', 'unknown')})")
    return problems


def config_to_hf(config: ModelConfig) -> Json:
    """A ``config.json`` that ``config_from_hf`` and transformers 5 read back to the same decoder (a Llama whose layers
    slide apart, which transformers does not have)."""
    slides = {layer for group in config.kv_groups if group.window is not None for layer in group.layers}
    kinds = ["sliding_attention" if i in slides else "full_attention" for i in range(config.num_hidden_layers)]
    sliding: Json = {}
    if slides:
        sliding = {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    if config.architecture == "MistralForCausalLM" and len(set(kinds)) == 1:
        # transformers takes 4096 for what is left out, and knows no layer_types there.
        sliding = {"sliding_window": config.sliding_window if slides else None}
    return {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPE[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": config.dtype,
    } | sliding
