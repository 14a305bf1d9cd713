"""One answer to "what limits this?": the device, the host, or waiting, with the figures it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2lab.trace.busy import PARTS, busy, gaps
from mrv2lab.trace.devices import NO_GPU, device_work
from mrv2lab.trace.intervals import union
from mrv2lab.trace.launch_queue import queue_depth, run_ahead
from mrv2lab.trace.links import links
from mrv2lab.trace.steps import steps
from mrv2lab.trace.syncs import blocked, syncs
from mrv2lab.trace.trace import Trace

LABELS: tuple[str, ...] = ("host-bound", "device-bound", "waiting", "mixed", "cannot tell")
FED = 0.9
"""A device that works, or is about to begin what was queued, for this share of its span is not held up by the host."""
MOST = 0.6
"""A cause of at least this share of the idle time is its main cause."""
LEAST_WORK = 20
"""Fewer pieces of device work are a beginning or an end of something, not a steady state."""

CUT_OFF: tuple[str, ...] = ("cut off", "ends in the middle of an event")
"""In the reasons of :class:`~mrv2lab.trace.trace.Problem`: the file ends before its events do."""
WORTH_SAYING_NS = 50_000
"""Outside of the devices' span less than this is no part of anything."""


@dataclass(frozen=True)
class Verdict:
    """``str()`` gives the sentence."""

    label: str
    """Of :data:`LABELS`."""
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    """``span_ns``, ``busy_ns``, ``idle_ns`` (over all devices), ``busy_share`` (of the span), the shares of idle time
    ``host_share`` (the launching thread worked or launched), ``waiting_share`` (it stood in a wait), ``queued_share``
    (the work was launched already), ``unrecorded_share``; ``copy_share`` (of busy time, only copies ran),
    ``device_events``, ``devices``, ``max_queue_depth``, ``median_ahead_ns`` (start of work minus launch),
    ``blocked_ns`` (some thread of the host stood in a wait), ``barrier_ns`` (callers of the input barrier saw),
    ``overhead_ns`` (the profiler's, within idle time), ``steps``; and outside of the span ``before_ns`` and
    ``after_ns`` (from the file's first event, and to its last), ``untold_ns`` (of ``before_ns``: between the launch of
    the first device work and its start). Empty where there is no device work."""

    def __str__(self) -> str:
        return self.sentence


def verdict(trace: Trace) -> Verdict:
    """What limits the work in ``trace``, from the first device work to the last.

    ``device-bound``: devices worked, or were about to begin what was queued, at least :data:`FED` of their span: the
    healthy case. Else by the main cause of their idle time: the launching thread worked or launched (``host-bound``),
    stood in a wait (``waiting``), or neither by far (``mixed``). ``cannot tell``: no device work, less than
    :data:`LEAST_WORK` pieces of it, or idle time whose cause was not recorded. What lies outside of that stretch counts
    for nothing, and the sentence says how long it is.
    """
    table = busy(trace)
    work = device_work(trace)
    if not len(work.events):
        if cut_off(trace):
            why = "the file was cut off, and no device work is in the part that is there"
            return Verdict("cannot tell", f"Cannot tell what limits this: {why}.")
        return Verdict("cannot tell", f"Cannot tell what limits this: {NO_GPU}.")
    found = _evidence(trace)
    if len(work.events) < LEAST_WORK:
        return Verdict(
            "cannot tell",
            f"Cannot tell what limits this: {len(work.events)} pieces of device work are too few for a steady state "
            f"(at least {LEAST_WORK}).",
            found,
        )
    label, why = _judge(found)
    modelled = " Device times are modelled." if trace.info.modelled else ""
    span = f"{found['span_ns'] / 1e6:,.1f} ms"
    if len(table) == 2:
        worked = f"the device worked {found['busy_share']:.1%} of the {span} from its first work to its last"
    else:
        devices = f"{len(table) - 1} devices together worked {found['busy_share']:.1%} of the {span}"
        worked = f"{devices} from the first work of each to its last"
    opening = "Cannot tell what limits this" if label == "cannot tell" else label.capitalize()
    return Verdict(label, f"{opening}: {worked}{why}.{_outside(found)}{modelled}", found)


def cut_off(trace: Trace) -> bool:
    """Whether the reader found that the file ends before its events do."""
    return any(said in problem.reason for problem in trace.problems for said in CUT_OFF)


def _evidence(trace: Trace) -> dict[str, Any]:
    table = busy(trace)
    each = table.iloc[:-1]
    span, worked = int(each["span_ns"].sum()), int(each["busy_ns"].sum())
    idle = gaps(trace)
    parts = {part: int(idle[part].sum()) for part in PARTS}
    total = max(sum(parts.values()), 1)
    depth, ahead, waits = queue_depth(trace), run_ahead(trace), syncs(trace)
    barrier = waits[waits["barrier"]]
    return {
        "span_ns": span,
        "busy_ns": worked,
        "idle_ns": span - worked,
        "busy_share": worked / span if span else 1.0,
        "host_share": (parts["host_ns"] + parts["launch_ns"]) / total,
        "waiting_share": parts["waiting_ns"] / total,
        "queued_share": parts["queued_ns"] / total,
        "unrecorded_share": parts["unrecorded_ns"] / total,
        "copy_share": _copies_alone(trace) / worked if worked else 0.0,
        "device_events": int(each["events"].sum()),
        "devices": len(each),
        "max_queue_depth": int(depth.attrs["max_depth"]),
        "median_ahead_ns": int(ahead["ahead_ns"].median()) if len(ahead) else -1,
        "blocked_ns": blocked(trace).total_ns,
        "barrier_ns": int(np.maximum(barrier["caller_ns"], barrier["api_ns"]).clip(lower=0).sum()),
        "overhead_ns": int(idle["overhead_ns"].sum()),
        "steps": len(steps(trace)),
        **outside(trace),
    }


def outside(trace: Trace) -> dict[str, int]:
    """What lies outside of the stretch from the first device work to the last, ns: ``before_ns``, ``after_ns``,
    ``untold_ns`` (see :class:`Verdict`). Empty without device work."""
    events = device_work(trace).events
    if not len(events):
        return {}
    first = int(events[np.argmin(trace.start[events])])
    begin, launch = int(trace.start[first]), int(links(trace).launch[first])
    launched = int(trace.end[launch]) if launch >= 0 else begin
    return {
        "before_ns": begin - int(trace.start.min()),
        "after_ns": int(trace.end.max()) - int(trace.end[events].max()),
        "untold_ns": untold if (untold := begin - launched) > WORTH_SAYING_NS else 0,
    }


def _outside(found: dict[str, Any]) -> str:
    """A sentence about it, or nothing where it is short."""
    before, after, untold = (found[f"{name}_ns"] / 1e6 for name in ("before", "after", "untold"))
    if found["before_ns"] + found["after_ns"] < max(WORTH_SAYING_NS, 0.01 * found["span_ns"]):
        return ""
    said = f" Outside of that lie {before:,.1f} ms of the trace before it and {after:,.1f} ms after it"
    if not untold:
        return f"{said}."
    return (
        f"{said}; {untold:,.1f} ms of them are between the launch of the first work and its start: whether the device "
        "was busy with what is not in the trace cannot be told."
    )


def _copies_alone(trace: Trace) -> int:
    """Time in which a device copied and computed nothing."""
    work = device_work(trace)
    is_copy = trace.mask("memcpy")
    alone = 0
    for place in range(len(work.devices)):
        events = work.of(place)
        computing = events[~is_copy[events]]
        everything = union(trace.start[events], trace.end[events]).total_ns
        alone += everything - union(trace.start[computing], trace.end[computing]).total_ns
    return alone


def _judge(found: dict[str, Any]) -> tuple[str, str]:
    """Label, and the rest of the sentence."""
    fed = found["busy_share"] + (1 - found["busy_share"]) * found["queued_share"]
    if fed >= FED:
        rest = f" (with pauses between queued work {fed:.1%})" if found["busy_share"] < FED else ""
        if found["copy_share"] > 0.5:
            return "device-bound", f"{rest}, {found['copy_share']:.0%} of that with copies alone: the copies limit it"
        return "device-bound", f"{rest}; the host kept it fed, which is healthy"
    idle = f"{found['idle_ns'] / 1e6:,.1f} ms idle"
    shares = {
        "the launching thread was at work": found["host_share"],
        "it stood in a wait": found["waiting_share"],
        "the work was launched already": found["queued_share"],
        "nothing of it was recorded": found["unrecorded_share"],
    }
    named = ", ".join(f"{share:.0%} while {what}" for what, share in shares.items() if share >= 0.005)
    depth = found["max_queue_depth"]
    ahead = f"; at most {depth:,} launch{'es' * (depth != 1)} waited in a queue" if depth else ""
    overhead = ""
    if found["overhead_ns"] > 0.05 * found["idle_ns"]:
        overhead = f"; {found['overhead_ns'] / 1e6:,.1f} ms of it are the profiler's own overhead"
    why = f"; of {idle}, {named}{ahead}{overhead}"
    if found["unrecorded_share"] >= MOST:
        return "cannot tell", f"{why}; record host activities to see what it did"
    if found["host_share"] >= MOST:
        return "host-bound", why
    if found["waiting_share"] >= MOST:
        return "waiting", why
    return "mixed", why
