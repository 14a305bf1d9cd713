"""What each safe transfer policy costs a step, and what the barrier waits, on both runners in one run.

``python -m mrv2lab.bench.policy_bench --device cuda --out FILE``  Qwen3-0.6B's shape, 64 requests that decode, eager
``python -m mrv2lab.bench.policy_bench --device cpu --out FILE``   the shipped model; device times and waits modelled

Six engines, a policy of a runner each, stand side by side and take turns in every case:

* ``host-bound``: the model alone, whose launches take the host longer than the device.
* ``device-bound``: a stand-in of ``stand_in_ms`` behind each step's sampler, in front of its output: a larger model.
* ``late copies``: the same stand-in in front of each step's copies, so behind the output that the host waits for:
  a device that is late for this host alone, as another rank of a tensor-parallel group may be.

Times come from turns that hear spans alone; counts from a short run that hears every chokepoint.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm

from mrv2lab.bench.result import summary, write_result
from mrv2lab.bench.runner_bench import RUNNERS, Load, counts
from mrv2lab.bench.stand_in import StandIn
from mrv2lab.config import QWEN3_0_6B, TransferName
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import NULL_OBSERVER, Observer
from mrv2lab.runtime.cpu import CpuRuntime

POLICIES: tuple[TransferName, ...] = ("barrier", "pinned_copy", "uva_pool")
"""The safe ones."""
CASES = ("host-bound", "device-bound", "late copies")
SPANS = ("barrier_wait", "wait_output", "update_states", "apply_writes", "prepare_inputs")
PREPARATION = ("apply_writes", "prepare_inputs")
COUNTED = 8
"""Steps of the run that counts."""
WARM_UP = 3


class StepTimer(Observer):
    """Times spans by the runtime's clock, and calls ``before_copies`` where a step begins to edit its state."""

    def __init__(self, now: Callable[[], int], before_copies: Callable[[], None] | None = None) -> None:
        self._now = now
        self._before_copies = before_copies
        self._step: dict[str, int] = defaultdict(int)
        self.steps: list[dict[str, int]] = []
        """Nanoseconds by span, and of the whole ``step``; one dictionary a step."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Observer.span`."""
        if name == "update_states" and self._before_copies is not None:
            self._before_copies()
        return self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._step[name] += self._now() - start

    def end_step(self, total_ns: int) -> None:
        """Close the step's account."""
        self.steps.append({**self._step, "step": total_ns})
        self._step = defaultdict(int)


class Bench:
    """One engine under load, to be timed in any case. ``stand_in_ms``: length of the stand-in, in milliseconds."""

    def __init__(self, engine: Engine, requests: int, prompt_len: int, steps: int, stand_in_ms: float) -> None:
        self.engine = engine
        self.stand_in = StandIn(engine.rt, stand_in_ms)
        # A software stream's waits take modelled time, which only its own clock shows.
        rt = engine.rt
        self._now: Callable[[], int] = rt.clock.now if isinstance(rt, CpuRuntime) else time.perf_counter_ns
        self._load = Load(engine, requests, prompt_len, "steady", steps)

    def times(self, case: str, steps: int) -> dict[str, float]:
        """Median microseconds of a step and of its spans; ``preparation`` is apply_writes and prepare_inputs."""
        late = self.stand_in.queue if case == "late copies" else None
        timer = StepTimer(self._now, late)
        self._enter(case)
        self.engine.observer = timer
        for _ in range(WARM_UP):  # the first ones still settle steps of another case
            self._load.step()
        timer.end_step(0)
        timer.steps.clear()
        for _ in range(steps):
            start = self._now()
            self._load.step()
            timer.end_step(self._now() - start)
        self.engine.observer = NULL_OBSERVER
        for step in timer.steps:
            step["preparation"] = sum(step.get(name, 0) for name in PREPARATION)
        names = (*SPANS, "preparation", "step")
        return {name: statistics.median(step.get(name, 0) / 1e3 for step in timer.steps) for name in names}

    def counts(self) -> dict[str, float]:
        """Means a step, see :func:`mrv2lab.bench.runner_bench.counts`; the same in every case."""
        self._enter("host-bound")
        return counts(self._load, COUNTED)

    def _enter(self, case: str) -> None:
        if case not in CASES:
            raise ValueError(f"case must be one of {CASES}, got {case!r}")
        # The hook lies behind the sampler and in front of the output's copy, in both runners.
        self.engine.worker.runner.force = (lambda ids, sampled: self.stand_in.queue()) if "device" in case else None


def bench(
    device: str,
    repeats: int,
    steps: int,
    *,
    requests: int | None = None,
    cases: tuple[str, ...] = CASES,
    progress: bool = True,
) -> dict[str, Any]:
    """Every policy of both runners in every case: ``figures["cases"][case]["RUNNER POLICY"]``."""
    on_gpu = device == "cuda"
    count = requests or (64 if on_gpu else 8)
    prompt_len, stand_in_ms = (128, 20.0) if on_gpu else (32, 20.0)
    model: Any = QWEN3_0_6B if on_gpu else "tiny"
    length = len(cases) * repeats * (steps + WARM_UP) + COUNTED + 8
    options: dict[str, Any] = {
        "num_blocks": count * ((prompt_len + length) // 16 + 2),
        # As wide as one runs them: V1 copies whole rows of its block table.
        "max_model_len": 2048 if on_gpu else 1024,
        "max_num_reqs": max(count, 256) if on_gpu else count,
        "max_num_batched_tokens": 4096 if on_gpu else count * prompt_len,
    }
    figures: dict[str, Any] = {
        "model": QWEN3_0_6B.name if on_gpu else "tiny",
        "modelled": not on_gpu,
        "requests": count,
        "repeats": repeats,
        "steps": steps,
        "stand_in_ms": stand_in_ms,
        "a_step": {},
        "cases": {},
    }
    engines: dict[str, Engine] = {}
    try:
        for runner in RUNNERS:
            for policy in POLICIES:
                engine = Engine(model, runner, device=device, transfer=policy, **options)
                engines[f"{runner} {policy}"] = engine
        benches = {name: Bench(engine, count, prompt_len, length, stand_in_ms) for name, engine in engines.items()}
        for case in tqdm(cases, desc="cases", disable=not progress):
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in benches}
            for turn in range(repeats):
                order = list(benches)
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    rows[name].append(benches[name].times(case, steps))
            figures["cases"][case] = {
                name: {part: summary([row[part] for row in made]) for part in made[0]} for name, made in rows.items()
            }
        figures["a_step"] = {name: one.counts() for name, one in benches.items()}
    finally:
        for engine in engines.values():
            engine.close()
    return figures


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    repeats: Annotated[int, typer.Option(help="Turns of each policy.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn.")] = 10,
) -> None:
    """Run the comparison on one device."""
    write_result(out, f"policies_{device}", bench(device, repeats, steps))
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
