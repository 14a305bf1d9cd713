"""vLLM in the race: its engine in this process, which is its fastest way to run offline, with V1's or MRV2's runner.

Written for vLLM 0.26. Its weights are made as ours are: its own dummy weights give logits so flat that a sampler has
other work to do.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from mrv2lab.bench.engine_workloads import RaceWorkload, sampling_of
from mrv2lab.config import PRESETS, ModelConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM reads when it is imported, where nobody has set it: FlashInfer's sampler and DeepGEMM would be compiled at
their first use, the others are for a machine without a network and for making the weights."""


def environment(runner: str, cache: Path) -> dict[str, str]:
    """Of the child; ``cache`` is a folder for what vLLM compiles, which two runners at once must not share."""
    root = Path(os.environ.get("VLLM_CACHE_ROOT", cache)) / runner
    given = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    return given | {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "mrv2" else "0", "VLLM_CACHE_ROOT": str(root)}


def versions() -> dict[str, str]:
    """Of what it is made of. Raises ``ImportError`` where vLLM is not installed."""
    return {name: str(importlib.import_module(name).__version__) for name in ("vllm", "torch")}


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """``model`` as a Hugging Face ``config.json`` has it, for peers that read one."""
    return {
        "architectures": [model.architecture],
        "model_type": {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[model.architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": model.dtype,
        "bos_token_id": 0,
        "eos_token_id": model.vocab_size - 1,
        "use_cache": True,
    }


def normal_parameters(model: Any) -> int:
    """Make every matrix of a torch module N(0, 0.02) and every vector 1, in place; how many numbers it has. Graphs that
    were captured read the same addresses."""
    torch: Any = importlib.import_module("torch")
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(0)
    count = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1)
            count += parameter.numel()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count


def attention(config: Any) -> str:
    """Names of the backends that the layers of a ``VllmConfig`` have got, "unknown" where it does not tell."""
    layers = getattr(config.compilation_config, "static_forward_context", {})
    names = {one.get_attn_backend().get_name() for one in layers.values() if hasattr(one, "get_attn_backend")}
    return ", ".join(sorted(names)) or "unknown"


class Vllm:
    """``settings``: model (a preset's name), folder (with its config.json), max_num_reqs, max_num_batched_tokens,
    max_model_len, kv_bytes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._params = vllm.SamplingParams
        model = PRESETS[settings["model"]]
        self._vocab_size = model.vocab_size
        self.llm = vllm.LLM(
            model=settings["folder"],
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=model.dtype,
            seed=0,
            max_num_seqs=settings["max_num_reqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"],
            # Given its bytes, it does not measure what else is on the GPU: the other engines are.
            kv_cache_memory_bytes=settings["kv_bytes"],
            gpu_memory_utilization=0.1,
            enable_prefix_caching=False,
            async_scheduling=True,
        )
        count = self.llm.apply_model(normal_parameters)
        config = self.llm.llm_engine.vllm_config
        self.facts: dict[str, Any] = {
            "parameters": count[0],
            "uses_mrv2": bool(config.use_v2_model_runner),
            "graphs": str(config.compilation_config.cudagraph_mode),
            "compilation": str(config.compilation_config.mode),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "attention": attention(config),
        }
        wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
        if self.facts["uses_mrv2"] != wanted:
            raise RuntimeError(f"vLLM did not take the runner that was asked for: MRV2 is {not wanted}")

    def prepare(self, workload: RaceWorkload, sampling: str, repetition: int) -> tuple[list[Any], list[Any]]:
        """See :class:`mrv2lab.bench.engine_child.Contestant`."""
        prompts = [{"prompt_token_ids": ids} for ids in workload.prompts(repetition, self._vocab_size)]
        params = [
            self._params(
                max_tokens=workload.output_len, ignore_eos=True, detokenize=False, **sampling_of(sampling, number)
            )
            for number in range(workload.requests)
        ]
        return prompts, params

    def generate(self, prepared: tuple[list[Any], list[Any]]) -> list[list[int]]:
        """See :class:`mrv2lab.bench.engine_child.Contestant`."""
        made = self.llm.generate(*prepared, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in made]


def build(settings: dict[str, Any]) -> Vllm:
    """The engine, ready for its first request."""
    return Vllm(settings)
