"""A host log as a trace: the same lanes, kinds and arguments as a recording's, for both runners.

The log becomes the times of a recording, one step a turn of the engine, and goes the way that recordings go.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Sequence

import numpy as np
import torch

from mrv2lab import __version__
from mrv2lab.engine.engine import Engine
from mrv2lab.recorder.annotate import STEP, TURN
from mrv2lab.recorder.batch import batch_of
from mrv2lab.recorder.host_log import HostLog, LoggedMark, Turn
from mrv2lab.recorder.steps import short_site
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import Header, MarkRecord, SpanRecord, StepRecord
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.trace.annotations import Batch
from mrv2lab.trace.from_recording import from_recording
from mrv2lab.trace.trace import Trace


def log_trace(log: HostLog, engine: Engine, title: str) -> Trace:
    """The turns of ``log`` on the runtime's own clock. Device times are a software stream's modelled ones; of a GPU
    there are none in it."""
    batches = [batch_of(turn.schedule) if turn.schedule is not None else None for turn in log.turns]
    trace = from_recording(Recording(_header(log, engine), _steps(log, batches), title=title), batches=batches)
    no_step = f"{STEP}-1"
    return dataclasses.replace(trace, names=tuple(TURN if name == no_step else name for name in trace.names))


def _header(log: HostLog, engine: Engine) -> Header:
    """What is true for all turns. Times count from the first turn's start; without state, since none was kept."""
    epoch_ns, now_ns, unix_ns = log.turns[0].start_ns, engine.rt.now(), time.time_ns()
    modelled = isinstance(engine.rt, CpuRuntime)
    return Header(
        mode="record",
        runner=engine.config.runner.runner,
        device="cpu" if modelled else torch.cuda.get_device_name(engine.rt.device),
        modelled=modelled,
        config=dataclasses.asdict(engine.config),
        backend=engine.rt.backend,
        tables={},
        epoch_host_ns=epoch_ns,
        epoch_unix_ns=unix_ns - (now_ns - epoch_ns),
        versions={"mrv2lab": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        machine={"platform": f"{platform.system()} {platform.machine()}"},
        check_every=0,
    )


def _steps(log: HostLog, batches: Sequence[Batch | None]) -> list[StepRecord]:
    epoch_ns = log.turns[0].start_ns
    records = [_step(turn, batch) for turn, batch in zip(log.turns, batches, strict=True)]
    for span in log.spans:
        record = records[max(span.turn, 0)]
        record.spans.append(SpanRecord(span.name, span.start_ns - epoch_ns, span.end_ns - epoch_ns, span.depth))
    last = 0
    for mark in log.marks:
        last = mark.turn if mark.turn >= 0 else last  # between two turns: with the earlier one
        records[last].marks.append(_mark(mark, epoch_ns))
    return records


def _step(turn: Turn, batch: Batch | None) -> StepRecord:
    record = StepRecord(turn.step)
    schedule = turn.schedule
    if schedule is not None and batch is not None:
        record.req_ids = list(schedule.num_scheduled_tokens)
        record.num_scheduled = np.fromiter(schedule.num_scheduled_tokens.values(), np.int32)
        record.has_prefill = batch.context_requests > 0
        record.finished, record.preempted = sorted(schedule.finished), sorted(schedule.preempted)
    return record


def _mark(logged: LoggedMark, epoch_ns: int) -> MarkRecord:
    mark = logged.mark
    known = logged.device_end_ns >= 0
    return MarkRecord(
        mark.kind,
        mark.name,
        mark.stream,
        mark.reads,
        mark.writes,
        short_site(mark.site),
        mark.nbytes,
        mark.wait_ns,
        logged.time_ns - epoch_ns,
        logged.phase,
        logged.device_start_ns - epoch_ns if known else -1,
        logged.device_end_ns - epoch_ns if known else -1,
    )
