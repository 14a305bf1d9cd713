"""Finds the points of a profiler's trace where a host or a stream waited: calls of the runtime, records, frames."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mrv2lab.trace.awaited import Awaited
from mrv2lab.trace.call_site import enclosing, frame, site_and_caller
from mrv2lab.trace.copy_kinds import DIRECTIONS, MEMORIES, copy_kinds
from mrv2lab.trace.links import callers, links
from mrv2lab.trace.sync_kinds import (
    COPYING_OPS,
    NOT_OF_HOST,
    READING_OPS,
    api_kind,
    between,
    is_barrier,
    operator,
    part_of_wait,
    plain,
    record_kind,
    synchronises,
)
from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class SyncPoint:
    """One row of ``syncs``; times in ns of the trace, -1: not recorded."""

    kind: str
    call: str
    event: int
    """The event that the row is about: call of the runtime, else record, else frame."""
    calls: list[int] = field(default_factory=list)
    """Calls of the runtime that belong to it."""
    waits: list[int] = field(default_factory=list)
    """Those of them, or the record or frame, in which the host stood still."""
    record: int = -1
    chain: list[int] = field(default_factory=list)
    """What encloses it, innermost first."""
    api_ns: int = -1
    frame: int = -1
    """The innermost range that is part of the wait."""
    outermost: int = -1
    """The outermost one: what the caller sees."""
    awaited: int = -1
    """The device work that was waited for: what was done last of it; -1: not known which, or there was none."""
    gpu_wait_ns: int = -1
    site: str = ""
    caller: str = ""
    device: int = -1
    stream: int = -1
    barrier: bool = False
    step: str | None = None

    def moved(self, events: Array) -> SyncPoint:
        """The same where event i of the trace is number ``events[i]`` of another."""
        moved: dict[str, Any] = {name: events[getattr(self, name)].tolist() for name in ("calls", "waits", "chain")}
        for name in ("event", "record", "frame", "outermost", "awaited"):
            place = getattr(self, name)
            moved[name] = int(events[place]) if place >= 0 else -1
        return replace(self, **moved)


class Finder:
    """One pass over a trace: ``points``, and ``cannot_say``."""

    def __init__(self, trace: Trace, awaited: Awaited) -> None:
        self.trace = trace
        self.awaited = awaited
        self.cannot_say: list[str] = []
        self.points: list[SyncPoint] = []
        self._pageable = self._pageable_copies()
        self._first_work = _first_work(trace)
        self._recorded_at = _recorded_at(trace)

    def find(self, records: Array) -> list[SyncPoint]:
        """All points. ``records``: positions of the profiler's synchronisation records."""
        trace = self.trace
        runtime = np.flatnonzero(trace.mask("runtime"))
        kinds = {place: kind for place in trace.names_in(runtime) if (kind := api_kind(trace.names[place])) is not None}
        calls = runtime[np.isin(trace.name[runtime], list(kinds))]
        of_record = dict(zip(callers(trace, records).tolist(), records.tolist(), strict=True))
        of_record.pop(-1, None)
        chosen = [event for event in calls.tolist() if self._waits(event, kinds, of_record)]
        frames = self._frames()
        chains = dict(zip([*chosen, *frames], enclosing(trace, [*chosen, *frames]), strict=True))
        groups: dict[int, SyncPoint] = {}
        for event in chosen:
            self._add_call(event, kinds[int(trace.name[event])], of_record.get(event, -1), chains[event], groups)
        joined = set(of_record.values())
        for record in records.tolist():
            if record not in joined:
                self._add_record(record)
        self._add_frames(frames, chains)
        for point in self.points:
            self._finish(point)
        return self.points

    # -- which calls are waits ---------------------------------------------------------------------------------------

    def _pageable_copies(self) -> dict[int, int]:
        """Copies from or to pageable memory, by the call that launched them."""
        copies, pageable = copy_kinds(self.trace), MEMORIES.index("pageable")
        within = links(self.trace).launch[copies.events[copies.direction == DIRECTIONS.index("DtoD")]]
        self._within_device = set(within.tolist())
        events = copies.events[(copies.source == pageable) | (copies.target == pageable)]
        launch = links(self.trace).launch[events]
        unknown = int(((copies.source == 0) & (copies.target == 0)).sum() + self._bare_host(copies.events))
        if unknown and self.trace.info.producer != "recording":  # there pageable copies are marks of their own
            self.cannot_say.append(
                f"{unknown:,} of {len(copies.events):,} copies do not say whether their host memory was pageable, so "
                "implicit synchronisations by copies may be missing"
            )
        return {int(call): int(copy) for call, copy in zip(launch, events, strict=True) if call >= 0}

    def _bare_host(self, events: Array) -> int:
        """Copies named ``Host -> Device`` (ROCm): pinned or not is not in the name."""
        names = self.trace.names
        bare = [one for one in self.trace.names_in(events) if "(Host -> " in names[one] or " -> Host)" in names[one]]
        return int(np.isin(self.trace.name[events], bare).sum())

    def _waits(self, event: int, kinds: dict[int, str], of_record: dict[int, int]) -> bool:
        kind = kinds[int(self.trace.name[event])]
        if kind == "async copy":
            return event in self._pageable
        if kind == "copy":
            return event not in self._within_device  # those return at once, whatever their name
        if kind == "event query":
            return event in of_record  # alone it is a poll of an allocator's, thousands of them
        if kind == "allocator":
            return self._held_up(event)
        return True

    def _held_up(self, event: int) -> bool:
        """Whether freeing or taking memory waited for the device: what it found queued ran for more than half of the
        call, and not beyond it."""
        start, length = int(self.trace.start[event]), int(self.trace.duration[event])
        device = self.awaited.devices[0] if len(self.awaited.devices) == 1 else None
        if device is None:
            return False
        until = self.awaited.until(start, start + length, device=device)
        return length > 0 and start + length // 2 < until <= start + length

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _add_call(self, event: int, kind: str, record: int, chain: list[int], groups: dict[int, SyncPoint]) -> None:
        trace = self.trace
        kind = "implicit copy" if kind in ("copy", "async copy") else kind
        around = self._wait_ranges(chain)
        reading = [one for one in around if operator(trace.name_of(one)) in READING_OPS]
        copying = [one for one in around if operator(trace.name_of(one)) in COPYING_OPS]
        copies = self._copies_in((reading or copying)[-1]) if reading or copying else []
        whole = (reading or (copying if copies else []) or [-1])[-1] if kind in ("stream", "implicit copy") else -1
        if whole >= 0:
            point = groups.get(whole)
            if point is None:
                name = operator(trace.name_of(whole))
                point = SyncPoint("item" if reading else "implicit copy", name, event, list(copies), chain=chain)
                groups[whole] = point
                self.points.append(point)
            if event not in point.calls:
                point.calls.append(event)
            if kind == "stream":  # the wait itself, rather than the copy in front of it
                point.event, point.chain = event, chain
        else:
            point = SyncPoint(kind, plain(trace.name_of(event)), event, [event], chain=chain)
            self.points.append(point)
        if kind not in NOT_OF_HOST and not self._returned_early(event):
            point.waits.append(event)
        if record >= 0:
            point.record = record

    def _returned_early(self, event: int) -> bool:
        """Whether the call queued a copy and was back before that was done: CUDA may stage a small pageable source."""
        copy = self._pageable.get(event, -1)
        return copy >= 0 and self._end(copy) > self._end(event)

    def _end(self, event: int) -> int:
        return int(self.trace.start[event] + self.trace.duration[event])

    def _copies_in(self, whole: int) -> list[int]:
        """Calls within an operator, on its thread, that launched copies."""
        trace = self.trace
        low, high = np.searchsorted(trace.start, [int(trace.start[whole]), self._end(whole)])
        inside = np.arange(low, high)
        inside = inside[(trace.lane[inside] == trace.lane[whole]) & (links(trace).work[inside] > 0)]
        return [event for event in inside.tolist() if "Memcpy" in trace.name_of(event)]

    def _add_record(self, record: int) -> None:
        kind = record_kind(self.trace.name_of(record), self.trace.args(record))
        if kind is None:
            self.cannot_say.append(f"a synchronisation record named {self.trace.name_of(record)!r} is of no known kind")
            return
        waits = [] if kind in NOT_OF_HOST else [record]
        self.points.append(SyncPoint(kind, self.trace.name_of(record), record, waits=waits, record=record))

    def _frames(self) -> list[int]:
        python = np.flatnonzero(self.trace.mask("python"))
        chosen = [place for place in self.trace.names_in(python) if synchronises(self.trace.names[place])]
        found: list[int] = python[np.isin(self.trace.name[python], chosen)].tolist()
        return found

    def _add_frames(self, frames: list[int], chains: dict[int, list[int]]) -> None:
        """Frames that synchronise, where the call that they ended in is not in the file."""
        explained = {one for point in self.points for one in point.chain}
        remaining = [event for event in frames if event not in explained]
        outer = {one for event in remaining for one in chains[event]}
        for event in remaining:
            if event not in outer:
                one = frame(self.trace.name_of(event))
                label = one.label if one else self.trace.name_of(event)
                chain = [event, *chains[event]]
                self.points.append(SyncPoint("python frame only", label, event, waits=[event], chain=chain))

    def _wait_ranges(self, chain: list[int]) -> list[int]:
        """The ranges at the beginning of a chain that do nothing but wait for the caller, innermost first."""
        found: list[int] = []
        for event in chain:
            kind, name = self.trace.kind_of(event), self.trace.name_of(event)
            if part_of_wait(kind, name):
                found.append(event)
            elif not between(kind, name):
                break
        return found

    # -- what each row says --------------------------------------------------------------------------------------------

    def _finish(self, point: SyncPoint) -> None:
        trace = self.trace
        around = self._wait_ranges(point.chain)
        if around:
            point.frame, point.outermost = around[0], around[-1]
        point.barrier = any(is_barrier(trace.kind_of(event), trace.name_of(event)) for event in point.chain)
        point.site, point.caller = site_and_caller(trace, point.chain)
        if point.calls:
            point.api_ns = int(trace.duration[point.calls].sum())
        self._say_where(point)
        known, point.awaited = self._awaited(point)
        if known and point.kind != "device-side wait":
            start, end = int(trace.start[point.event]), self._end(point.event)
            until = self._end(point.awaited) if point.awaited >= 0 else start
            point.gpu_wait_ns = max(0, min(until, end) - start)

    def _say_where(self, point: SyncPoint) -> None:
        """Device and stream, by the record, else by the copy that belongs to the wait."""
        if point.record >= 0:
            args, lane = self.trace.args(point.record), self.trace.lane_of(point.record)
            point.device = _number(args.get("device"), lane.device)
            point.stream = _number(args.get("stream"), lane.stream)
        if point.stream < 0:
            for call in point.calls:
                if call in self._first_work:
                    lane = self.trace.lane_of(self._first_work[call])
                    point.device, point.stream = lane.device, lane.stream

    def _awaited(self, point: SyncPoint) -> tuple[bool, int]:
        """Whether the file says which work was waited for, and the event that was done last of it (-1: none)."""
        awaited = self.awaited
        start, end = int(self.trace.start[point.event]), self._end(point.event)
        device = point.device if point.device >= 0 else None
        if not len(awaited) or point.kind == "python frame only":
            return False, -1
        if point.kind in ("device", "allocator"):
            alone = len(awaited.devices) == 1
            if device is None and not alone:
                return False, -1
            return True, awaited.last(start, end, device=awaited.devices[0] if device is None else device)
        if point.kind in ("event", "event query", "device-side wait"):
            stream, before = self._awaited_event(point)
            return before >= 0, awaited.last(before, end, device=device, stream=stream) if before >= 0 else -1
        if point.event in self._pageable:  # a call that returned early waited for nothing
            return True, self._pageable[point.event] if not self._returned_early(point.event) else -1
        if point.stream >= 0:
            return True, awaited.last(start, end, device=device, stream=point.stream)
        return False, -1

    def _awaited_event(self, point: SyncPoint) -> tuple[int, int]:
        """Stream that the event was recorded in, and when; (-1, -1) where the record does not say."""
        args = self.trace.args(point.record) if point.record >= 0 else {}
        stream = _number(args.get("wait_on_stream"), -1)
        correlation = _number(args.get("wait_on_cuda_event_record_corr_id"), -1)
        if stream < 0 or correlation < 0:
            return -1, -1
        return (stream, self._recorded_at[correlation]) if correlation in self._recorded_at else (-1, -1)


def _first_work(trace: Trace) -> dict[int, int]:
    """The first copy that each call launched."""
    copies = np.flatnonzero(trace.mask("memcpy"))
    launch, first = np.unique(links(trace).launch[copies], return_index=True)
    return {int(call): int(copies[place]) for call, place in zip(launch, first, strict=True) if call >= 0}


def _recorded_at(trace: Trace) -> dict[int, int]:
    """When each event was recorded on its stream, by the correlation id of the call as the file writes it: that is
    what records of waits go by."""
    calls = np.flatnonzero(trace.mask("runtime") & (trace.correlation >= 0))
    records = [place for place in trace.names_in(calls) if "EventRecord" in trace.names[place]]
    calls = calls[np.isin(trace.name[calls], records)]
    return {
        _number(trace.args(event).get("correlation"), int(trace.correlation[event])): int(trace.start[event])
        for event in calls.tolist()
    }


def _number(value: Any, otherwise: int) -> int:
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return found if abs(found) < 1 << 62 else otherwise
