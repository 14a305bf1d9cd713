"""What penalties cost a step against the length of the outputs: V1 counts everything again, MRV2 adds one token.

V1 pads all output ids on the host, copies them and counts them on the device; MRV2 adds the step's token to counts that
live there, and reads them. Both through their runners' own code, timed on the host until the device is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2lab.config import RunnerConfig
from mrv2lab.ops.count_tokens import count_sampled
from mrv2lab.ops.penalties import apply_penalties
from mrv2lab.runner_v1 import penalties as v1
from mrv2lab.runtime import make_runtime
from mrv2lab.runtime.base import Runtime

PENALTIES = (1.1, 0.2, 0.1)
"""Repetition, frequency, presence."""
PROMPT = 32
LENGTHS = {"cuda": (64, 256, 1024, 4096, 16384), "cpu": (64, 256, 1024, 4096, 16384)}


def penalties_by_length(
    device: str = "cpu",
    *,
    lengths: tuple[int, ...] | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """A row for each of ``lengths`` (tokens of output, everybody's) and implementation: ``output_len``, ``rows``,
    ``vocab``, ``impl`` (mrv2lab, mrv2lab v1), and ``median_us``, ``iqr_us`` and quartiles of a step's penalties.

    None: the device's :data:`LENGTHS`; 256 x 151,936 on a GPU, 8 x 2,048 on a CPU. Outputs are of 256 different tokens,
    as texts repeat theirs. Raises ``ValueError`` for fewer than two repeats.
    """
    if repeats < 2:
        raise ValueError(f"repeats must be at least 2, got {repeats}")
    on_gpu = device == "cuda"
    rows = rows if rows is not None else 256 if on_gpu else 8
    vocab = vocab if vocab is not None else 151_936 if on_gpu else 2048
    found = []
    with torch.inference_mode():
        for length in lengths if lengths is not None else LENGTHS[device]:
            rt = make_runtime(RunnerConfig(device=device))
            try:
                outputs = np.random.default_rng(length).integers(0, min(vocab, 256), (rows, length))
                steps = {"mrv2lab": _mrv2(rt, outputs, vocab), "mrv2lab v1": _v1(rt, outputs, vocab)}
                for impl, times in _turns(rt, steps, repeats).items():
                    low, median, high = statistics.quantiles(times, n=4)
                    found.append(
                        {"output_len": length, "rows": rows, "vocab": vocab, "impl": impl, "median_us": median,
                         "iqr_us": high - low, "q1_us": low, "q3_us": high}
                    )  # fmt: skip
            finally:
                rt.close()
    return found


def _turns(rt: Runtime, steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {impl: [] for impl in steps}
    for repeat in range(repeats + 2):
        for impl, step in steps.items():
            rt.synchronize()
            begin = time.perf_counter_ns()
            step()
            rt.synchronize()
            if repeat >= 2:
                taken[impl].append((time.perf_counter_ns() - begin) / 1e3)
    return taken


def _mrv2(rt: Runtime, outputs: Any, vocab: int) -> Callable[[], None]:
    rows = len(outputs)
    made = {
        "logits": torch.randn((rows, vocab), generator=torch.Generator().manual_seed(0)),
        "idx_mapping": torch.randperm(rows, generator=torch.Generator().manual_seed(0)).int(),
        "local_pos": torch.zeros(rows, dtype=torch.int32),
        "logits_indices": torch.arange(rows),
        "input_ids": torch.zeros(rows, dtype=torch.int32),
        "prompt_bin_mask": torch.full((rows, -(-vocab // 32)), 1, dtype=torch.int32),
        "output_bin_counts": torch.from_numpy(np.stack([np.bincount(row, minlength=vocab) for row in outputs])).int(),
        "sampled": torch.from_numpy(outputs[:, :1].copy()),
        "num_sampled": torch.ones(rows, dtype=torch.int32),
    }
    t = {name: rt.adopt(tensor, f"mrv2.{name}") for name, tensor in made.items()}
    each = [rt.adopt(torch.full((rows,), value), f"mrv2.penalty.{i}") for i, value in enumerate(PENALTIES)]

    def step() -> None:
        apply_penalties(
            rt, t["logits"], t["idx_mapping"], t["local_pos"], t["logits_indices"], t["input_ids"], *each,
            t["prompt_bin_mask"], t["output_bin_counts"],
        )  # fmt: skip
        count_sampled(rt, t["idx_mapping"], t["sampled"], t["num_sampled"], *each, t["output_bin_counts"])

    return step


def _v1(rt: Runtime, outputs: Any, vocab: int) -> Callable[[], None]:
    rows = len(outputs)
    ids: list[list[int] | None] = [row.tolist() for row in outputs]
    sender = v1.OutputTokenIds(rt)
    logits = rt.adopt(torch.randn((rows, vocab), generator=torch.Generator().manual_seed(0)), "v1.logits")
    prompts = rt.adopt(torch.from_numpy(outputs[:, :PROMPT].copy()), "v1.prompts")
    each = [rt.adopt(torch.full((rows,), value), f"v1.penalty.{i}") for i, value in enumerate(PENALTIES)]
    rt.register("bench.v1.penalties", v1.apply_penalties)

    def step() -> None:
        sent = sender.send(ids, vocab)
        rt.run("bench.v1.penalties", logits, sent, prompts, *each, reads=(sent, prompts, *each), writes=(logits,))

    return step
