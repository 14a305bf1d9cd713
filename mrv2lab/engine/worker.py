"""The model side's shell: owns the KV tensors and the decoder, exposes ``execute_model`` and ``sample_tokens``.

Counterpart in vLLM: ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

import torch

from mrv2lab.attention import make_attention_builder
from mrv2lab.config import EngineConfig
from mrv2lab.model.decoder import Decoder
from mrv2lab.protocol import AsyncModelRunnerOutput, MRV2SchedulerOutput
from mrv2lab.runner import ModelRunner
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
        self.runner = ModelRunner(config, rt, decoder, make_attention_builder(rt))

    def execute_model(self, output: MRV2SchedulerOutput) -> bool:
        """Queue a step up to the hidden states; False if it has no tokens."""
        with torch.inference_mode(), self.rt.active():
            return self.runner.execute_model(output)

    def sample_tokens(self) -> AsyncModelRunnerOutput:
        """Queue sampling; returns the output on its way."""
        with torch.inference_mode(), self.rt.active():
            return self.runner.sample_tokens()

    def reset(self) -> None:
        """Drop queued work and every request's row."""
        self.rt.reset()
        self.runner.reset()
