"""Weights, config and tokenizer out of one GGUF file (llama.cpp's format), read with the ``gguf`` package.

Quantised tensors are dequantised once, at load. GGUF's llama architecture stores the rows of q and k pair-interleaved;
they are put back into the order of rotate_half (llama.cpp: ``convert_hf_to_gguf.py``, ``permute``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrv2lab.config import ARCHITECTURES, ModelConfig
from mrv2lab.model.errors import CheckpointError, listed
from mrv2lab.model.names import check_shapes, from_gguf, ignored

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class GGUFFile:
    """An opened GGUF: ``value("llama.block_count")`` and tensors. Raises :class:`CheckpointError` if it is broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(f"{path}: reading GGUF needs `pip install gguf`") from error
        try:
            self._reader: Any = gguf.GGUFReader(path)
        except Exception as error:  # the reader has no error class of its own: anything from IndexError to ValueError
            raise CheckpointError(
                f"{path} is no readable GGUF file, or a truncated one ({type(error).__name__}: {error}); "
                "copy or download it again"
            ) from error
        self._dequantize: Any = gguf.quants.dequantize
        self.shapes = {str(t.name): tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python numbers, strings or lists."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise CheckpointError(f"{self.path}: metadata {key!r} cannot be read: {error}") from error

    def required(self, key: str) -> Any:
        """A metadata value that must be there."""
        value = self.value(key)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {key!r} is missing")
        return value

    def tensors(self) -> dict[str, Any]:
        """The reader's tensors by their GGUF names."""
        return {str(tensor.name): tensor for tensor in self._reader.tensors}

    def dequantized(self, tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One tensor as float32 in [out, in] order."""
        try:
            made = np.asarray(self._dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {tensor.name} is of type {tensor.tensor_type.name}, which gguf cannot dequantise"
            ) from error
        return made.reshape(self.shapes[str(tensor.name)])


def gguf_config(file: GGUFFile, name: str) -> ModelConfig:
    """The ModelConfig (float32) of an open GGUF. Raises :class:`CheckpointError` for what the decoder does not have."""
    arch = file.required("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: unsupported architecture {arch!r}; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    scaling = file.value(f"{arch}.rope.scaling.type", "none")
    problems = [f"rope scaling of type {scaling!r}"] if scaling != "none" else []
    if "rope_freqs.weight" in file.shapes:
        problems.append("scaled rope frequencies (rope_freqs.weight)")
    if file.value(f"{arch}.expert_count"):
        problems.append("experts")
    if file.value(f"{arch}.attention.sliding_window"):
        problems.append("sliding-window attention")
    heads, hidden = file.required(f"{arch}.attention.head_count"), file.required(f"{arch}.embedding_length")
    kv_heads = file.value(f"{arch}.attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        problems.append("head counts that differ by layer")
    if problems:
        raise CheckpointError(f"{file.path}: this decoder does not support {'; '.join(problems)}")
    head_dim = file.value(f"{arch}.attention.key_length", hidden // heads)
    if file.value(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: this decoder does not support rotary embeddings of a part of the head")
    eos = file.value("tokenizer.ggml.eos_token_id")
    embedding = file.shapes.get("token_embd.weight", (0,))
    try:
        return ModelConfig(
            name=name,
            architecture=GGUF_ARCHITECTURES[arch],
            vocab_size=embedding[0] or file.required(f"{arch}.vocab_size"),
            hidden_size=hidden,
            num_hidden_layers=file.required(f"{arch}.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=file.required(f"{arch}.feed_forward_length"),
            max_position_embeddings=file.required(f"{arch}.context_length"),
            rope_theta=float(file.value(f"{arch}.rope.freq_base", 10_000.0)),
            rms_norm_eps=float(file.required(f"{arch}.attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in file.shapes,
            qk_norm=ARCHITECTURES[GGUF_ARCHITECTURES[arch]],
            eos_token_ids=() if eos is None else (int(eos),),
            dtype="float32",
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file.path}: {error}") from error


def gguf_weights(file: GGUFFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the decoder by Hugging Face's name, dequantised to ``config.dtype``.

    Raises one :class:`CheckpointError` that lists missing, unexpected and misshaped tensors.
    """
    found = {from_gguf(name) or f"{name} (GGUF)": shape for name, shape in file.shapes.items()}
    check_shapes(found, config, str(file.path))
    dtype: torch.dtype = getattr(torch, config.dtype)
    permuted = config.architecture == "LlamaForCausalLM"
    weights: dict[str, torch.Tensor] = {}
    broken: list[str] = []
    for gguf_name, tensor in file.tensors().items():
        name = from_gguf(gguf_name)
        assert name is not None, "check_shapes refused unknown names"
        if ignored(name, config):
            continue
        array = file.dequantized(tensor)
        if permuted and name.endswith("q_proj.weight"):
            array = unpermute(array, config.num_attention_heads)
        elif permuted and name.endswith("k_proj.weight"):
            array = unpermute(array, config.num_key_value_heads)
        if not np.isfinite(array).all():
            broken.append(gguf_name)
        # A float32 tensor is a read-only view of the mapped file until here.
        weights[name] = torch.from_numpy(array.copy() if not array.flags.writeable else array).to(dtype)
    if broken:
        raise CheckpointError(f"{file.path}: NaN or infinity in {listed(broken)}; copy or download it again")
    return weights


def unpermute(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows 2i, 2i + 1 of each head back to i, i + D/2. array: [heads * D, in]."""
    rows, width = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)
