"""What one step costs the host, phase by phase, and what it allocates.

``python -m mrv2lab.bench.step_bench --device cpu --out FILE``   the shipped model, 8 requests, lag 0
``python -m mrv2lab.bench.step_bench --device cuda --out FILE``  Qwen3-0.6B's shape, random weights, decode steps
``... --graphs full_decode_only``                                  the same with the forward pass replayed from a graph
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from tqdm.auto import tqdm

from mrv2lab.bench.result import summary, write_result
from mrv2lab.config import QWEN3_0_6B, GraphMode
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import PHASES, Observer
from mrv2lab.protocol import SamplingParams

PREPARATION_PHASES = frozenset(PHASES) - {"schedule", "forward", "logits", "wait_output", "update_from_output"}
"""What must not grow with the number of requests: no Python per request in it."""
WAIT_PHASES = frozenset({"wait_output", "barrier_wait"})


class PhaseTimer(Observer):
    """Times spans and leaves the chokepoints unmarked, so that the marks' own cost stays out of the figures."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._step: dict[str, int] = defaultdict(int)

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._step[name] += time.perf_counter_ns() - start

    def end_step(self, total_ns: int) -> None:
        """Close the step's account."""
        self.steps.append({**self._step, "step": total_ns})
        self._step = defaultdict(int)


class WaitTimer(Observer):
    """Times the waits alone: timing every phase would cost a step a twentieth of what it takes."""

    def __init__(self) -> None:
        self.waited = 0
        """Nanoseconds."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        return self._timed() if name in WAIT_PHASES else super().span(name)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        self.waited += time.perf_counter_ns() - start


def whole_steps(engine: Engine, steps: int) -> dict[str, Any]:
    """Microseconds of ``steps`` decode steps as wholes: ``step``, and ``host``, which is a step without its waits."""
    walls, hosts = [], []
    engine.observer = timer = WaitTimer()
    for _ in range(steps):
        waited, start = timer.waited, time.perf_counter_ns()
        engine.step()
        wall = time.perf_counter_ns() - start
        walls.append(wall / 1e3)
        hosts.append((wall - timer.waited + waited) / 1e3)
    engine.observer = Observer()
    return {"step": summary(walls), "host": summary(hosts)}


def start_decodes(engine: Engine, num_requests: int, prompt_len: int, max_tokens: int, temperature: float) -> None:
    """Submit ``num_requests`` prompts and step until every one decodes."""
    vocab = engine.config.model.vocab_size
    for i in range(num_requests):
        length = prompt_len - i % 16  # so that block boundaries are crossed a few at a time
        prompt = [(17 * i + 3 * j) % vocab for j in range(length)]
        engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=i))
    while any(not output.token_ids for output in engine.requests.values() if not output.finished):
        engine.step()


def time_steps(engine: Engine, steps: int) -> dict[str, Any]:
    """Host microseconds of ``steps`` decode steps, by phase; the sum ``preparation`` leaves out schedule, forward,
    logits, wait_output and update_from_output."""
    timer = PhaseTimer()
    engine.observer = timer
    for _ in range(steps):
        start = time.perf_counter_ns()
        engine.step()
        timer.end_step(time.perf_counter_ns() - start)
    engine.observer = Observer()
    names = dict.fromkeys(name for step in timer.steps for name in step)
    figures = {name: summary([step.get(name, 0) / 1e3 for step in timer.steps]) for name in names}
    figures["preparation"] = summary(
        [sum(ns for name, ns in step.items() if name in PREPARATION_PHASES) / 1e3 for step in timer.steps]
    )
    return figures


def allocations(engine: Engine, steps: int) -> dict[str, float]:
    """New device and pinned blocks (from the driver) a step, and allocator requests a step, over ``steps`` steps."""
    before = _counts()
    for _ in range(steps):
        engine.step()
    after = _counts()
    return {name: (after[name] - before[name]) / steps for name in before}


def _counts() -> dict[str, int]:
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return {
        "new_device_blocks": device["num_device_alloc"],
        "new_pinned_blocks": host["num_host_alloc"],
        "device_allocator_requests": device["allocation.all.allocated"],
        "pinned_allocator_requests": host["active_requests.allocated"],
    }


PREPARATION_KERNELS = (
    "prepare_decode",
    "prefill_inputs",
    "pos_seq_lens",
    "combine_tokens",
    "gather_block_tables",
    "slot_mapping",
)


def kernel_times(engine: Engine, steps: int) -> dict[str, float]:
    """Device microseconds a step of every Triton kernel by name, and of the preparation kernels together."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        totals[event.key] += float(event.self_device_time_total) / steps
    known = {name: us for name, us in totals.items() if name.endswith("_kernel") and us > 0}
    known["preparation_kernels"] = sum(
        us for name, us in known.items() if name.removesuffix("_kernel") in PREPARATION_KERNELS
    )
    known["all_device_work"] = sum(totals.values())
    return known


def bench_cpu(steps: int) -> dict[str, Any]:
    """The shipped model at 8 requests with lag 0, on one thread (a second gains it nothing)."""
    figures: dict[str, Any] = {"threads": 1, "model": "tiny", "requests": 8, "lag": 0}
    for temperature in (0.0, 1.0):
        with Engine("tiny", device="cpu", lag=0, num_blocks=1024, threads=1) as engine:
            start_decodes(engine, 8, 32, 512, temperature)
            for _ in range(10):
                engine.step()
            figures[f"temperature_{temperature:g}_us"] = time_steps(engine, steps)
            figures[f"temperature_{temperature:g}_whole_us"] = whole_steps(engine, steps)
    return figures


CASES = [(count, label) for count in (1, 64, 256) for label in ("greedy", "sampled")]


def bench_cuda(steps: int, graphs: GraphMode, fused: bool, caching: bool) -> dict[str, Any]:
    """Qwen3-0.6B's shape in bfloat16: whole steps, phases and allocations at 1, 64 and 256 requests, kernels at 1 and
    256."""
    figures: dict[str, Any] = {
        "model": QWEN3_0_6B.name,
        "prompt_len": 128,
        "graphs": graphs,
        "fused_prepare": fused,
        "prefix_caching": caching,
        "requests": {str(count): {} for count, _ in CASES},
    }
    with Engine(
        QWEN3_0_6B,
        device="cuda",
        num_blocks=8192,
        max_num_reqs=1024,
        max_num_batched_tokens=4096,
        cudagraph_mode=graphs,
        fused_prepare=fused,
        enable_prefix_caching=caching,
        warm_up=False,
    ) as engine:
        for count, label in tqdm(CASES, desc="host"):
            with decoding(engine, count, label):
                figures["requests"][str(count)][label] = {
                    "whole_us": whole_steps(engine, steps),
                    "host_us": time_steps(engine, steps),
                    "allocations": allocations(engine, 32),
                }
        # Last: once PyTorch's profiler has run, every CUDA call of the process takes longer, a graph's launch 5 times.
        for count, label in tqdm([case for case in CASES if case[0] != 64], desc="device"):
            with decoding(engine, count, label):
                figures["requests"][str(count)][label]["device_us"] = kernel_times(engine, 16)
    for label in ("greedy", "sampled"):
        many, few = (figures["requests"][n][label]["host_us"]["preparation"]["median"] for n in ("256", "64"))
        figures[f"preparation_256_over_64_{label}"] = many / few
    return figures


@contextmanager
def decoding(engine: Engine, count: int, label: str) -> Iterator[None]:
    """``count`` requests in the middle of their outputs; dropped behind the ``with``."""
    start_decodes(engine, count, 128, 320, 0.0 if label == "greedy" else 1.0)
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    yield
    engine.reset()


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 100,
    graphs: Annotated[str, typer.Option(help="GPU: cudagraph_mode of the engine.")] = "none",
    fused: Annotated[bool, typer.Option(help="GPU: prepare a step in one launch.")] = True,
    caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="GPU: hash full blocks.")
    ] = True,
) -> None:
    """Run the benchmark for one device."""
    figures = bench_cuda(steps, cast(GraphMode, graphs), fused, caching) if device == "cuda" else bench_cpu(steps)
    write_result(out, f"step_{device}", figures)
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
