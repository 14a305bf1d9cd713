"""One workload on several settings, one after another: the same requests, arrivals and seeds for each."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from mrv2lab.check.waits import CAUSES, waits_by_cause
from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.outputs import RequestOutput, RunReport
from mrv2lab.engine.workload import Workload
from mrv2lab.observer import NULL_OBSERVER, PHASES
from mrv2lab.recorder.host_log import HostLog
from mrv2lab.recorder.profile import Profile
from mrv2lab.recorder.step_hook import StepHook
from mrv2lab.recording.recording import Recording
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.trace.trace import Trace

WARMUP = 3
"""Turns of the workload that an engine makes and forgets before it is measured."""


@dataclass(frozen=True)
class Run:
    """What one setting did. Where ``error`` is a sentence, everything else is empty."""

    name: str
    settings: dict[str, Any]
    trace: Trace | None = None
    """None without ``profile``."""
    recording: Recording | None = None
    """MRV2 only."""
    report: RunReport | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    """See :func:`figures_of`."""
    problems: tuple[str, ...] = ()
    error: str | None = None

    @property
    def title(self) -> str:
        """``A: v1, barrier``: the name, and what an engine was asked for in words."""
        words = [str(self.settings[key]) for key in ("runner", "transfer") if key in self.settings]
        words += [] if self.settings.get("async_scheduling", True) else ["synchronous"]
        return f"{self.name}: {', '.join(words)}" if words else self.name

    @property
    def token_ids(self) -> list[list[int]]:
        """What came out, a request each, in the order of their arrival."""
        return [output.token_ids for output in self.report.outputs.values()] if self.report is not None else []

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Run {self.name!r} failed: {self.error}"
        if not self.figures:
            return (
                f"Run {self.name!r}: {self.trace!r}" if self.trace is not None else f"Run {self.name!r}: not measured"
            )
        steps, ms = self.figures["steps"], self.figures["step_us"] / 1000
        return f"Run {self.name!r}: {steps} steps, median {ms:.3f} ms{', modelled' * self.figures['modelled']}"


def run_settings(
    workload: Workload,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    model: str | Path | ModelConfig = "tiny",
    profile: bool = True,
    steps: int | None = None,
    warmup: int = WARMUP,
    progress: bool = True,
    on_step: Callable[[str, int], bool] | None = None,
) -> dict[str, Run]:
    """Run ``workload`` on an engine of each of ``settings``, name -> keywords of :class:`Engine`; one engine at a time.

    Each engine first makes ``warmup`` turns of the workload and is reset. ``profile``: a trace and, of MRV2, a
    recording; else only the figures. ``steps``: turns at most (None: to the workload's end); what is unfinished then is
    aborted. ``on_step(name, turns)`` is asked before each turn of the measured part; False ends this run there and
    leaves out the others.

    A setting that fails becomes a Run with its ``error``, and the others go on. Raises ``ValueError`` for no settings
    and for counts out of range.
    """
    if not settings:
        raise ValueError('no settings to run: give a name and an engine\'s keywords, {"V1": {"runner": "v1"}}')
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, or None for the whole workload, got {steps}")
    if warmup < 0:
        raise ValueError(f"warmup counts turns and must be >= 0, got {warmup}")
    runs: dict[str, Run] = {}
    for name, options in settings.items():
        one = _OneRun(name, dict(options), workload, model, profile, steps, warmup, on_step)
        with tqdm(total=steps, desc=name, unit="step", disable=not progress) as bar:
            runs[name] = one.run(bar)
        if torch.cuda.is_available():
            gc.collect()  # an engine is in cycles, and the next one wants its device memory
        if one.stopped:
            break
    return runs


class _OneRun:
    """One setting's engine, from its making to its end."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        workload: Workload,
        model: str | Path | ModelConfig,
        profile: bool,
        steps: int | None,
        warmup: int,
        on_step: Callable[[str, int], bool] | None,
    ) -> None:
        self.name = name
        self.options = options
        self.workload = workload
        self.model = model
        self.profile = profile
        self.steps = steps
        self.warmup = warmup
        self.on_step = on_step
        self.stopped = False

    def run(self, bar: Any) -> Run:
        """The Run; an error of this setting's becomes its sentence."""
        try:
            with Engine(self.options.get("model", self.model), **self._engine_options()) as engine:
                if self.warmup:
                    drive(engine, self.workload, steps=self.warmup)
                    engine.reset()
                return self._measured(engine, bar)
        except Exception as error:
            return Run(self.name, self.options, error=_sentence(error))

    def _engine_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "model"}

    def _measured(self, engine: Engine, bar: Any) -> Run:
        def go_on(turns: int) -> bool:
            self.stopped = self.on_step is not None and not self.on_step(self.name, turns)
            bar.update(turns - bar.n)
            return not self.stopped

        with ExitStack() as stack:
            if self.profile:
                profiled = stack.enter_context(Profile(engine, 0, None, False, True, None, self.name))
            else:
                log = stack.enter_context(_Listening(engine)).log
            report = drive(engine, self.workload, steps=self.steps, go_on=go_on)
            bar.update(report.steps - bar.n)
        if not self.profile:
            return Run(self.name, self.options, report=report, figures=figures_of(log, engine, report))
        if not report.steps:  # stopped before the first turn
            return Run(self.name, self.options, error="stopped before its first step")
        return Run(
            self.name,
            self.options,
            profiled.trace,
            profiled.recording,
            report,
            figures_of(profiled.log, engine, report),
            tuple(profiled.problems),
        )


class _Listening:
    """A host log on an engine, and nothing else."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.log = HostLog(engine.rt)

    def __enter__(self) -> _Listening:
        self._hook = StepHook(self.engine, self.log.begin_turn, lambda step: self.log.end_turn(None))
        self._hook.attach()
        self.engine.observer = self.log
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.observer = NULL_OBSERVER
        self._hook.detach()


def drive(
    engine: Engine, workload: Workload, *, steps: int | None = None, go_on: Callable[[int], bool] = lambda turns: True
) -> RunReport:
    """As ``engine.run``, for ``steps`` turns at most and as long as ``go_on(turns)`` says so.

    What is unfinished then is aborted. Raises ``ValueError`` as ``engine.submit`` does.
    """
    arrivals = list(workload.resolve(engine.config.model.vocab_size))
    outputs: dict[str, RequestOutput] = {}
    before, started, began = dataclasses.replace(engine.scheduler.stats), engine.num_steps, time.perf_counter()
    turns = 0
    try:
        while (arrivals or engine.has_work()) and (steps is None or turns < steps) and go_on(turns):
            while arrivals and arrivals[0].step <= turns:
                arrival = arrivals.pop(0)
                assert not isinstance(arrival.prompt, int), "resolve() drew it"
                request_id = engine.submit(arrival.prompt, arrival.params, priority=arrival.priority)
                outputs[request_id] = engine.requests[request_id]
            engine.step()
            turns = engine.num_steps - started
    finally:
        if not (engine._broken or engine._closed):
            for output in outputs.values():
                if not output.finished:
                    engine.abort(output.request_id)
    stats = engine.scheduler.stats
    spent = {one.name: getattr(stats, one.name) - getattr(before, one.name) for one in dataclasses.fields(stats)}
    return RunReport(workload.name, outputs, turns, time.perf_counter() - began, type(stats)(**spent))


def figures_of(log: HostLog, engine: Engine, report: RunReport) -> dict[str, Any]:
    """Medians of the turns that ``log`` holds, as plain numbers.

    ``steps``, ``tokens``, ``step_us``; ``phase_us`` (phase -> host time of a turn that has it, waits included);
    ``waits`` and ``wait_us`` (cause -> of all turns); ``h2d_copies``, ``h2d_bytes``, ``d2h_copies`` and ``publishes`` a
    turn (means); ``modelled``: whether waits and copies come from a cost model.
    """
    turns = [turn.end_ns - turn.start_ns for turn in log.turns]
    phases: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in log.spans:
        if not span.depth and span.turn >= 0:
            phases[span.name][span.turn] += span.end_ns - span.start_ns
    marks, count = log.marks, max(len(turns), 1)
    waits = waits_by_cause(mark.mark for mark in marks)
    number = {kind: sum(mark.kind == kind for mark in marks) for kind in ("h2d", "d2h", "publish")}
    return {
        "steps": len(turns),
        "tokens": report.num_output_tokens,
        "step_us": statistics.median(turns) / 1000 if turns else 0.0,
        "phase_us": {name: statistics.median(each.values()) / 1000 for name, each in phases.items()},
        "waits": {cause: int(waits.loc[cause, "waits"]) for cause in CAUSES},
        "wait_us": {cause: int(waits.loc[cause, "wait_ns"]) / 1000 for cause in CAUSES},
        "h2d_copies": number["h2d"] / count,
        "h2d_bytes": sum(mark.nbytes for mark in marks if mark.kind == "h2d") / count,
        "d2h_copies": number["d2h"] / count,
        "publishes": number["publish"] / count,
        "modelled": isinstance(engine.rt, CpuRuntime),
    }


def figures_frame(runs: Mapping[str, Run]) -> pd.DataFrame:
    """The runs' figures beside each other: a row a figure, a column a run, those without an error. A phase or cause
    that nobody has is left out; one that a run does not have is empty."""
    columns: dict[str, dict[tuple[str, str], Any]] = {}
    for name, run in runs.items():
        if run.error is not None:
            continue
        column: dict[tuple[str, str], Any] = {}
        for figure, value in run.figures.items():
            if isinstance(value, dict):
                column |= {(figure, key): one for key, one in value.items()}
            elif figure != "modelled":
                column[figure, ""] = value
        columns[name] = column
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    keys = [key for key in keys if key[0] not in ("waits", "wait_us") or any(c.get(key) for c in columns.values())]
    figures = list(dict.fromkeys(figure for figure, _ in keys))
    keys.sort(key=lambda key: (figures.index(key[0]), PHASES.index(key[1]) if key[1] in PHASES else 0))
    index = pd.MultiIndex.from_tuples(keys, names=["figure", "of"]) if keys else pd.MultiIndex.from_arrays([[], []])
    return pd.DataFrame({name: [column.get(key) for key in keys] for name, column in columns.items()}, index=index)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (ValueError, RuntimeError)) and text else f"{type(error).__name__}: {text}"
