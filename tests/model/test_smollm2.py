"""SmolLM2-135M, where `make smollm2` installed it: the one real model of the suite."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.load import load_model, smollm2_path
from tests.model.decoding import all_logits, runtime


def installed() -> bool:
    try:
        smollm2_path()
    except CheckpointError:
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="SmolLM2 is not installed (`make smollm2`)"),
]


def test_it_speaks_english():
    """Greedy text, teacher-forced in one chunk: every token is the best one after those before it."""
    loaded = load_model("smollm2")
    config, tokenizer = loaded.config, loaded.tokenizer
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (49_152, 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.rope_theta) == (9, 3, 100_000.0)
    assert config.tie_word_embeddings
    assert tokenizer is not None
    assert config.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_end|>") == [2]
    prompt = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    ids = prompt + answer
    logits = all_logits(runtime("cpu"), config, loaded.weights, [ids], chunk=16)[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    assert bool(torch.isfinite(logits).all())
