"""transformers' continuous batching in the race. It has no seeds for single requests, so it runs greedy workloads.

Its speed is its attention's: FlashAttention 3 or 2 where installed; else FlashAttention 3 as vLLM ships it, where that
is importable (``engine_flash``); else its own paged attention over torch's, which is an order of magnitude slower.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mrv2lab.bench.engine_vllm import normal_parameters
from mrv2lab.bench.engine_workloads import LARGE, RaceWorkload
from mrv2lab.config import PRESETS

WAIT_S = 300


def versions() -> dict[str, str]:
    """Of what it is made of. Raises ``ImportError`` where a transformers with continuous batching is not installed."""
    importlib.import_module("transformers.generation.continuous_batching")
    return {name: str(importlib.import_module(name).__version__) for name in ("transformers", "torch")}


def attention() -> str:
    """The fastest attention here, by transformers' name."""
    for package, name in (("flash_attn_interface", "flash_attention_3"), ("flash_attn", "flash_attention_2")):
        if importlib.util.find_spec(package) is not None:
            return name
    try:
        importlib.import_module("mrv2lab.bench.engine_flash").install()
        return "flash_attention_3"
    except (ImportError, OSError, RuntimeError):
        return "sdpa"


class Transformers:
    """``settings``: model (a preset's name), folder (with its config.json), max_num_batched_tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        config: Any = importlib.import_module("transformers.generation.configuration_utils")
        batching: Any = importlib.import_module("transformers.generation.continuous_batching.utils")
        preset = PRESETS[settings["model"]]
        self._vocab_size = preset.vocab_size
        kind = attention()
        dtype = getattr(torch, preset.dtype)
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(settings["folder"]),
                dtype=dtype,
                attn_implementation=f"paged|{kind}",
            )
        self.model = model.to(dtype).cuda().eval()
        count = normal_parameters(self.model)
        generation = transformers.GenerationConfig(
            max_new_tokens=max(workload.output_len for workload in LARGE.values()),
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            use_cache=True,
        )
        hints = batching.WorkloadHints(
            max_prompt_length=max(workload.prompt_len for workload in LARGE.values()),
            max_generated_length=max(workload.output_len for workload in LARGE.values()),
            num_requests=max(workload.requests for workload in LARGE.values()),
        )
        self._context = self.model.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=config.ContinuousBatchingConfig(
                max_memory_percent=0.2,
                allow_block_sharing=False,
                max_batch_tokens=settings["max_num_batched_tokens"],
            ),
            workload_hints=hints,
            timeout=5,
        )
        with torch.no_grad():
            self.manager = self._context.__enter__()
        self.facts: dict[str, Any] = {"attention": kind, "parameters": count}

    def prepare(self, workload: RaceWorkload, sampling: str, repetition: int) -> tuple[list[list[int]], int]:
        """See :class:`mrv2lab.bench.engine_child.Contestant`. Raises ``ValueError`` for seeded requests."""
        if sampling != "greedy":
            raise ValueError("continuous batching has no seeds for single requests")
        return workload.prompts(repetition, self._vocab_size), workload.output_len

    def generate(self, prepared: tuple[list[list[int]], int]) -> list[list[int]]:
        """See :class:`mrv2lab.bench.engine_child.Contestant`."""
        prompts, output_len = prepared
        ids = self.manager.add_requests(inputs=prompts, max_new_tokens=output_len)
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(ids):
            result = self.manager.get_result(timeout=WAIT_S)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching gave up: {'no output' if result is None else result.error}")
            if result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[request_id] for request_id in ids]


def build(settings: dict[str, Any]) -> Transformers:
    """The engine, ready for its first request."""
    return Transformers(settings)
