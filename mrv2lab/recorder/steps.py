"""From what the listener saw to the records of a recording; off the hot path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import mrv2lab
from mrv2lab.protocol import RequestData
from mrv2lab.recorder.listen import RawStep, described
from mrv2lab.recording.schema import Diff, MarkRecord, NewRequest, SpanRecord, StepRecord


def step_record(raw: RawStep, epoch_ns: int) -> StepRecord:
    """The record of ``raw``, without device times; host times count from ``epoch_ns``."""
    schedule, batch = raw.schedule, raw.batch
    assert schedule is not None
    resumed = {request.req_id for request in schedule.resumed}
    record = StepRecord(
        schedule.step,
        new=[_new_request(request, row, request.req_id in resumed) for request, row in raw.new],
        removed=raw.removed,
        finished=sorted(schedule.finished),
        preempted=sorted(schedule.preempted),
        unscheduled=sorted(schedule.unscheduled),
        decisions=[(kind, req_id, int(needed), int(free)) for kind, req_id, needed, free in raw.decisions],
        gauges={name: float(value) for name, value in raw.gauges.items()},
        new_blocks={
            req_id: [list(ids) for ids in blocks] for req_id, blocks in schedule.continued.new_block_ids.items()
        },
        diffs=[Diff(table, d.row, d.start, d.values) for table, diffs in raw.diffs.items() for d in diffs],
        publishes=raw.publishes,
        sampled=raw.sampled,
        finish_reasons=raw.finish_reasons,
        spans=[SpanRecord(name, start - epoch_ns, end - epoch_ns, depth) for name, start, end, depth, _ in raw.spans],
        marks=[
            MarkRecord(
                m.kind, m.name, m.stream, m.reads, m.writes, short_site(m.site),
                m.nbytes, m.wait_ns, time - epoch_ns, phase, added=added,
            )
            for m, time, phase, _, added in described(raw)
        ],
        paused=raw.paused,
        keyframe=raw.keyframe,
        owners=raw.owners,
    )  # fmt: skip
    if batch is not None:
        record.req_ids = batch.req_ids
        record.rows = batch.rows
        record.num_scheduled = batch.num_scheduled_tokens
        record.has_prefill = batch.has_prefill
    return record


_PACKAGE = Path(mrv2lab.__file__).parent


@lru_cache(maxsize=4096)
def short_site(site: str | None) -> str | None:
    """A call site without this machine's folders: from ``mrv2lab/`` on, or the file's last two parts."""
    if site is None:
        return None
    file, _, line = site.rpartition(":")
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return f"{path.relative_to(_PACKAGE.parent).as_posix()}:{line}"
    return f"{'/'.join(path.parts[-2:])}:{line}"


def _new_request(request: RequestData, row: int, resumed: bool) -> NewRequest:
    sampling = request.sampling
    return NewRequest(
        request.req_id,
        row,
        request.prompt_len,
        len(request.all_token_ids),
        request.num_computed_tokens,
        [list(ids) for ids in request.block_ids],
        float(sampling.temperature),
        request.seed,
        request.seed_given,
        sampling.max_tokens,
        resumed,
    )


Int64 = np.ndarray[Any, np.dtype[np.int64]]


class StampedTimes:
    """What is needed to find a step's device times: the stamps of its spans and marks, in the order of the record's."""

    def __init__(self, raw: RawStep, epoch_ns: int) -> None:
        self.spans = np.array([stamp for *_, stamp in raw.spans], np.int64)
        marks = described(raw)
        self.marks = np.array([stamp for _, _, _, stamp, _ in marks], np.int64)
        self._times = [time - epoch_ns for _, time, *_ in marks]
        self._streams = [mark.stream for mark, *_ in marks]
        self._epoch_ns = epoch_ns

    def resolve(self, ends_ns: Int64, starts_ns: Int64 | None, free_at: dict[str, int]) -> tuple[Int64, Int64, Int64]:
        """Ends of the spans, starts and ends of the marks, from the times of all stamps; -1 = not known.

        Where the machine does not say when work began, it is the later of its enqueue and its predecessor's end:
        ``free_at`` carries each stream's last end from step to step.
        """
        span_ends, ends = self._at(self.spans, ends_ns), self._at(self.marks, ends_ns)
        if starts_ns is not None:
            return span_ends, self._at(self.marks, starts_ns), ends
        starts = np.full(len(ends), -1, np.int64)
        for i, end in enumerate(ends.tolist()):
            if end >= 0:
                stream = self._streams[i]
                starts[i] = min(end, max(free_at.get(stream, 0), self._times[i]))
                free_at[stream] = end
        return span_ends, starts, ends

    def _at(self, stamps: Int64, times_ns: Int64) -> Int64:
        known = (stamps >= 0) & (stamps < len(times_ns))
        times = times_ns[np.where(known, stamps, 0)] if len(times_ns) else np.full(len(stamps), -1, np.int64)
        return np.where(known & (times >= 0), times - self._epoch_ns, -1)


def fill_times(record: StepRecord, span_ends: Int64, mark_starts: Int64, mark_ends: Int64) -> None:
    """Write device times into ``record``."""
    for span, end in zip(record.spans, span_ends.tolist(), strict=True):
        span.device_end_ns = end
    for mark, start, end in zip(record.marks, mark_starts.tolist(), mark_ends.tolist(), strict=True):
        mark.device_start_ns, mark.device_end_ns = start, end


def token_ids_in(record: StepRecord) -> Iterable[int]:
    """Every token id that a view of the step may name."""
    for diff in record.diffs:
        if diff.table == "all_token_ids":
            yield from diff.values.tolist()
    for tokens in record.sampled or ():
        yield from tokens
    if record.top_k is not None:
        yield from record.top_k.token_ids.reshape(-1).tolist()
    if record.keyframe is not None:
        yield from np.unique(record.keyframe["all_token_ids"]).tolist()


def texts_of(ids: Iterable[int], known: dict[int, str], decode: Callable[[list[int]], str] | None) -> dict[int, str]:
    """The texts of the ids that ``known`` lacks, which it learns; none without a tokenizer."""
    if decode is None:
        return {}
    fresh = {token: decode([token]) for token in dict.fromkeys(ids) if token not in known and token >= 0}
    known.update(fresh)
    return fresh
