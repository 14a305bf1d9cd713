"""What the lesson on the asynchronous loop runs: the scheduler's counters call by call, and steps of a modelled
device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd

from mrv2lab.config import CacheConfig, SchedulerConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.core import EngineCore
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.request import Request
from mrv2lab.observer import EventLog, Mark, Observer
from mrv2lab.protocol import ModelRunnerOutput, SamplingParams, SchedulerOutput
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.clock import CostModel
from mrv2lab.runtime.cpu import CpuRuntime

SMALL = {"num_blocks": 128, "max_num_reqs": 8, "max_model_len": 256}
"""Options of the engines here."""


class _Ready:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


class _MadeUp:
    """A worker without a model: its tokens are 100, 101, 102, ..."""

    def __init__(self) -> None:
        self._next = 100

    def execute_model(self, output: SchedulerOutput) -> bool:
        self._schedule = output
        return output.total_num_scheduled_tokens > 0

    def sample_tokens(self) -> _Ready:
        # The first chunk does not reach the end of the prompt.
        sampled: list[list[int]] = [[]] if self._schedule.new else [[self._next]]
        self._next += len(sampled[0])
        return _Ready(ModelRunnerOutput(self._schedule.step, ["a"], sampled))


class _Told(AsyncScheduler):
    """An asynchronous scheduler that writes down every call and how request ``a`` stands afterwards."""

    lines: list[dict[str, str | int]]

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        told = output.continued
        sent = list(zip(told.num_computed_tokens.tolist(), told.num_output_tokens.tolist(), strict=True))
        notes = [one.kind for one in self.decisions] + [f"finished: {name}" for name in output.finished]
        self._note(
            f"schedule {output.step}",
            output.num_scheduled_tokens.get("a", 0),
            "new" if output.new else str(sent[0]) if sent else "",
            "; ".join(notes),
        )
        return output

    def update_from_output(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> Sequence[RequestUpdate]:
        updates = super().update_from_output(schedule, output)
        if output.req_ids:
            ends = "".join(f", ends: {update.finish_reason}" for update in updates if update.finish_reason)
            self._note(f"update {schedule.step}", "", "", f"came back: {output.sampled_token_ids[0]}{ends}")
        return updates

    def _note(self, call: str, tokens: int | str, sent: str, note: str) -> None:
        request = self.watched
        self.lines.append(
            {
                "call": call,
                "tokens scheduled": tokens,
                "sent (computed, outputs)": sent,
                "computed": request.num_computed_tokens,
                "placeholders": request.num_output_placeholders,
                "tokens known": request.num_tokens,
                "note": note,
            }
        )

    def watch(self, request: Request) -> None:
        """Add ``request`` and keep it in view."""
        self.watched, self.lines = request, []
        self.add_request(request)


def trace(max_tokens: int = 3, eos: Sequence[int] = ()) -> tuple[pd.DataFrame, int]:
    """A prompt of 6 tokens, at most 4 a step, through the real asynchronous scheduler and loop: a line a call, and the
    number of wasted rows."""
    scheduler = _Told(SchedulerConfig(8, 4, 64), CacheConfig(33))
    request = Request("a", range(1, 7), SamplingParams(max_tokens=max_tokens), eos_token_ids=eos)
    scheduler.watch(request)
    core = EngineCore(scheduler, _MadeUp(), Observer(), 2, lambda output: output)
    while not request.finished or core.in_flight:
        core.step()
    return pd.DataFrame(scheduler.lines).set_index("call"), scheduler.stats.wasted_rows


class HostLog(EventLog):
    """An event log on the runtime's clock, which leaves out the time that stands in for the device; ``phases`` are
    microseconds of the host's own work, waits left out."""

    def __init__(self, rt: Runtime) -> None:
        super().__init__()
        self.phases: dict[str, list[float]] = defaultdict(list)
        self._rt = rt
        self._waited = 0

    def mark(self, mark: Mark) -> None:
        """See :meth:`Observer.mark`."""
        super().mark(mark)
        self._waited += mark.wait_ns

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._rt.now() - self._waited
        yield
        self.phases[name].append((self._rt.now() - self._waited - start) / 1000)


def decode(
    kind: str,
    loop: bool,
    launch_us: float,
    prompts: Sequence[str],
    *,
    steps: int = 16,
    listen: bool = True,
    **options: Any,
) -> tuple[HostLog, float]:
    """Steady decode of ``prompts`` beside a modelled device that takes ``launch_us`` a launch: what an observer heard
    in ``steps`` steps, if one listened, and the microseconds of one of them (median). ``options`` are the engine's."""
    options = {**SMALL, "device": "cpu", "async_scheduling": loop, **options}
    with Engine("tiny", kind, **options) as engine:  # type: ignore[arg-type]
        assert isinstance(engine.rt, CpuRuntime)
        engine.rt.costs = CostModel(launch_ns=int(launch_us * 1000))
        for prompt in prompts:
            engine.submit(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
        for _ in range(6):
            engine.step()
        log, times = HostLog(engine.rt), []
        if listen:
            engine.observer = log
        for _ in range(steps):
            start = engine.rt.now()
            engine.step()
            times.append((engine.rt.now() - start) / 1000)
        return log, statistics.median(times)
