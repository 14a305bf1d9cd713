"""Everything the file says about one event: exact times as text, arguments, where in the program, and its links."""

from __future__ import annotations

from typing import Any

import orjson

from mrv2lab.trace.call_site import enclosing, frame
from mrv2lab.trace.links import links
from mrv2lab.trace.trace import DEVICE_KINDS, LAUNCH_KINDS, Trace
from mrv2lab.widgets.timeline.text import plain

MOST_ARGS, MOST_WORK, MOST_RANGES = 60, 64, 12
CLOCKS = {"unix": "start on Unix time", "host": "start on the machine's clock", "session": "since the session's start"}


def details_of(trace: Trace, event: int) -> dict[str, Any]:
    """What is to be shown about an event. Times are text, since JavaScript's numbers end at 2^53.

    ``facts``: ``[name, value]`` pairs; ``args``: the same; ``stack``: the Python frames, innermost first; ``inside``:
    the named ranges and operators; ``launch``: the event that launched it or -1; ``work``: at most 64 events that it
    launched; ``works``: how many there are; ``missing``: sentences about what the file does not say.
    """
    kind = trace.kind_of(event)
    start, duration = int(trace.start[event]), int(trace.duration[event])
    facts = [["start", f"{start:,} ns"], ["end", f"{start + duration:,} ns"], ["duration", f"{duration:,} ns"]]
    if clock := CLOCKS.get(trace.info.clock):
        facts.append([clock, f"{start + trace.info.origin_ns:,} ns"])
    facts += [["kind", kind], ["lane", plain(trace.lane_of(event))]]
    if trace.nbytes[event] >= 0:
        facts.append(["bytes", f"{int(trace.nbytes[event]):,}"])
        if duration and kind == "memcpy":
            facts.append(["rate", f"{int(trace.nbytes[event]) / duration:,.2f} GB/s"])
    if trace.correlation[event] >= 0:
        facts.append(["correlation", f"{int(trace.correlation[event])}"])
    if trace.info.modelled and kind in DEVICE_KINDS:
        facts.append(["times", "modelled: they come from a cost model, not from a device"])
    known = links(trace)
    launch = int(known.launch[event])
    works = int(known.work[event])
    missing: list[str] = []
    if kind in DEVICE_KINDS and launch < 0:
        missing.append(
            "Its launch is not in the file: it happened before the recording, or host calls were not recorded."
        )
    host = launch if launch >= 0 else event if kind not in DEVICE_KINDS else -1
    stack, inside = _around(trace, host) if host >= 0 else ([], [])
    if host >= 0 and not stack and kind != "python":
        missing.append("No Python frames around it: record with_stack=True to see the call site.")
    if kind in LAUNCH_KINDS and launch >= 0:
        launch = -1
    if launch >= 0:
        late = start - int(trace.start[launch])
        facts += [["launched by", plain(trace.name_of(launch))], ["launch to start", f"{late:,} ns"]]
    if works:
        facts.append(["device work", f"{works:,} piece{'s' * (works != 1)}"])
    return {
        "name": plain(trace.name_of(event)),
        "kind": kind,
        "facts": facts,
        "args": _args(trace, event),
        "stack": stack,
        "inside": inside,
        "launch": launch,
        "work": [int(one) for one in known.work_of(event)[:MOST_WORK]] if works else [],
        "works": works,
        "missing": missing,
    }


def _around(trace: Trace, event: int) -> tuple[list[list[str]], list[list[str]]]:
    """``[where, what]`` of the Python frames, and ``[kind, name]`` of the ranges and operators, innermost first."""
    stack: list[list[str]] = []
    inside: list[list[str]] = []
    for one in enclosing(trace, [event])[0]:
        if one == event:
            continue
        name, kind = trace.name_of(one), trace.kind_of(one)
        if kind != "python":
            inside.append([kind, plain(name, 200)])
        elif known := frame(name):
            stack.append([plain(known.site or "built-in", 200), plain(known.label, 200)])
        else:
            stack.append(["", plain(name, 200)])
    return stack[:MOST_RANGES], inside[:MOST_RANGES]


def _args(trace: Trace, event: int) -> list[list[str]]:
    pairs = []
    for key, value in list(trace.args(event).items())[:MOST_ARGS]:
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        pairs.append([plain(key, 200), plain(text)])
    return pairs
