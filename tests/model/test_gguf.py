"""GGUF files written here with the ``gguf`` package, as llama.cpp's converter lays them out, and read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from mrv2lab.config import ModelConfig
from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.load import load_model
from mrv2lab.model.names import GGUF_LAYER, GGUF_TOP
from mrv2lab.model.tokenizer import Tokenizer
from mrv2lab.model.weights_random import random_weights
from tests.model.decoding import all_logits, assert_near_class, runtime
from tests.model.test_tokenizer import TEXTS, byte_level

LLAMA = ModelConfig(
    name="m",
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=64,
    rope_theta=5e4,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
QWEN = dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=32, tie_word_embeddings=False)
F32 = gguf.GGMLQuantizationType.F32
TO_GGUF = {hf: name for name, hf in (GGUF_LAYER | GGUF_TOP).items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + D/2 of each head become neighbours, one row at a time."""
    d = len(weight) // heads
    order = [h * d + i + half * d // 2 for h in range(heads) for i in range(d // 2) for half in (0, 1)]
    return weight[order]


def write(path: Path, config: ModelConfig, quant=F32, tokenizer: Tokenizer | None = None, **options) -> Path:
    """``options``: arch, drop (a tensor), add (an extra one), scaling, pre."""
    arch = options.get("arch", "qwen3" if config.qk_norm else "llama")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if "scaling" in options:
        writer.add_rope_scaling_type(options["scaling"])
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, options.get("pre", "gpt-2"))
    tensors = {}
    for name, tensor in random_weights(config).items():
        array = tensor.numpy()
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            gguf_name = f"blk.{layer}.{TO_GGUF[part]}"
        else:
            gguf_name = TO_GGUF[name]
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleaved(array, len(array) // config.head_dim)
        tensors[gguf_name] = array
    tensors.pop(options.get("drop"), None)
    tensors |= options.get("add", {})
    for name, array in tensors.items():
        if array.ndim == 2 and quant != F32:
            writer.add_tensor(name, gguf.quants.quantize(array, quant), raw_dtype=quant)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    import json

    model = json.loads(tokenizer.backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(0)


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_float32_round_trip(config, tokenizer, tmp_path):
    loaded = load_model(write(tmp_path / "m.gguf", config, tokenizer=tokenizer))
    # GGUF stores eps and theta as float32.
    want = dataclasses.replace(config, rms_norm_eps=float(np.float32(config.rms_norm_eps)))
    assert loaded.config == want
    weights = random_weights(config)
    assert loaded.weights.keys() == weights.keys()
    assert all(torch.equal(loaded.weights[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("kind", "step"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3), ("Q4_1", 0.08), ("Q4_0", 0.13)]
)
def test_quantised_weights(kind, step, tmp_path):
    """Within the type's step of the original, in every block of 32."""
    loaded = load_model(write(tmp_path / "m.gguf", QWEN, quant=gguf.GGMLQuantizationType[kind]))
    for name, want in random_weights(QWEN).items():
        got = loaded.weights[name]
        assert got.dtype == torch.float32
        error = (got - want).abs().view(-1, 32).amax(1)
        assert bool((error <= step * want.abs().view(-1, 32).amax(1)).all()), name
        assert torch.equal(got, want) == (want.dim() == 1)


def test_target_dtype(tmp_path):
    loaded = load_model(write(tmp_path / "m.gguf", LLAMA), dtype="bfloat16")
    assert loaded.config.dtype == "bfloat16"
    assert {weight.dtype for weight in loaded.weights.values()} == {torch.bfloat16}


def test_logits_equal_transformers_own_gguf_reader(tokenizer, tmp_path):
    """Needs accelerate, which is in no extra: `pip install accelerate` to run it."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    write(tmp_path / "m.gguf", LLAMA, quant=gguf.GGMLQuantizationType.Q8_0, tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    loaded = load_model(tmp_path / "m.gguf")
    ids = [(11 * i) % 300 for i in range(20)]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert_near_class(all_logits(runtime("cpu"), loaded.config, loaded.weights, [ids], 7)[0], want)


@pytest.mark.parametrize("pre", ["gpt-2", "default"])
def test_tokenizer_comes_out_of_the_file(pre, tokenizer, tmp_path):
    loaded = load_model(write(tmp_path / "m.gguf", LLAMA, tokenizer=tokenizer, pre=pre))
    for text in [*TEXTS, "a <|end|> b", "numbers 12345"]:
        assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    assert loaded.tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (0,)


def test_smollm_splits_digits(tokenizer, tmp_path):
    loaded = load_model(write(tmp_path / "m.gguf", LLAMA, tokenizer=tokenizer, pre="smollm"))
    assert len(loaded.tokenizer.encode("1234")) == 4
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("one 1234")) == "one 1234"


def test_unknown_tokenizers_leave_a_note(tokenizer, tmp_path):
    loaded = load_model(write(tmp_path / "m.gguf", LLAMA, tokenizer=tokenizer, pre="klingon"))
    assert loaded.tokenizer is None
    assert "'klingon'" in loaded.tokenizer_note
    assert load_model(write(tmp_path / "n.gguf", LLAMA)).tokenizer_note.endswith("holds no tokenizer")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "gemma3"}, ("'gemma3'", "llama, qwen3")),
        ({"drop": "blk.1.ffn_up.weight"}, ("1 missing: model.layers.1.mlp.up_proj.weight",)),
        ({"add": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, ("1 unexpected: blk.0.attn_q.bias (GGUF)",)),
        ({"add": {"output_norm.weight": np.zeros(32, np.float32)}}, ("model.norm.weight is [32], expected [64]",)),
        ({"add": {"rope_freqs.weight": np.ones(8, np.float32)}}, ("rope_freqs.weight",)),
        ({"add": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, ("NaN", "output_norm.weight")),
        ({"scaling": gguf.RopeScalingType.YARN}, ("rope scaling of type 'yarn'",)),
    ],
    ids=["architecture", "missing", "extra", "misshaped", "rope_freqs", "NaN", "yarn"],
)
def test_refused(options, words, tmp_path):
    write(tmp_path / "m.gguf", LLAMA, **options)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "m.gguf")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 1500, 0.5, 0.99], ids=str)
def test_truncated_files(keep, tmp_path):
    path = write(tmp_path / "m.gguf", LLAMA)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 3 else keep * len(content))])
    with pytest.raises(CheckpointError, match=r"m\.gguf is no readable GGUF file.*download it again"):
        load_model(path)


def test_broken_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 this is a zip" * 10)
    with pytest.raises(CheckpointError, match="no readable GGUF"):
        load_model(path)
