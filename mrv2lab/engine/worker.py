"""The model side's shell: owns the KV tensors and the decoder, and one of the two runners.

Counterpart in vLLM: ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

import dataclasses
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from mrv2lab.attention import make_backend
from mrv2lab.config import EngineConfig
from mrv2lab.engine.kv_cache_config import KVCacheConfig, make_kv_cache_config, resolve_kv_cache
from mrv2lab.engine.kv_layout import layer_to_group
from mrv2lab.engine.warm_up import BLOCKS, WarmUp, first_use, largest_step, warm_up
from mrv2lab.graphs.out_of_memory import remedy
from mrv2lab.model.decoder import Decoder, KVCache
from mrv2lab.protocol import AsyncModelRunnerOutput, GrammarOutput
from mrv2lab.runner import ModelRunner
from mrv2lab.runner.dummy import unobserved
from mrv2lab.runner.profile_memory import MemoryProfile, profile_memory
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runtime.base import Runtime


class Worker:
    """One device's share of the work: here, all of it.

    Building one sizes the KV cache (:mod:`mrv2lab.engine.kv_cache_config`), and, where the config asks for graphs,
    warms up and captures them. ``warm_up`` None = only where kernels are compiled, and graphs captured or the KV cache
    measured. ``progress`` draws bars meanwhile.
    Raises ``ValueError`` with the remedy for a KV cache that does not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        rt: Runtime,
        weights: dict[str, torch.Tensor],
        *,
        warm_up: bool | None = None,
        progress: bool = False,
    ) -> None:
        self.rt = rt
        self.turn = Turn(rt)
        """Around the calls of one turn of the engine's loop."""
        self.config = config
        """The engine's, its ``cache.num_blocks`` resolved."""
        self.warmed_up: WarmUp | None = None
        """The latest warm-up."""
        self.capture_report: Any = None
        """What the graphs cost; None = none were asked for."""
        model, scheduler = config.model, config.scheduler
        attention = make_backend(rt, config)
        self.decoder = Decoder(
            model,
            weights,
            rt,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_num_logits=min(scheduler.max_num_reqs, scheduler.max_num_batched_tokens),
            attention=attention,
            layer_to_group=layer_to_group(model),
        )
        kind: Any = {"mrv2": ModelRunner, "v1": ModelRunnerV1}[config.runner.runner]
        self.runner: Any = kind(config, rt, self.decoder, attention)
        """``ModelRunner`` or ``ModelRunnerV1``: whoever looks inside knows which."""
        compiled, graphs = rt.backend == "triton", config.graphs.cudagraph_mode != "none"
        self._warm_profile = wants_warm_up(warm_up, compiled=compiled, needed=True)
        self._progress = progress
        self.kv_cache_config: KVCacheConfig = resolve_kv_cache(config, rt, self._profile)
        num_blocks = self.kv_cache_config.num_blocks
        self.config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, num_blocks=num_blocks))
        # a layer: key and value cache, each [blocks, block_size, Hk, D]; block 0 is the null block
        self.kv_caches = self._make_kv_caches(self.kv_cache_config)
        self.decoder.bind_kv_cache(self.kv_caches)
        if self.warmed_up is None and wants_warm_up(warm_up, compiled=compiled, needed=graphs):
            self.warm_up(progress=progress)
        if graphs:
            self.runner.graphs.remedy = remedy(config.cache)
            with self.turn:
                self.capture_report = self.runner.warm_up_and_capture(progress=progress)

    def _make_kv_caches(self, size: KVCacheConfig, prefix: str = "") -> list[KVCache]:
        dtype = getattr(torch, self.config.model.dtype)
        pairs = [
            (
                self.rt.zeros(size.shape, dtype, name=f"{prefix}key_cache.{i}"),
                self.rt.zeros(size.shape, dtype, name=f"{prefix}value_cache.{i}"),
            )
            for i in range(size.num_tensors)
        ]
        return [pairs[i] for i in size.tensor_of_layer]

    def _profile(self) -> MemoryProfile:
        """Measure over a KV cache of a few blocks that goes again, once everything of first use is there: after a
        warm-up where kernels are compiled, which takes memory too, else after a few requests that wish for all."""
        config = self.config
        small = make_kv_cache_config(config, 1 + BLOCKS, None)
        self.kv_caches = self._make_kv_caches(small, "profile.")
        self.decoder.bind_kv_cache(self.kv_caches)
        try:
            if self._warm_profile:
                self.warm_up(progress=self._progress)
            else:
                first_use(self, config)
            with unobserved(self.rt):
                return profile_memory(
                    self.rt,
                    self._largest_step,
                    utilization=config.cache.gpu_memory_utilization,
                    total=config.cache.memory_bytes,
                    graphs=self._graph_estimate(),
                    without=small.nbytes,
                )
        finally:
            # Caches of no block, so that nobody holds the profile's.
            self.kv_caches = self._make_kv_caches(make_kv_cache_config(config, 0, None), "no.")
            self.decoder.bind_kv_cache(self.kv_caches)

    def _largest_step(self) -> None:
        if self.rt.device.type != "cuda":
            return  # temporaries are not modelled, and of a large model it would take minutes
        self.runner.dummy_run(largest_step(self.config.scheduler))

    def _graph_estimate(self) -> int:
        """Device memory of the graphs to come: a CUDA graph keeps its launches' arguments and little else."""
        if self.rt.device.type != "cuda":
            return 0
        graphs = self.runner.graphs
        shapes = graphs.table.candidates() if isinstance(self.runner, ModelRunner) else graphs.dispatcher.to_capture()
        return len(shapes) * 8 * self.config.model.num_hidden_layers * BYTES_A_LAUNCH

    def warm_up(self, *, progress: bool = True) -> WarmUp:
        """Run small requests of every kind, so that no later one meets a compilation; nothing of them is left in the
        tables. Only while no request is there."""
        self.warmed_up = warm_up(self, self.config, progress=progress)
        return self.warmed_up

    def execute_model(self, output: Any) -> bool:
        """Queue a step up to the hidden states; False if it has no tokens. ``output`` is the runner's own message."""
        with self.turn:
            launched: bool = self.runner.execute_model(output)
            return launched

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        """Queue sampling, of structured requests behind their masks; returns the output on its way."""
        masks = () if grammar is None else (grammar,)
        with self.turn:
            output: AsyncModelRunnerOutput = self.runner.sample_tokens(*masks)
            return output

    def reset(self) -> None:
        """Drop queued work, every request's row, and what is known of steps, whose numbers begin anew."""
        self.turn.leave()
        self.rt.reset()
        self.runner.reset()
        self.runner.graphs.stats.reset()


class Turn(threading.local):
    """PyTorch's inference mode and the runtime's streams, entered once around calls that each need them: entering costs
    tens of microseconds. Reentrant, in each thread for itself, as these two are."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._depth = 0
        self._entered: tuple[AbstractContextManager[Any], ...] = ()

    def __enter__(self) -> None:
        if not self._depth:
            inference: Any = torch.inference_mode()
            inference.__enter__()
            try:
                active = self._rt.active()
                active.__enter__()
            except BaseException:
                inference.__exit__(None, None, None)
                raise
            self._entered = active, inference
        self._depth += 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            (active, inference), self._entered = self._entered, ()
            try:
                active.__exit__(*error)
            finally:
                inference.__exit__(*error)

    def leave(self) -> None:
        """Outside a turn: leave what an interrupt of ``__exit__`` itself has left entered."""
        if self._depth:
            self._depth = 1
            self.__exit__(None, None, None)


def wants_warm_up(asked: bool | None, *, compiled: bool, needed: bool) -> bool:
    """Whether to warm up: as ``asked``; None = where kernels are compiled, if it is ``needed``, since a capture may
    compile nothing and kernels take memory that a profile must see."""
    return compiled and needed if asked is None else asked


BYTES_A_LAUNCH = 8 << 10
"""Of a captured CUDA graph, rounded up."""
