"""What listening costs a step: nobody (the null observer), and a recorder in each of its settings.

``python -m mrv2lab.bench.recorder_bench --device cuda --out FILE``  Qwen3-0.6B's shape, 256 requests
``python -m mrv2lab.bench.recorder_bench --device cpu --out FILE``   the shipped model, 8 requests

Settings take turns in one run, a block of steps each, so that the machine's moods fall on all of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import timeit
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm

from mrv2lab.bench.result import summary, write_result
from mrv2lab.bench.step_bench import start_decodes
from mrv2lab.config import QWEN3_0_6B
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import NULL_OBSERVER, EventLog
from mrv2lab.recorder.recorder import Recorder

SETTINGS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "on": {},
    "on, no call sites": {"call_sites": False},
    "on, every launch stamped": {"device_times": "launches"},
    "on, nothing stamped": {"device_times": "none"},
    "on, top 8 logits": {"top_k": 8},
}


def _recorder(engine: Engine, setting: dict[str, Any] | None, folder: Path) -> AbstractContextManager[Any]:
    if setting is None:
        return nullcontext()
    return Recorder(engine, folder / "bench.mrv2rec", **setting)


def time_settings(engine: Engine, rounds: int, steps: int) -> dict[str, Any]:
    """Host microseconds of a step under every setting: ``rounds`` blocks of ``steps`` steps each, taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in SETTINGS}
    medians: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in tqdm(range(rounds), desc="rounds"):
            for name, setting in SETTINGS.items():
                times = []
                with _recorder(engine, setting, Path(folder)):
                    for _ in range(4):  # caches, and the pipeline that entering drained
                        engine.step()
                    for _ in range(steps):
                        start = time.perf_counter_ns()
                        engine.step()
                        times.append((time.perf_counter_ns() - start) / 1e3)
                samples[name] += times
                medians[name].append(statistics.median(times))
    figures: dict[str, Any] = {name: summary(values) for name, values in samples.items()}
    for name, values in medians.items():
        ratios = [one / off for one, off in zip(values, medians["off"], strict=True)]
        figures[name]["over_off"] = summary(ratios)
    return figures


def null_calls(engine: Engine) -> dict[str, float]:
    """Null-observer calls of one step, and what they cost: spans entered and left, and looks at ``enabled``."""
    log = EventLog()
    engine.observer = log
    engine.step()
    log.clear()
    engine.step()
    engine.observer = NULL_OBSERVER
    spans, looks = len(log.spans), len(log.marks)
    number = 200_000

    def span() -> None:
        with NULL_OBSERVER.span("forward"):
            pass

    def look() -> None:
        if NULL_OBSERVER.enabled:
            raise AssertionError

    empty = min(timeit.repeat(lambda: None, number=number, repeat=5)) / number
    cost = {
        fn.__name__: max(min(timeit.repeat(fn, number=number, repeat=5)) / number - empty, 0.0) * 1e6
        for fn in (span, look)
    }
    total = spans * cost["span"] + looks * cost["look"]
    return {"spans": spans, "looks": looks, "span_us": cost["span"], "look_us": cost["look"], "total_us": total}


def bench(device: str, rounds: int, steps: int) -> dict[str, Any]:
    """Both costs on one device."""
    on_gpu = device == "cuda"
    count, prompt_len = (256, 128) if on_gpu else (8, 32)
    need = rounds * len(SETTINGS) * (steps + 4) + 40
    model: Any = QWEN3_0_6B if on_gpu else "tiny"
    options: dict[str, Any] = {"num_blocks": 256 * (need + 128) // 16 + 64} if on_gpu else {"num_blocks": 1024}
    if on_gpu:
        options |= {"max_num_reqs": 1024, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    with Engine(model, device=device, **options) as engine:
        longest = engine.config.scheduler.max_model_len
        if need + prompt_len > longest:
            raise ValueError(f"{rounds} rounds of {steps} steps need {need} tokens a request; {longest} is the longest")
        start_decodes(engine, count, prompt_len, need, 1.0)
        for _ in range(10):
            engine.step()
        calls = null_calls(engine)
        figures = time_settings(engine, rounds, steps)
        engine.reset()
    off = figures["off"]["median"]
    return {
        "requests": count,
        "null_observer": calls | {"share_of_step": calls["total_us"] / off},
        "step_us": figures,
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Times that every setting gets a turn.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn.")] = 20,
) -> None:
    """Run the benchmark for one device."""
    write_result(out, f"recorder_{device}", bench(device, rounds, steps))
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
