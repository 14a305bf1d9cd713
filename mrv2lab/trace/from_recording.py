"""A recording of ours as a trace: phases, passes through the chokepoints, and device times where they were stamped.

Lanes: ``steps``, ``host phases`` and ``host calls`` are three views of the engine's one thread; each stream has its
own. An event's arguments say what its mark said: ``mark`` (its kind), ``phase``, ``step``, ``site``, ``stream``,
``reads``, ``writes``, ``nbytes`` and, for what the recorder itself did, ``added``; a step's say its batch. Nothing is
invented: a launch whose device time nobody stamped is a call without device work, and ``problems`` says how many there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from mrv2lab.observer import WAITS
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import MarkRecord, SpanRecord, StepRecord
from mrv2lab.trace.annotations import Batch
from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.recorded_batches import recorded_batches
from mrv2lab.trace.trace import Lane, Trace, TraceInfo

WORK: dict[str, tuple[str, str]] = {
    "kernel": ("kernel", ""),
    "run": ("kernel", ""),
    "h2d": ("memcpy", "HtoD"),
    "d2h": ("memcpy", "DtoH"),
    "replay": ("graph", ""),
}
"""Marks that put work into a stream: kind of the work, and which way a copy goes."""
MAIN = "main"
"""Name of the stream that is number 0."""
WAITS_FOR: dict[str, str] = {"wait_output": "output", "barrier_wait": "copies of the step before"}
"""What the host waits for in a phase."""
SETTLING = ("wait_output", "update_from_output")
"""Phases in which a step is settled, after later ones may have been launched."""


def from_recording(recording: Recording, *, host: bool = True, batches: Sequence[Batch | None] | None = None) -> Trace:
    """The trace of a recording; without ``host`` only steps and device work. ``batches``: of each step, where somebody
    knows them better than :func:`~mrv2lab.trace.recorded_batches.recorded_batches`.

    Device times of a software stream are modelled, and ``info.modelled`` says so. ``info.clock`` is ``host`` (two
    recordings of one process lie on one axis), or ``session`` where the clock is a software stream's own.
    """
    return _Conversion(recording, host).trace(recorded_batches(recording) if batches is None else batches)


class _Conversion:
    def __init__(self, recording: Recording, host: bool) -> None:
        self.recording = recording
        self.host = host
        self.builder = TraceBuilder()
        header = recording.header
        self.process = header.runner
        self.steps = Lane(self.process, "steps")
        self.phases = Lane(self.process, "host phases")
        self.calls = Lane(self.process, "host calls")
        marks = [mark for step in recording.steps for mark in step.marks]
        self.launches = sum(mark.kind in WORK for mark in marks)
        self.timed = sum(mark.kind in WORK and mark.device_end_ns >= 0 for mark in marks)
        names = dict.fromkeys(mark.stream for mark in marks if mark.kind in WORK)
        # The main stream is number 0 whoever comes first.
        self.numbers = {name: number for number, name in enumerate(sorted(names, key=lambda name: name != MAIN))}
        self.correlation = 0
        self.free_at = 0
        """When the main stream had done what the phases so far had queued."""
        self.stamped_phases = 0

    def trace(self, batches: Sequence[Batch | None]) -> Trace:
        for step, batch in zip(self.recording.steps, batches, strict=True):
            self._step(step, batch)
            for span in step.spans:
                self._span(step, span)
            for mark in step.marks:
                self._mark(step, mark)
        self._problems()
        return self.builder.build(self._info())

    def _args(self, args: dict[str, Any]) -> int:
        """Without what says nothing."""
        text = orjson.dumps({key: value for key, value in args.items() if value not in ("", None, [])})
        return self.builder.arg(bytes(memoryview(text)))  # a copy: orjson's own keeps kilobytes occupied

    # -- steps and phases

    def _step(self, step: StepRecord, batch: Batch | None) -> None:
        moments = [time for span in step.spans for time in (span.start_ns, span.end_ns)]
        moments = moments or [mark.time_ns for mark in step.marks]
        if not moments:
            return
        launched = [span.end_ns for span in step.spans if span.name not in SETTLING]
        args = {
            "step": step.step,
            "requests": step.req_ids,
            "tokens": int(step.num_scheduled.sum()),
            "tokens of each": step.num_scheduled.tolist(),
            "has prefill": step.has_prefill,
            **(batch._asdict() if batch is not None else {}),
            "decisions": [
                {"kind": kind, "request": request, "needed": needed, "free": free}
                for kind, request, needed, free in step.decisions
            ],
            "finished": step.finished,
            "preempted": step.preempted,
            "launched ns": max(launched) - min(moments) if launched else None,
            "gauges": step.gauges or None,
            "paused": step.paused or None,
        }
        start = min(moments)
        name = f"mrv2lab.step#{step.step}"
        self.builder.add(start, max(moments) - start, name, "annotation", self.steps, arg=self._args(args))

    def _span(self, step: StepRecord, span: SpanRecord) -> None:
        known = span.device_end_ns >= span.start_ns  # else nothing was queued in it, or nobody looked
        args = {
            "step": step.step,
            "phase": span.name,
            "depth": span.depth,
            "device done after ns": span.device_end_ns - span.end_ns if known else None,
            "added": span.added or None,
            "paused": step.paused or None,
        }
        if self.host:
            length = span.end_ns - span.start_ns
            self.builder.add(span.start_ns, length, span.name, "phase", self.phases, arg=self._args(args))
        if known and not span.depth and not self.timed:
            self._device_phase(step, span)

    def _device_phase(self, step: StepRecord, span: SpanRecord) -> None:
        """Where phases were stamped and launches were not: from the later of its start and the one before's end."""
        self.stamped_phases += 1
        if span.device_end_ns <= self.free_at:
            return
        start = max(self.free_at, span.start_ns)
        lane = Lane(self.process, f"{MAIN} phases", "annotation", 0, 0, label=f"stream {MAIN}, phases")
        args = {"step": step.step, "phase": span.name}
        length = span.device_end_ns - start
        self.builder.add(start, length, span.name, "gpu_annotation", lane, arg=self._args(args))
        self.free_at = span.device_end_ns

    # -- marks

    def _mark(self, step: StepRecord, mark: MarkRecord) -> None:
        args = {
            "mark": mark.kind,
            "step": step.step,
            "phase": mark.phase,
            "site": mark.site,
            "stream": mark.stream,
            "reads": list(mark.reads),
            "writes": list(mark.writes),
            "nbytes": mark.nbytes or None,
            "added": mark.added or None,
        }
        timed = mark.kind in WORK and mark.device_end_ns >= 0
        correlation = -1
        if timed:
            self.correlation += 1  # from 1, since 0 is none in a profiler's files
            correlation = self.correlation
            self._work(mark, args, correlation)
        if self.host:
            self._call(mark, args, correlation)

    def _work(self, mark: MarkRecord, args: dict[str, Any], correlation: int) -> None:
        kind, direction = WORK[mark.kind]
        start = mark.device_start_ns
        if start < 0 or start > mark.device_end_ns:
            start = mark.device_end_ns
            self.builder.problem("device work whose start is not known is shown with length 0", example=mark.name)
        modelled = " (modelled)" if self.recording.header.modelled else ""
        lane = Lane(
            self.process, mark.stream, "stream", 0, self.numbers[mark.stream], label=f"stream {mark.stream}{modelled}"
        )
        if direction:
            args = args | {"copy_kind": direction}
        self.builder.add(
            start,
            mark.device_end_ns - start,
            mark.name,
            kind,
            lane,
            correlation=correlation,
            nbytes=mark.nbytes if direction else -1,  # of a kernel they are touched, not moved
            arg=self._args(args),
        )

    def _call(self, mark: MarkRecord, args: dict[str, Any], correlation: int) -> None:
        """A mark is made at the end of its call, whose length is known for waits alone."""
        kind = "runtime"
        length = 0
        if mark.kind in WAITS:
            kind, length = "sync", mark.wait_ns
            args = args | {"waits for": WAITS_FOR.get(mark.phase.partition("/")[0], "")}
        elif mark.kind == "wait_event":
            kind, args = "sync", args | {"device_side": True}
        elif mark.kind == "record":
            kind = "event"
        self.builder.add(
            mark.time_ns - length, length, mark.name, kind, self.calls, correlation=correlation, arg=self._args(args)
        )

    # -- the whole

    def _problems(self) -> None:
        note: Callable[..., None] = self.builder.problem
        for sentence in self.recording.problems:
            note(sentence)
        if self.timed < self.launches:
            how = "only their phases were" if self.stamped_phases else "record with device_times='launches'"
            note(f"launches whose device time nobody stamped ({how})", count=self.launches - self.timed)
        paused = sum(step.paused for step in self.recording.steps)
        if paused:
            note(
                "steps during which the engine was paused: their times are the reader's, not the engine's", count=paused
            )

    def _info(self) -> TraceInfo:
        recording, header = self.recording, self.recording.header
        policy = header.config.get("runner", {}).get("transfer", "")
        return TraceInfo(
            producer="recording",
            title=recording.title,
            clock="session" if header.modelled else "host",
            origin_ns=header.epoch_host_ns,
            devices=({"id": 0, "name": header.device},),
            modelled=header.modelled,
            versions=dict(header.versions),
            extra={
                "runner": header.runner,
                "policy": policy,
                "mode": header.mode,
                "device": header.device,
                "backend": header.backend,
                "config": header.config,
                "machine": header.machine,
                "epoch_unix_ns": header.epoch_unix_ns,
                "device_clock": recording.clock,
            },
        )
