"""Where settled steps go: into a recording in memory, or in chunks to a file, on a thread of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from mrv2lab.recorder.listen import RawStep, described
from mrv2lab.recorder.probes import Probes
from mrv2lab.recorder.steps import StampedTimes, fill_times, step_record, texts_of, token_ids_in
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import StepRecord, TopK
from mrv2lab.recording.write import DeviceTimes, RecordingWriter
from mrv2lab.runtime.stamps import ClockFit, Stamps

CHUNK = 16
"""Steps that are written at once."""

CUT_SHORT = "device times and the steps in flight are missing: queued work had raised when the recording ended"

Decode = Callable[[list[int]], str]


def _describe(steps: list[RawStep]) -> None:
    for step in steps:
        described(step)


class Store:
    """Takes settled steps in order. With a ``writer`` they go to its file, else into ``recording``."""

    def __init__(
        self,
        recording: Recording,
        writer: RecordingWriter | None,
        probes: Probes,
        stamps: Stamps,
        decode: Decode | None,
    ) -> None:
        self.recording = recording
        self._epoch_ns = recording.header.epoch_host_ns
        self._writer = writer
        self._probes = probes
        self._stamps = stamps
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._raw: list[RawStep] = []
        """Settled, and no record yet."""
        self._tops: dict[int, TopK] = {}
        self._checks: dict[int, dict[str, int]] = {}
        self._times: list[StampedTimes] = []
        self._pool: ThreadPoolExecutor | None = None
        self._work: list[Future[None]] = []
        """Of the thread: steps written, or in memory described."""
        self._undescribed = 0
        """In memory: steps whose launches keep their arguments."""

    def __len__(self) -> int:
        """Steps taken, whether there is a record of them yet or not. In memory only."""
        return len(self.recording) + len(self._raw)

    def add(self, step: RawStep) -> None:
        """``step`` is settled: its output was waited for, and so was every step before it. Cheap."""
        self._raw.append(step)
        if step.batch is not None:  # a step without tokens has no output, and waited for nothing
            self._collect(step.number)
        top = self._probes.top.collect(step.number) if self._probes.top is not None else None
        if top is not None:
            self._tops[step.number] = top
        if self._writer is None:
            self._undescribed += 1
            if self._undescribed > CHUNK:
                self._submit(_describe, self._raw[-self._undescribed :])
                self._undescribed = 0
        elif len(self._raw) > CHUNK:
            # A checksum is known a step later, so its step stays.
            checks = self._probes.checks
            stay = checks.pending[0][0] if checks is not None and checks.pending else step.number
            steps = [raw for raw in self._raw if raw.number < stay]
            self._raw = [raw for raw in self._raw if raw.number >= stay]
            self._submit(self._write, steps)

    def _submit(self, work: Callable[[list[RawStep]], None], steps: list[RawStep]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "mrv2lab-recording")
        self._work = [future for future in self._work if not future.done() or future.exception()]
        self._work.append(self._pool.submit(work, steps))

    def _await(self) -> None:
        """The thread's end, and whatever it raised."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        work, self._work = self._work, []
        for future in work:
            future.result()

    def _collect(self, before: int | None) -> None:
        if self._probes.checks is not None:
            for number, sums in self._probes.checks.collect(before):
                if self._writer is None and number < len(self.recording):
                    self.recording[number].checksums = sums
                else:
                    self._checks[number] = sums

    def _record(self, raw: RawStep) -> tuple[StepRecord, dict[int, str]]:
        record = step_record(raw, self._epoch_ns)
        record.top_k = self._tops.pop(raw.number, None)
        record.checksums = self._checks.pop(raw.number, {})
        self._times.append(StampedTimes(raw, self._epoch_ns))
        return record, texts_of(token_ids_in(record), self._texts, self._decode)

    def _write(self, steps: list[RawStep]) -> None:
        assert self._writer is not None
        made = [self._record(raw) for raw in steps]
        texts = {token: text for _, fresh in made for token, text in fresh.items()}
        self._writer.append([record for record, _ in made], texts)

    def flush(self) -> None:
        """In memory: bring ``recording`` up to date, device times as far as they are known."""
        self._await()
        steps, self._raw, self._undescribed = self._raw, [], 0
        known = len(self.recording)
        for raw in steps:
            self.recording.append(*self._record(raw))
        self._fill(max(known - 2, 0))

    def _fill(self, first: int) -> None:
        """Write what is known of device times into the records from ``first`` on."""
        ends, starts = self._stamps.ends_ns(), self._stamps.starts_ns()
        free_at: dict[str, int] = {}
        for number in range(first, len(self.recording)):
            fill_times(self.recording[number], *self._times[number].resolve(ends, starts, free_at))

    def finish(self, clock: ClockFit | None) -> None:
        """After the last synchronisation: everything that is left. ``clock`` None: it raised, device times are unknown.

        Raises whatever the writing thread raised (``OSError`` for a full disk).
        """
        if clock is not None:
            self._collect(None)
        if self._writer is None:
            self.flush()
            self._fill(0)
            self.recording.clock = dataclasses.asdict(clock) if clock is not None else {}
            self.recording.problems += [] if clock is not None else [CUT_SHORT]
            return
        try:
            self._await()
            self._write(self._raw)
            self._raw = []
            if clock is None:
                self._writer.close(problems=[CUT_SHORT])
            else:
                self._writer.close(self._device_times(clock) if self._times else None)
        except BaseException as error:
            with suppress(OSError):
                self._writer.close(problems=[f"recording was broken off: {error}"])
            raise

    def _device_times(self, clock: ClockFit) -> DeviceTimes:
        ends, starts = self._stamps.ends_ns(), self._stamps.starts_ns()
        free_at: dict[str, int] = {}
        each = [times.resolve(ends, starts, free_at) for times in self._times]
        spans, starts_of_marks, ends_of_marks = (np.concatenate(parts) for parts in zip(*each, strict=True))
        return DeviceTimes(spans, starts_of_marks, ends_of_marks, **dataclasses.asdict(clock))
