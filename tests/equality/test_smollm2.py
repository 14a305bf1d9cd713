"""SmolLM2-135M, where `make smollm2` installed it, against Hugging Face in float32: the one real model of the suite."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.load import load_model, smollm2_path
from mrv2lab.protocol import SamplingParams
from tests.equality.compare import compare_near, reference_logits
from tests.equality.harness import run_workload
from tests.equality.models import hf_from_weights


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_near(device: str) -> None:
    """One greedy and one sampled, the prompts in chunks of 3. A wrong row for a token would be far off: each row's
    logits span some forty units."""
    params = [SamplingParams(max_tokens=12, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.8)]
    prompts = ("The capital of France is", "Once upon a time, in a village by the sea,")
    workload = Workload(tuple(Arrival(0, prompt, one) for prompt, one in zip(prompts, params, strict=True)))
    options = {"num_blocks": 32, "max_num_reqs": 2, "long_prefill_token_threshold": 3}
    with Engine("smollm2", device=device, dtype="float32", **options) as engine:
        trace = run_workload(engine, workload)
        print([output.text for output in trace.outputs.values()])
    loaded = load_model("smollm2")
    report = compare_near(trace, reference_logits(hf_from_weights(loaded.config, loaded.weights), trace))
    print(f"{report.rows} rows, {report.excused} excused, worst {report.worst:.2g}")
    assert report.rows == 24
    assert report.excused == 0


def test_weights_are_what_transformers_reads() -> None:
    """Dequantised and with q and k back in their order: bit for bit, by transformers' own reader of the file."""
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    from transformers import LlamaForCausalLM

    from tests.equality.models import hf_config

    loaded = load_model("smollm2")
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config(loaded.config))
    made = reader.load_gguf_checkpoint(str(smollm2_path()), return_tensors=True, model_to_load=model)
    assert made["tensors"].keys() == loaded.weights.keys()
    for name, weight in loaded.weights.items():
        assert torch.equal(torch.as_tensor(made["tensors"][name]), weight), name
    assert made["config"]["rope_theta"] == loaded.config.rope_theta
    assert made["config"]["rms_norm_eps"] == pytest.approx(loaded.config.rms_norm_eps)
