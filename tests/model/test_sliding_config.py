"""Which layers slide, from a ``config.json`` and back."""

import dataclasses

import pytest

from mrv2lab.model.config_hf import config_from_hf, config_to_hf
from mrv2lab.model.errors import CheckpointError
from tests.model.test_load import CONFIG, QWEN

FULL, SLIDES = "full_attention", "sliding_attention"
ON, FIVE, SIX = {"use_sliding_window": True}, {"sliding_window": 5}, {"use_sliding_window": True, "sliding_window": 6}
LLAMA, MISTRAL = ({"architectures": [f"{family}ForCausalLM"]} for family in ("Llama", "Mistral"))
SLIDING = dataclasses.replace(QWEN, num_hidden_layers=3, sliding_window=6)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (SIX, (None, ())),  # only layers from the 28th up
        ({**SIX, "max_window_layers": 0}, (6, ())),
        ({**SIX, "max_window_layers": 2}, (6, (FULL, FULL, SLIDES))),
        ({**ON, "max_window_layers": 0}, (4096, ())),
        ({**SIX, "layer_types": [SLIDES, FULL, SLIDES]}, (6, (SLIDES, FULL, SLIDES))),
        ({**SIX, "layer_types": [FULL] * 3}, (None, ())),
        (MISTRAL, (4096, ())),
        ({**MISTRAL, **FIVE}, (5, ())),
        ({**MISTRAL, "sliding_window": None}, (None, ())),
        ({**LLAMA, **FIVE, "layer_types": [FULL, SLIDES, FULL]}, (5, (FULL, SLIDES, FULL))),
    ],
)
def test_sliding_layers(change, want):
    hf = config_to_hf(dataclasses.replace(QWEN, num_hidden_layers=3)) | change
    config = config_from_hf(hf)
    assert (config.sliding_window, config.layer_types) == want


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": [FULL, SLIDES, FULL]}, "but sliding_window is null or not in use"),
        ({**ON, "sliding_window": 0, "max_window_layers": 0}, "sliding_window must be a positive"),
        ({**SIX, "layer_types": [FULL, SLIDES]}, "names 2 layers, the model has 3"),
        ({**ON, "layer_types": [FULL, "chunked_attention", FULL]}, "got 'chunked_attention'"),
        ({**LLAMA, **FIVE}, "of which layers"),
    ],
)
def test_sliding_layers_that_cannot_be(change, says):
    with pytest.raises(CheckpointError, match=says):
        config_from_hf(config_to_hf(dataclasses.replace(QWEN, num_hidden_layers=3)) | change)


@pytest.mark.parametrize("kinds", [(), (SLIDES, FULL, SLIDES)], ids=["all", "mixed"])
def test_transformers_reads_our_windows(kinds):
    import transformers

    config = dataclasses.replace(SLIDING, layer_types=kinds)
    theirs = transformers.Qwen3Config(**config_to_hf(config))
    assert theirs.sliding_window == 6
    assert theirs.layer_types == list(kinds or [SLIDES] * 3)
    assert config_from_hf(theirs.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}) == config
    if not kinds:
        for window in (6, None):
            mistral = dataclasses.replace(CONFIG, architecture="MistralForCausalLM", sliding_window=window)
            theirs = transformers.MistralConfig(**config_to_hf(mistral))
            assert theirs.sliding_window == window
            assert config_from_hf(theirs.to_dict() | MISTRAL) == mistral
