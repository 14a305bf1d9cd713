"""Correlation ids in the arguments of a merged trace, which still are those of the files that it was merged from."""

from __future__ import annotations

import orjson

from mrv2lab.trace.members import member_of_lane
from mrv2lab.trace.trace import Lane, Trace

_RECORD = "wait_on_cuda_event_record_corr_id"
"""Of a synchronisation record: the call that recorded the event which is waited for."""


class Renumbered:
    """``renumbered(raw, lane, correlation)``: an event's arguments as JSON with the ids of the trace's column, so that
    ids which two files share stay apart."""

    def __init__(self, trace: Trace) -> None:
        self._member = dict(zip(trace.lanes, member_of_lane(trace).tolist(), strict=True))
        self._recorded: dict[tuple[int, int], int] = {}
        is_record = trace.named(lambda name: "EventRecord" in name) & trace.mask("runtime") & (trace.correlation >= 0)
        for event in is_record.nonzero()[0].tolist():
            known = trace.args(event).get("correlation")
            if isinstance(known, int):
                self._recorded[self._member[trace.lane_of(event)], known] = int(trace.correlation[event])

    def __call__(self, raw: bytes, lane: Lane, correlation: int) -> bytes:
        args = orjson.loads(raw)
        if "correlation" in args:
            args["correlation"] = correlation
        if _RECORD in args:
            args[_RECORD] = self._recorded.get((self._member[lane], args[_RECORD]), -1)
        return orjson.dumps(args)
