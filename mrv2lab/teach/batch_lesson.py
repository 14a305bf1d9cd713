"""What the lesson on the persistent batch counts: rows over steps, loads that come and go, churn without a model."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from mrv2lab.bench.frames import runner_frame
from mrv2lab.check.side import Weights
from mrv2lab.check.twin import Twin
from mrv2lab.config import EngineConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Workload
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.teach.mutants import Mutant

BLOCK_SIZE = 16
Rows = dict[str, int]


class HostOnly:
    """A table of :class:`InputBatch` that is never sent anywhere."""

    stays = True

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.gpu = torch.zeros(shape, dtype=dtype)
        self.np = self.gpu.numpy()

    def publish(self, rows: int | None = None) -> None:
        """Nothing: there is no device."""


def batch_alone(max_num_reqs: int, max_model_len: int = 4096) -> InputBatch:
    """V1's persistent batch without a model and without a device."""
    return InputBatch(max_num_reqs, max_model_len, 2048, (BLOCK_SIZE,), HostOnly)


def request(name: str, length: int, computed: int) -> CachedRequestState:
    """A greedy request with a prompt of ``length`` tokens, ``computed`` of them computed, and blocks for all."""
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=list(range(length)),
        sampling=SamplingParams(),
        seed=0,
        seed_given=False,
        generator=None,
        block_ids=[list(range(1, 2 + (length - 1) // BLOCK_SIZE))],
        num_computed_tokens=computed,
        output_token_ids=[],
    )


def rows_of(engine: Engine) -> Rows:
    """Request -> row, as the runner's host has it."""
    runner = engine.worker.runner
    v1 = isinstance(runner, ModelRunnerV1)
    return dict(runner.input_batch.req_id_to_index if v1 else runner.req_states.req_id_to_index)


def drive(engine: Engine, workload: Workload, seen: list[Rows] | None = None) -> dict[str, list[int]]:
    """Run a resolved workload step by step; output tokens by request. ``seen`` gets the rows after each step."""
    waiting = list(workload)
    while waiting or engine.has_work():
        while waiting and waiting[0].step <= engine.num_steps:
            arrival = waiting.pop(0)
            engine.submit(arrival.prompt, arrival.params)  # type: ignore[arg-type]
        engine.step()
        if seen is not None:
            seen.append(rows_of(engine))
    return {name: output.token_ids for name, output in engine.requests.items()}


class Load:
    """Keeps about ``count`` requests decoding. ``gap``: one ends every ``gap`` steps (0: nobody does), and its
    successor is submitted ``late`` steps after it was seen to end."""

    def __init__(self, engine: Engine, count: int, gap: int = 0, late: int = 0, prompt: int = 100) -> None:
        self.engine, self.count, self.gap, self.late, self.prompt = engine, count, gap, late, prompt
        self._due: list[int] = []
        self._number = 0
        for i in range(count):
            self._submit((i + 2) * gap + 2 if gap else 120)
        while any(not output.token_ids for output in engine.requests.values() if not output.finished):
            self.step()

    def _submit(self, max_tokens: int) -> None:
        start = 7 * self._number % 1500
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.submit(list(range(start, start + self.prompt)), params)

    def step(self) -> None:
        """One turn of the engine, and the successors that are due."""
        for output in self.engine.step():
            if output.finished and self.gap:
                self._due.append(self.engine.num_steps + self.late)
        while self._due and self._due[0] <= self.engine.num_steps:
            self._due.pop(0)
            self._submit(self.count * self.gap)


def observe(load: Load, steps: int) -> EventLog:
    """What an observer hears in ``steps`` steps of ``load``."""
    load.engine.observer = log = EventLog()
    for _ in range(steps):
        load.step()
    return log


def totals(log: EventLog) -> dict[str, float]:
    """Sums of the gauges."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in log.gauges:
        sums[name] += value
    return sums


def churn(count: int, length: int, ends: int, steps: int = 40) -> tuple[float, float]:
    """Of ``count`` requests of ``length`` tokens ``ends`` leave in one step, and as many come in the next: bytes that
    condense moves in the first of the two (mean), and how many microseconds it takes (median)."""
    batch, rng, number = batch_alone(count, 8192), np.random.default_rng(0), count
    for i in range(count):
        batch.add_request(request(f"q{i}", length, length))
    written, times = 0, []
    for _ in range(steps):
        batch.moves.reset()
        for victim in rng.choice(batch.req_ids, ends, replace=False):
            batch.remove_request(str(victim))
        start = time.perf_counter_ns()
        batch.condense()
        times.append((time.perf_counter_ns() - start) / 1e3)
        written += batch.moves.bytes_moved
        for _ in range(ends):
            batch.add_request(request(f"q{number}", length, length))
            number += 1
    return written / steps, statistics.median(times)


def bus(log: EventLog, steps: int) -> pd.DataFrame:
    """Copies to the device, and what the host writes where the device reads it in place (UVA), by array: means a step.
    The last line sums them up."""
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for mark in log.marks:
        uva = mark.kind == "publish" and ".uva" in mark.name
        if mark.kind == "h2d" or uva:
            line = table[mark.name.rpartition(".")[0] + (" (UVA)" if uva else "")]
            line[0] += 1 / steps
            line[1] += mark.nbytes / steps
    frame = pd.DataFrame.from_dict(table, orient="index", columns=["times a step", "bytes a step"])
    frame.loc["all"] = frame.sum()
    return frame


def hunt(
    chosen: Iterable[Mutant], workload: Workload, right: EngineConfig, broken: EngineConfig, weights: Weights
) -> pd.DataFrame:
    """What a twin of ``right`` and ``broken`` says to each mutant in the latter, beside what it says of itself."""
    lines = []
    for mutant in chosen:
        try:
            with Twin.build(right, broken, weights=weights, around_b=mutant) as twin:
                outcome = "found" if twin.run(workload).difference else "escapes"
        except RuntimeError as error:
            outcome = f"error: {error}"
        needs = ", ".join(f"{name}={value}" for name, value in mutant.needs.items())
        line = {"mutant": mutant.name, "here": outcome, "caught_by": ", ".join(mutant.caught_by), "needs": needs}
        lines.append(line)
    return pd.DataFrame(lines).set_index("mutant").sort_values("here", kind="stable")


RESULT_ROWS = {
    "own us": "runner's own phases (µs)",
    "spread us": "spread of its medians (µs)",
    "apply_writes": "of it apply_writes (µs)",
    "forward": "launching the model (µs)",
    "step": "whole step (µs)",
    "h2d copies": "H2D copies",
    "h2d bytes": "H2D bytes",
    "uva publishes": "tables published (UVA)",
    "row moves": "row moves",
}


def result_table(figures: Mapping[str, Any]) -> pd.DataFrame:
    """The figures of ``runner_bench`` for reading: a column a load, times in whole microseconds."""
    frame = runner_frame(figures)
    for phase in ("apply_writes", "forward", "step"):
        for kind in ("v1", "mrv2"):
            parts = [figures[f"{load} {count} {kind}"]["host_us"] for load, count in frame.index]
            frame[phase, kind] = [part[phase]["median"] if phase in part else 0.0 for part in parts]
    lines = {}
    for name, title in RESULT_ROWS.items():
        form = "{:,.0f}" if "µs" in title or "bytes" in title else "{:.1f}"
        for kind in ("v1", "mrv2"):
            lines[title, kind] = [form.format(value) for value in frame[name, kind]]
    return pd.DataFrame.from_dict(lines, orient="index", columns=frame.index).set_index(
        pd.MultiIndex.from_tuples(lines, names=["a step", "runner"])
    )


def pause_and_preempt(kind: str) -> pd.DataFrame:
    """Four requests, of which the scheduler passes over one for a step and later preempts it: what that costs the
    runner ``kind``, a line a step."""
    engine = Engine(
        "tiny",
        kind,  # type: ignore[arg-type]
        device="cpu",
        num_blocks=64,
        max_num_reqs=8,
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    for i in range(4):
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        engine.submit([50 + i] * 40, params, request_id="ABCD"[i])
    for _ in range(8):
        engine.step()
    scheduler, lines = engine.scheduler, [_line(engine, "all four")]
    paused = scheduler.running.pop(1)
    lines.append(_line(engine, "B is passed over"))
    scheduler.running.insert(1, paused)
    lines.append(_line(engine, "B is back"))
    scheduler.preempt("B")
    lines.append(_line(engine, "B preempted and resumed"))
    engine.close()
    return pd.DataFrame(lines).set_index("")


def _line(engine: Engine, what: str) -> dict[str, str | int]:
    """One step of ``engine``, and what its message and its rows say of it."""
    project, runner, before = engine.core.project, engine.worker.runner, rows_of(engine)
    messages = []

    def keep(schedule: object) -> object:
        messages.append(project(schedule))  # type: ignore[arg-type]
        return messages[-1]

    engine.core.project = keep
    engine.step()
    engine.core.project = project
    (message,), now = messages, rows_of(engine)
    again = [data.all_token_ids for data in message.new_reqs]
    again += list(getattr(message.cached_reqs, "all_token_ids", {}).values())
    moves = runner.input_batch.moves if isinstance(runner, ModelRunnerV1) else None
    return {
        "": what,
        "rows": " ".join(f"{name}{row}" for name, row in sorted(now.items())),
        "rows left": len(before.keys() - now.keys()),
        "rows taken": moves.adds if moves else len(message.new_reqs),
        "rows moved": moves.row_moves if moves else 0,
        "token ids sent again": sum(map(len, again)),
        "tokens computed": message.total_num_scheduled_tokens,
    }
