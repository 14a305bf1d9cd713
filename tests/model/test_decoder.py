"""The decoder against Hugging Face transformers: saved by them, loaded by us, logits at every position."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch

from mrv2lab.config import ModelConfig, RunnerConfig
from mrv2lab.model.decoder import Decoder
from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.load import LoadedModel, load_model
from mrv2lab.model.rope import rope_table
from mrv2lab.model.weights_random import random_weights
from mrv2lab.runtime import make_runtime
from tests.model.decoding import DEVICES, all_logits, assert_near_class, runtime

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
LLAMA = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
CASES = {
    "llama-gqa": ("Llama", {**LLAMA, "tie_word_embeddings": False}),
    "llama-mha-tied": ("Llama", {**LLAMA, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}),
    "qwen3-tied": ("Qwen3", {**LLAMA, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {**LLAMA, "head_dim": 24, "rope_theta": 1e6, "tie_word_embeddings": False}),
}
SEQUENCES = [[(7 * i * i + 3 * j) % 97 for i in range(n)] for j, n in enumerate((37, 1, 20))]


def make_reference(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Save a random transformers model to ``folder`` and return its logits of SEQUENCES."""
    import transformers

    family, settings = CASES[case]
    theta = settings.get("rope_theta", 10_000.0)
    settings = {key: value for key, value in settings.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": theta}
    config = getattr(transformers, f"{family}Config")(**settings, rope_parameters=rope)
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the initialisation, norm weights included
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.3 * parameter.shape[1] ** -0.5)
        model.to(dtype)
        model.save_pretrained(folder)
        return [model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """case -> (our loaded model, transformers' logits)."""

    @cache
    def made(case: str) -> tuple[LoadedModel, list[torch.Tensor]]:
        folder = tmp_path_factory.mktemp(case)
        want = make_reference(case, folder)
        return load_model(folder), want

    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, chunk, device, reference):
    loaded, want = reference(case)
    got = all_logits(runtime(device), loaded.config, loaded.weights, SEQUENCES, chunk)
    for ours, theirs in zip(got, want, strict=True):
        assert_near_class(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["llama-gqa", "qwen3-tied"])
def test_bfloat16_is_as_good_as_transformers(case, device, tmp_path):
    """Both round in other places, so each is held against float32 with the same (bfloat16) weights: 3 to 5 % off."""
    theirs = make_reference(case, tmp_path, torch.bfloat16)
    exact = load_model(tmp_path, dtype="float32")
    want = all_logits(runtime("cpu"), exact.config, exact.weights, SEQUENCES, 64)
    loaded = load_model(tmp_path, dtype="bfloat16")
    ours = all_logits(runtime(device), loaded.config, loaded.weights, SEQUENCES, 16)
    assert ours[0].dtype == torch.bfloat16
    assert worst(ours, want) <= 1.5 * worst(theirs, want) <= 0.1


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Largest error of a row as a part of its largest reference logit."""
    pairs = zip(got, want, strict=True)
    return max(float(((g.float() - w).abs().amax(-1) / w.abs().amax(-1)).max()) for g, w in pairs)


@pytest.mark.parametrize(
    "change",
    [
        lambda config, w: (dataclasses.replace(config, rope_theta=2e4), w),
        lambda config, w: (dataclasses.replace(config, rms_norm_eps=1e-2), w),
        lambda config, w: (config, {n: torch.ones_like(t) if n.endswith("norm.weight") else t for n, t in w.items()}),
        lambda config, w: (config, {**w, "model.norm.weight": torch.ones(48)}),
        lambda config, w: (config, {**w, "model.layers.2.self_attn.k_norm.weight": torch.ones(16)}),
    ],
    ids=["rope theta", "eps", "norms", "final norm", "k norm"],
)
def test_the_comparison_can_fail(change, reference):
    loaded, want = reference("qwen3-tied")
    got = all_logits(runtime("cpu"), *change(loaded.config, loaded.weights), SEQUENCES, 16)
    with pytest.raises(AssertionError, match="worst row"):
        assert_near_class(got[0], want[0])


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3-tied"])
def test_interpreted_kernels_agree(case, reference):
    """All six kernels in one decoder, 5 tokens."""
    pytest.importorskip("triton")
    loaded, want = reference(case)
    rt = make_runtime(RunnerConfig(device="cpu", kernels="interpret"))
    got = all_logits(rt, loaded.config, loaded.weights, [SEQUENCES[0][:3], SEQUENCES[2][:2]], 2)
    for ours, theirs in zip(got, (want[0][:3], want[2][:2]), strict=True):
        assert_near_class(ours, theirs)


def test_rope_table_has_transformers_bits():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 123_456.0}
    config = LlamaConfig(hidden_size=96, num_attention_heads=2, max_position_embeddings=500, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(500)[None])
    ours = rope_table(500, 48, 123_456.0)
    assert torch.equal(ours[0], cos[0, :, :24])
    assert torch.equal(ours[1], sin[0, :, :24])


TINY = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=12,
    max_position_embeddings=16,
)


def test_two_decoders_share_a_runtime():
    rt = runtime("cpu")
    weights = random_weights(TINY)
    Decoder(TINY, weights, rt, max_num_tokens=4)
    Decoder(TINY, weights, rt, max_num_tokens=4, prefix="draft.")
    with pytest.raises(ValueError, match="bound once"):
        Decoder(TINY, weights, rt, max_num_tokens=4)


def test_wrong_weights_and_caches_are_named():
    weights = random_weights(TINY)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        Decoder(TINY, weights, runtime("cpu"), max_num_tokens=4)
    decoder = Decoder(TINY, random_weights(TINY), runtime("cpu"), max_num_tokens=4)
    cache = torch.zeros(4, 8, 1, 4)
    with pytest.raises(ValueError, match="1 KV caches for 2 layers"):
        decoder.bind_kv_cache([(cache, cache)])
    with pytest.raises(ValueError, match=r"expected \[num_blocks, block_size, 1, 4\] torch.float32"):
        decoder.bind_kv_cache([(cache, cache.half())] * 2)
    with pytest.raises(RuntimeError, match="bind_kv_cache"):
        decoder.forward(None)
