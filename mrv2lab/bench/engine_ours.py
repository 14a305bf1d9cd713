"""Our engine in the race, and, for V1 beside MRV2, under a load that is stepped window by window."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from mrv2lab import __version__
from mrv2lab.bench.engine_workloads import RaceWorkload, sampling_of
from mrv2lab.bench.runner_bench import Load, host_times
from mrv2lab.config import PRESETS, ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.model.load import LoadedModel
from mrv2lab.model.names import expected_shapes
from mrv2lab.protocol import SamplingParams

Prepared = tuple[list[list[int]], list[SamplingParams]]


def versions() -> dict[str, str]:
    """Of what it is made of."""
    return {"mrv2lab": __version__, "torch": str(torch.__version__)}


def normal_weights(config: ModelConfig, device: str, seed: int = 0, std: float = 0.02) -> LoadedModel:
    """Every matrix from N(0, ``std``), every norm 1: what the peers are given too. Logits then have some spread, which
    a sampler's work depends on."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights = {}
    for name, shape in expected_shapes(config).items():
        weight = torch.ones(shape, dtype=dtype, device=device)
        weights[name] = weight.normal_(0, std, generator=generator) if len(shape) > 1 else weight
    return LoadedModel(config, weights, None, f"{config.name} has random weights")


class SampledLoad(Load):
    """A load whose requests choose tokens in the race's way."""

    def __init__(self, engine: Engine, count: int, prompt_len: int, kind: str, longest: int, sampling: str) -> None:
        self.sampling = sampling
        super().__init__(engine, count, prompt_len, kind, longest)

    def step(self) -> None:
        """See :meth:`Load.step`."""
        self.turn()

    def turn(self) -> int:
        """A step; how many tokens it brought."""
        outputs = self.engine.step()
        if self.churn:
            for _ in range(sum(output.finished for output in outputs)):
                self._submit(self.count)
        return sum(len(output.new_token_ids) for output in outputs)

    def _submit(self, max_tokens: int) -> None:
        vocab = self.engine.config.model.vocab_size
        prompt = [(17 * self._number + 3 * j) % vocab for j in range(self.prompt_len - self._number % 16)]
        chosen = sampling_of(self.sampling, self._number)
        self._number += 1
        self.engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **chosen))


class Ours:
    """``settings``: model (a preset's name or "tiny"), device, runner, and options of the engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        name, device = settings["model"], settings["device"]
        model: Any = normal_weights(PRESETS[name], device) if name in PRESETS else name
        options = dict(settings["options"])
        if settings["runner"] == "mrv2":
            options.setdefault("fused_prepare", True)
        self.engine = Engine(model, settings["runner"], device, **options)
        gc.collect()
        gc.freeze()  # as vLLM's engine does: what outlives every request is not searched again
        self._load: SampledLoad | None = None
        config, worker = self.engine.config, self.engine.worker
        graphs: Any = worker.runner.graphs
        self.facts: dict[str, Any] = {  # what runs, not what was asked for, which options say
            "backend": self.engine.rt.backend,
            "transfer": config.runner.transfer,
            "attention": worker.decoder.attention.name,
            "graphs": (graphs.dispatcher if settings["runner"] == "v1" else graphs.table).mode,
            "num_blocks": config.cache.num_blocks,
            "block_size": config.cache.block_size,
            "options": options,
        }
        capture = self.engine.worker.capture_report
        if capture is not None:
            self.facts |= {
                "graph_shapes": len(capture.captured),
                "graph_bytes": capture.nbytes,
                "capture_s": capture.seconds,
                "without_graph": {str(shape): why for shape, why in capture.dropped.items()},
            }
        if device == "cuda":
            self.facts["device_MiB"] = torch.cuda.memory_reserved() / 2**20

    def prepare(self, workload: RaceWorkload, sampling: str, repetition: int) -> Prepared:
        """See :class:`mrv2lab.bench.engine_child.Contestant`."""
        prompts = workload.prompts(repetition, self.engine.config.model.vocab_size)
        params = [
            SamplingParams(max_tokens=workload.output_len, ignore_eos=True, **sampling_of(sampling, number))
            for number in range(workload.requests)
        ]
        return prompts, params

    def generate(self, prepared: Prepared) -> list[list[int]]:
        """See :class:`mrv2lab.bench.engine_child.Contestant`."""
        return [output.token_ids for output in self.engine.generate(*prepared)]

    # -- V1 beside MRV2 ------------------------------------------------------------------------------------------------

    def load(self, count: int, prompt_len: int, kind: str, longest: int, sampling: str) -> dict[str, Any]:
        """Put ``count`` requests to decoding; see :class:`Load`."""
        self._load = SampledLoad(self.engine, count, prompt_len, kind, longest, sampling)
        for _ in range(4):
            self._load.step()
        return {}

    def window(self, steps: int) -> dict[str, Any]:
        """Seconds and tokens of ``steps`` steps that nobody watches."""
        load = self._running()
        tokens, start = 0, time.perf_counter()
        for _ in range(steps):
            tokens += load.turn()
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def phases(self, steps: int) -> dict[str, Any]:
        """Median host microseconds of ``steps`` steps, by phase."""
        return host_times(self._running(), steps)

    def unload(self) -> dict[str, Any]:
        """Drop every request."""
        self._load = None
        self.engine.reset()
        return {}

    def _running(self) -> SampledLoad:
        if self._load is None:
            raise RuntimeError("no load is running")
        return self._load


def build(settings: dict[str, Any]) -> Ours:
    """The engine, ready for its first request."""
    return Ours(settings)
