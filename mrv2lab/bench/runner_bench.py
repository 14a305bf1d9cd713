"""V1 beside MRV2 in one run: host time by phase, copies, waits and row moves a step, in steady decode and under churn.

``python -m mrv2lab.bench.runner_bench --device cuda --out FILE``  Qwen3-0.6B's shape, random weights
``python -m mrv2lab.bench.runner_bench --device cpu --out FILE``   the shipped model, fewer requests

Two engines of the same weights stand side by side and take turns, a repetition each, so that the machine's moods fall
on both. Times come from a run that hears spans alone; counts from a short run that hears every chokepoint.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from tqdm.auto import tqdm

from mrv2lab.bench.result import summary, write_result
from mrv2lab.bench.step_bench import WAIT_PHASES, PhaseTimer
from mrv2lab.config import QWEN3_0_6B
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import NULL_OBSERVER, WAITS, EventLog
from mrv2lab.protocol import SamplingParams

RUNNERS: tuple[Literal["v1", "mrv2"], ...] = ("v1", "mrv2")
SHARED_PHASES = frozenset({"schedule", "forward", "logits", "update_from_output"})
"""The same code for both runners."""


class Load:
    """Keeps ``count`` requests decoding: ``steady`` ones that outlive the measurement, or ``churn``, where one ends and
    another comes every step (but one step in ``count`` + 1, since whoever comes starts a step later)."""

    def __init__(self, engine: Engine, count: int, prompt_len: int, kind: str, longest: int) -> None:
        self.engine = engine
        self.count = count
        self.prompt_len = prompt_len
        self.churn = kind == "churn"
        self._number = 0
        for i in range(count):
            self._submit(i + 2 if self.churn else longest)
        first = [output for output in engine.requests.values() if not output.finished]
        while not all(output.token_ids for output in first):  # those of a churn that came since may have none
            self.step()

    def _submit(self, max_tokens: int) -> None:
        vocab = self.engine.config.model.vocab_size
        prompt = [(17 * self._number + 3 * j) % vocab for j in range(self.prompt_len - self._number % 16)]
        self._number += 1
        self.engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    def step(self) -> None:
        """One turn of the engine; whoever ended in it is replaced before the next."""
        ended = sum(output.finished for output in self.engine.step())
        for _ in range(ended if self.churn else 0):
            self._submit(self.count)


def host_times(load: Load, steps: int) -> dict[str, float]:
    """Median host microseconds of ``steps`` steps, by phase; sub-spans are ``phase/detail`` and inside their phase."""
    timer = PhaseTimer()
    load.engine.observer = timer
    for _ in range(steps):
        start = time.perf_counter_ns()
        load.step()
        timer.end_step(time.perf_counter_ns() - start)
    load.engine.observer = NULL_OBSERVER
    names = dict.fromkeys(name for step in timer.steps for name in step)
    medians = {name: statistics.median(step.get(name, 0) / 1e3 for step in timer.steps) for name in names}
    own = [
        sum(us for name, us in step.items() if "/" not in name and name not in SHARED_PHASES | WAIT_PHASES | {"step"})
        for step in timer.steps
    ]
    medians["runner's own phases"] = statistics.median(ns / 1e3 for ns in own)
    return medians


def counts(load: Load, steps: int) -> dict[str, float]:
    """Means a step: copies to the device and their bytes, waits by name, gauges."""
    log = EventLog()
    load.engine.observer = log
    for _ in range(steps):
        load.step()
    load.engine.observer = NULL_OBSERVER
    totals: dict[str, float] = defaultdict(float)
    for mark in log.marks:
        if mark.kind == "h2d":
            totals["h2d copies"] += 1
            totals["h2d bytes"] += mark.nbytes
        elif mark.kind == "publish" and ".uva" in mark.name:
            totals["uva publishes"] += 1
            totals["uva bytes"] += mark.nbytes
        elif mark.kind in WAITS:
            totals[f"waits: {mark.kind}"] += 1
            totals["wait us"] += mark.wait_ns / 1e3
    for name, value in log.gauges:
        totals[name] += value
    return {name: total / steps for name, total in totals.items()}


def bench(device: str, repeats: int, steps: int) -> dict[str, Any]:
    """Both runners at every number of requests, steady and under churn."""
    on_gpu = device == "cuda"
    sizes, prompt_len = ((1, 16, 64, 256), 128) if on_gpu else ((1, 16, 64), 32)
    model: Any = QWEN3_0_6B if on_gpu else "tiny"
    longest = repeats * (steps + 4) + 64
    options: dict[str, Any] = {"num_blocks": 256 * (prompt_len + longest) // 16 + 512, "max_model_len": 2048}
    options |= {"max_num_reqs": 1024, "max_num_batched_tokens": 4096} if on_gpu else {"max_model_len": 1024}
    figures: dict[str, Any] = {"repeats": repeats, "steps": steps, "prompt_len": prompt_len}
    engines = {runner: Engine(model, runner, device=device, **options) for runner in RUNNERS}
    for kind in ("steady", "churn"):
        for count in tqdm(sizes, desc=kind):
            rows: dict[str, list[dict[str, float]]] = {runner: [] for runner in RUNNERS}
            loads = {runner: Load(engine, count, prompt_len, kind, longest) for runner, engine in engines.items()}
            for load in loads.values():
                for _ in range(4):
                    load.step()
            for _ in range(repeats):
                for runner, load in loads.items():
                    rows[runner].append(host_times(load, steps))
            for runner, load in loads.items():
                names = dict.fromkeys(name for row in rows[runner] for name in row)
                figures[f"{kind} {count} {runner}"] = {
                    "host_us": {name: summary([row.get(name, 0.0) for row in rows[runner]]) for name in names},
                    "a_step": counts(load, 8),
                }
                load.engine.reset()
    for engine in engines.values():
        engine.close()
    return figures


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    repeats: Annotated[int, typer.Option(help="Turns of each runner.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 16,
) -> None:
    """Run the comparison on one device."""
    write_result(out, f"runners_{device}", bench(device, repeats, steps))
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
