"""What the barrier's lesson runs and shows beside its own cells: a pair of profiles with late copies, live or recorded,
the waits in both, and the figures that were measured on a GPU."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import display

from mrv2lab.bench.frames import no_gain, phase_frame, policy_frame, runner_frame
from mrv2lab.bench.policy_bench import StepTimer
from mrv2lab.bench.result import newest_result
from mrv2lab.bench.stand_in import StandIn
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.profile import profile
from mrv2lab.recorder.side_by_side import Run
from mrv2lab.runtime.clock import CostModel
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.teach.barrier_pictures import STATIC, wait_picture
from mrv2lab.trace.steps import steps as steps_of
from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import Trace

LATE_MS = 20.0
"""Long beside a step of a host that others use too: a hiccup must not decide who waits."""
WARMUP = 8
REQUESTS = 8
RECORDED: dict[str, tuple[dict[str, str], str]] = {
    "V1": ({"runner": "v1", "transfer": "barrier"}, "h200_v1_barrier_late.json.gz"),
    "MRV2": ({"runner": "mrv2", "transfer": "pinned_copy"}, "h200_mrv2_pinned_copy_late.json.gz"),
}
"""Settings and files of :mod:`mrv2lab.bench.trace_set`."""


def late_copies(runner: str, transfer: str, steps: int, *, late_ms: float = LATE_MS) -> Run:
    """Profile ``steps`` steps of :data:`REQUESTS` requests that decode on a CPU, with a stand-in of ``late_ms`` in
    front of each step's copies: whoever must wait for a copy waits long enough to be seen. Device times are modelled.
    """
    options: dict[str, Any] = {"runner": runner, "transfer": transfer}
    with Engine("tiny", device="cpu", num_blocks=256, max_num_reqs=REQUESTS, **options) as engine:
        assert isinstance(engine.rt, CpuRuntime)
        engine.rt.costs = CostModel(launch_ns=8_000)
        for i in range(REQUESTS):
            engine.submit([300 + i] * 4, SamplingParams(max_tokens=WARMUP + steps + 8, ignore_eos=True))
        engine.observer = StepTimer(engine.rt.now, StandIn(engine.rt, late_ms).queue)
        with profile(engine, warmup=WARMUP, record=False) as taken:
            for _ in range(WARMUP + steps):
                engine.step()
    return Run(runner.upper(), options, taken.trace)


def recorded_pair(folder: str | Path) -> list[Run]:
    """The same pair as it was profiled on an H200, from the files of :data:`RECORDED` in ``folder``; where one is
    missing an empty list, and a sentence says what makes them."""
    files = [Path(folder, file) for _, file in RECORDED.values()]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        print(
            f"Not in this checkout's traces/: {', '.join(missing)}. On a GPU "
            "`python -m mrv2lab.bench.trace_set --device cuda --out traces` writes them."
        )
        return []
    every = zip(RECORDED.items(), files, strict=True)
    return [Run(name, dict(settings), Trace.load(file)) for (name, (settings, _)), file in every]


def waits_a_step(*runs: Run) -> pd.DataFrame:
    """A column a run: microseconds that the host waited in a step, in the input barrier and elsewhere (medians of the
    steps)."""
    table = {}
    for run in runs:
        assert run.trace is not None, f"{run.title} was not profiled"
        found = syncs(run.trace)
        found = found[found["host_waits"]]
        waited = found["caller_ns"].where(found["caller_ns"] > found["api_ns"], found["api_ns"]).clip(lower=0) / 1e3
        names = steps_of(run.trace)["step"].tolist()
        column = {}
        for what, chosen in (("in the barrier", found["barrier"]), ("elsewhere", ~found["barrier"])):
            by_step = waited[chosen].groupby(found["step"][chosen]).sum()
            column[what] = statistics.median(by_step.get(name, 0.0) for name in names) if names else 0.0
        table[run.title] = column
    return pd.DataFrame(table).round().astype(int).rename_axis("the host waits, us a step")


# -- measured elsewhere ------------------------------------------------------------------------------------------------


def measured(kind: str) -> dict[str, Any] | None:
    """The newest H200 figures of ``policies`` or ``runners`` in ``mrv2lab/bench/results``; where there are none, a
    sentence says what makes them."""
    result = newest_result(kind)
    if result is None:
        module = {"policies": "policy_bench", "runners": "runner_bench"}[kind]
        print(
            f"No H200 figures here: `python -m mrv2lab.bench.{module} --device cuda --out FILE` on a GPU makes them; "
            f"the file belongs into mrv2lab/bench/results as DATE-h200-{kind}.json."
        )
    return result


def show_costs(figures: dict[str, Any], where: str) -> None:
    """Figures of the policy bench: the waits drawn, and everything as a table."""
    costs = policy_frame(figures)
    title = f"{figures['requests']} requests decode, stand-in {figures['stand_in_ms']:g} ms: {where}"
    wait_picture(costs, title).show(config=STATIC)
    _show(costs.set_index(["case", "runner", "policy"]).round(0).astype(int))


def show_runners(result: dict[str, Any]) -> None:
    """Figures of the runner bench: what they come to in a sentence, then as tables, and at which loads MRV2's own
    phases gain nothing."""
    figures = result["figures"]
    print(in_short(figures))
    print(f"{result['machine']['gpu']}, {result['date'][:10]}: medians of {figures['repeats']}; a step")
    _show(runner_frame(figures).round(1))
    for kind in ("steady", "churn"):
        print(f"host time by phase, {kind} (us)")
        _show(phase_frame(figures, kind).map(lambda us: "\u2014" if pd.isna(us) else f"{us:.0f}"))
    loads = ", ".join(f"{kind} at {count}" for kind, count in no_gain(figures))
    print(
        f"MRV2's own phases gain no host time here: {loads or 'at none of these loads'}. The shared phases (schedule, "
        "forward, logits) and the wait for the output are the same code, so there it gains nothing at any load."
    )


def in_short(figures: dict[str, Any]) -> str:
    """The conclusion from figures of the runner bench, in one sentence."""
    frame = runner_frame(figures)
    gains = len(frame) - len(no_gain(figures))
    counts = ", ".join(
        f"{words} {_between(frame[column, 'mrv2'])} instead of {_between(frame[column, 'v1'])}"
        for column, words in (("h2d copies", "copies to the device"), ("waits", "waits of the host"))
    )
    return (
        f"In short: MRV2's own phases take less host time than V1's at {gains} of {len(frame)} loads; what it changes "
        f"is in the counts of a step: {counts}."
    )


def _between(values: pd.Series[float]) -> str:
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:.3g} to {high:.3g}"


def _show(frame: pd.DataFrame) -> None:
    display(frame)  # type: ignore[no-untyped-call]
