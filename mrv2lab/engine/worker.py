"""The model side's shell: owns the KV tensors and the decoder, and one of the two runners.

Counterpart in vLLM: ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from mrv2lab.attention import make_attention_builder
from mrv2lab.config import EngineConfig
from mrv2lab.model.decoder import Decoder
from mrv2lab.protocol import AsyncModelRunnerOutput, GrammarOutput
from mrv2lab.runner import ModelRunner
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runtime.base import Runtime


class Worker:
    """One device's share of the work: here, all of it."""

    def __init__(self, config: EngineConfig, rt: Runtime, weights: dict[str, torch.Tensor]) -> None:
        self.rt = rt
        model = config.model
        decoder = Decoder(
            model,
            weights,
            rt,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            max_num_logits=min(config.scheduler.max_num_reqs, config.scheduler.max_num_batched_tokens),
        )
        shape = (config.cache.num_blocks, config.cache.block_size, model.num_key_value_heads, model.head_dim)
        dtype = getattr(torch, model.dtype)
        # a layer: key and value cache, each [blocks, block_size, Hk, D]; block 0 is the null block
        self.kv_caches = [
            (rt.zeros(shape, dtype, name=f"key_cache.{i}"), rt.zeros(shape, dtype, name=f"value_cache.{i}"))
            for i in range(model.num_hidden_layers)
        ]
        decoder.bind_kv_cache(self.kv_caches)
        self.decoder = decoder
        kind = {"mrv2": ModelRunner, "v1": ModelRunnerV1}[config.runner.runner]
        self.runner: Any = kind(config, rt, decoder, make_attention_builder(rt))
        """``ModelRunner`` or ``ModelRunnerV1``: whoever looks inside knows which."""

    def execute_model(self, output: Any) -> bool:
        """Queue a step up to the hidden states; False if it has no tokens. ``output`` is the runner's own message."""
        with torch.inference_mode(), self.rt.active():
            launched: bool = self.runner.execute_model(output)
            return launched

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        """Queue sampling, of structured requests behind their masks; returns the output on its way."""
        masks = () if grammar is None else (grammar,)
        with torch.inference_mode(), self.rt.active():
            output: AsyncModelRunnerOutput = self.runner.sample_tokens(*masks)
            return output

    def reset(self) -> None:
        """Drop queued work and every request's row."""
        self.rt.reset()
        self.runner.reset()
