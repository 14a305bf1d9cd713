"""The traces that a merged one was made of. What names a device, a stream, an event or a correlation id names it
within one of them, so whoever goes by such names asks one member at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]


def member_of_lane(trace: Trace) -> Array:
    """[lanes] int64: number of the member that each lane is of; 0 in a trace that was not merged."""
    prefixes = [str(one.get("prefix", "")) for one in _told(trace)]
    longest_first = sorted(range(len(prefixes)), key=lambda number: -len(prefixes[number]))
    found = [
        next((number for number in longest_first if f"{lane.process}: ".startswith(f"{prefixes[number]}: ")), 0)
        for lane in trace.lanes
    ]
    return np.array(found, np.int64)


def members(trace: Trace) -> list[tuple[Array, Trace]]:
    """Of each member with events its positions in ``trace``, ascending, and itself: these events, on the common axis
    and under the common lanes' labels. Empty for a trace that was not merged."""
    found = []
    numbers = member_of_lane(trace)
    for number, told in enumerate(_told(trace)):
        events = np.flatnonzero(numbers[trace.lane] == number)
        prefix = str(told.get("prefix", ""))
        lanes = tuple(
            dataclasses.replace(lane, process=lane.process.removeprefix(prefix).removeprefix(": "))
            if numbers[place] == number
            else lane
            for place, lane in enumerate(trace.lanes)
        )
        info = dataclasses.replace(
            trace.info,
            producer=str(told.get("producer", "kineto")),
            title=prefix,
            modelled=told.get("modelled") is True,
            extra=told["extra"] if isinstance(told.get("extra"), dict) else {},
        )
        if len(events):
            found.append((events, dataclasses.replace(trace.select(events), info=info, lanes=lanes)))
    return found


def _told(trace: Trace) -> list[dict[str, Any]]:
    """What a merged trace says of its members."""
    told = trace.info.extra.get("traces") if trace.info.producer == "merged" else None
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
