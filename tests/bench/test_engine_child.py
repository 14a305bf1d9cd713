"""An engine's process: what it answers, and what a peer in it is given, as far as that can be told without one."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2lab.bench import engine_child, engine_vllm
from mrv2lab.bench.engine_bench import settings
from mrv2lab.bench.engine_ours import normal_weights
from mrv2lab.bench.engine_peers import Child, ChildError, Entrant
from mrv2lab.bench.engine_vllm import hf_config, normal_parameters
from mrv2lab.bench.engine_workloads import RaceWorkload, sampling_of
from mrv2lab.config import QWEN3_0_6B, ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.model.names import expected_shapes
from mrv2lab.protocol import SamplingParams

TINY = RaceWorkload("T", 2, 3, 4)


# -- a child's answers -------------------------------------------------------------------------------------------------
class Fake:
    facts: dict[str, Any] = {"up": True}  # noqa: RUF012

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra

    def prepare(self, workload: RaceWorkload, sampling: str, repetition: int) -> Any:
        return workload

    def generate(self, prepared: RaceWorkload) -> list[list[int]]:
        return [[number] * (prepared.output_len + self.extra) for number in range(prepared.requests)]

    def window(self, steps: int) -> dict[str, int]:
        return {"steps": steps}


def answers(monkeypatch: pytest.MonkeyPatch, module: Any, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``serve`` says to ``messages``."""
    monkeypatch.setitem(engine_child.MODULES, "fake", "a_made_up_engine")
    monkeypatch.setitem(sys.modules, "a_made_up_engine", module)
    out = io.StringIO()
    engine_child.serve("fake", {"size": 1}, iter([json.dumps(one) for one in messages]), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def module_of(build: Any) -> Any:
    return types.SimpleNamespace(versions=lambda: {"fake": "1"}, build=build)


def test_a_child_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = module_of(lambda settings: seen.append(settings) or Fake())
    run = TINY.message("greedy", 1)
    ready, built, ran, window = answers(monkeypatch, module, {"do": "build"}, run, {"do": "window", "steps": 5})
    assert ready == {"ready": {"fake": "1"}}
    assert built["up"] and built["start_s"] >= 0 and seen == [{"size": 1}]
    assert ran["seconds"] > 0 and (ran["distinct_tokens"], ran["first_tokens"]) == (2, [0] * 4)
    assert window == {"steps": 5}


def test_a_child_survives_what_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that brought too many tokens counts for nothing: its time would be another workload's."""
    made = answers(
        monkeypatch, module_of(lambda _: Fake(extra=1)), {"do": "build"}, TINY.message("greedy", 0), {"do": "dance"}
    )
    assert made[2] == {"failed": "RuntimeError: 2 requests with [5] tokens came back, 2 with 4 were asked for"}
    assert made[3]["failed"].startswith("AttributeError")


def test_what_cannot_be_imported_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def versions() -> None:
        raise ImportError("libcuda.so.1 is missing")

    assert answers(monkeypatch, types.SimpleNamespace(versions=versions), {"do": "build"}) == [
        {"absent": "ImportError: libcuda.so.1 is missing"}
    ]


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is here")
def test_a_process_that_has_no_vllm(tmp_path: Path) -> None:
    child = Child(Entrant("vllm", "mrv2"), tmp_path)
    try:
        assert "vllm" in child.answer(60)["absent"]
        with pytest.raises(ChildError, match=r"vllm mrv2 ended: it said nothing|vllm mrv2 is gone: it said nothing"):
            child.call({"do": "build"}, 60)
    finally:
        child.close()


# -- vLLM, as far as it can be told without it -------------------------------------------------------------------------
class FakeLLM:
    """Keeps what it was given, and answers in vLLM's shape."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        spec = types.SimpleNamespace
        layer = spec(get_attn_backend=lambda: spec(get_name=lambda: "FLASH_ATTN"))
        self.llm_engine = spec(
            vllm_config=spec(
                use_v2_model_runner=True,
                compilation_config=spec(
                    cudagraph_mode="FULL_AND_PIECEWISE", mode=3, static_forward_context={"a": layer, "b": layer}
                ),
                scheduler_config=spec(async_scheduling=True, max_num_batched_tokens=16_384),
                cache_config=spec(num_gpu_blocks=9, block_size=16),
            )
        )

    def apply_model(self, function: Any) -> list[Any]:
        return [function(torch.nn.Linear(3, 2))]

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        outs = [[one["prompt_token_ids"][0]] * two["max_tokens"] for one, two in zip(prompts, params, strict=True)]
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tuple(out))]) for out in outs]


def test_vllm_gets_what_we_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=FakeLLM, SamplingParams=dict))  # type: ignore[arg-type]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    theirs = settings(True, {})[1] | {"folder": "a_folder"}
    made = engine_vllm.build(theirs)
    assert made.facts["uses_mrv2"] and made.facts["parameters"] == 8
    assert made.facts["attention"] == "FLASH_ATTN"
    given = made.llm.given
    assert given["kv_cache_memory_bytes"] == theirs["kv_bytes"] and not given["enable_prefix_caching"]
    prompts, params = made.prepare(TINY, "seeded", 2)
    assert [one["prompt_token_ids"] for one in prompts] == TINY.prompts(2, QWEN3_0_6B.vocab_size)
    common = {"max_tokens": 4, "ignore_eos": True, "detokenize": False}
    assert params == [{**common, **sampling_of("seeded", number)} for number in range(2)]
    assert made.generate((prompts, params)) == [[prompt[0]] * 4 for prompt in TINY.prompts(2, QWEN3_0_6B.vocab_size)]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(RuntimeError, match="did not take the runner"):
        engine_vllm.build(theirs)


def test_the_environment_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")  # whoever set it knows why
    made = engine_vllm.environment("v1", tmp_path)
    assert (made["VLLM_USE_V2_MODEL_RUNNER"], made["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("0", "0")
    assert made["VLLM_USE_DEEP_GEMM"] == "1"
    assert made["VLLM_CACHE_ROOT"] != engine_vllm.environment("mrv2", tmp_path)["VLLM_CACHE_ROOT"]


def test_weights_of_a_peer_are_redrawn_in_place() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    address = module[0].weight.data_ptr()
    assert normal_parameters(module) == 64 * 64 + 3 * 64
    assert module[0].weight.data_ptr() == address
    assert 0.018 < float(module[0].weight.detach().std()) < 0.022
    assert bool((module[1].weight == 1).all())


def test_our_weights_are_drawn_alike() -> None:
    model = ModelConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=64, qk_norm=True, architecture="Qwen3ForCausalLM",
    )  # fmt: skip
    loaded = normal_weights(model, "cpu")
    assert loaded.weights.keys() == expected_shapes(model).keys()
    for name, weight in loaded.weights.items():
        assert bool((weight == 1).all()) if weight.dim() == 1 else 0.015 < float(weight.std()) < 0.025, name
    with Engine(loaded, "mrv2", "cpu", num_blocks=16) as engine:  # type: ignore[arg-type]
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert len(output.token_ids) == 3


@pytest.mark.slow
def test_peers_read_our_shape() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**{key: value for key, value in hf_config(QWEN3_0_6B).items() if key != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = expected_shapes(QWEN3_0_6B)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == ours
    assert float(model.model.rotary_emb.config.rope_parameters["rope_theta"]) == QWEN3_0_6B.rope_theta
