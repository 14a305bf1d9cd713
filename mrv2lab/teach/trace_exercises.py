"""Exercises on a trace that check themselves: the right answer comes from the analyses of that trace, and a wrong one
is told why it is wrong, not what would be right."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Real

import pandas as pd

from mrv2lab.teach.trace_lesson import of_step
from mrv2lab.trace.call_site import Frame, frame
from mrv2lab.trace.launch_queue import queue_depth
from mrv2lab.trace.steps import steps
from mrv2lab.trace.sync_kinds import BARRIER
from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import Trace
from mrv2lab.trace.verdict import LABELS, verdict

TOLERANCE = 0.02
"""Share by which a time may be off, and 0.1 us at least."""
_SITE = re.compile(r"(?P<file>.+?)(?::|\()(?P<line>\d+)\)?(?::.*)?")


@dataclass(frozen=True)
class Answer:
    """True where the answer was right."""

    state: str
    """``right``, ``wrong``, ``open`` (nothing was answered) or ``cannot say`` (the file does not hold the answer)."""
    reason: str

    def __bool__(self) -> bool:
        return self.state == "right"

    def __repr__(self) -> str:
        return f"{self.state.capitalize()}: {self.reason}"


def find_the_barrier(trace: Trace, answer: str | None) -> Answer:
    """Where does the host wait before it may write the input buffers? ``answer`` is ``file:line``; the file's last part
    is enough."""
    waits = syncs(trace)
    barrier = waits[waits["barrier"] & waits["host_waits"]]
    sites = {site for site in barrier["site"] if site}
    if not sites:
        return Answer("cannot say", _missing(waits, f"no frame named {BARRIER} waits in it"))
    if answer is None:
        return Answer("open", "write the place as file:line, such as 'gpu_model_runner.py:123'")
    found = _SITE.fullmatch(str(answer).strip())
    if found is None:
        return Answer("wrong", f"{answer!r} is no place: write file:line, such as 'gpu_model_runner.py:123'")
    file, line = found["file"], int(found["line"])
    for site in sites:
        if _same(site, file, line):
            here = barrier[barrier["site"] == site]
            waited = here[["api_ns", "caller_ns"]].max(axis=1).sum() / 1e3
            return Answer("right", f"{_times(len(here))}, {waited:,.1f} us in all; {here['caller'].iloc[0]}")
    return Answer("wrong", _why_not_there(trace, waits, file, line))


def split_the_wait(
    trace: Trace,
    *,
    api_us: float | None = None,
    caller_us: float | None = None,
    unexplained_us: float | None = None,
) -> Answer:
    """The barrier that took its caller longest, in microseconds: the runtime's call, what the caller saw, and what of
    that is neither the call nor recorded overhead."""
    waits = syncs(trace)
    barrier = waits[waits["barrier"]]
    known = barrier[(barrier["caller_ns"] >= 0) & (barrier["api_ns"] >= 0)]
    if not len(known):
        lack = "frame" if len(barrier) and (barrier["caller_ns"] < 0).all() else "call of the runtime"
        what = f"of {len(barrier)} barrier waits the {lack} was not recorded" if len(barrier) else "no barrier in it"
        return Answer("cannot say", what if len(barrier) else _missing(waits, what))
    row = known.loc[known["caller_ns"].idxmax()]
    right = {name: int(row[f"{name}_ns"]) / 1e3 for name in ("api", "caller", "unexplained")}
    given = {"api": api_us, "caller": caller_us, "unexplained": unexplained_us}
    if None in given.values():
        missing = ", ".join(f"{name}_us" for name, value in given.items() if value is None)
        return Answer("open", f"still to be filled in: {missing}")
    for name, answer in given.items():
        if not _is_number(answer):
            return Answer("wrong", f"{name}_us: {answer!r} is no number; write it without quotes, in microseconds")
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    for name, value in numbers.items():
        if not _close(value, right[name]):
            return Answer("wrong", _why_not_long(name, value, right))
    share = right["unexplained"] / max(right["caller"], 1e-9)
    return Answer(
        "right",
        f"{share:.0%} of what the caller saw is in nobody's record. That it was another thread with the GIL is a guess "
        "that this file can neither prove nor refute",
    )


def predict_queue_depth(trace: Trace, row: int, answer: int | None) -> Answer:
    """How many launches of the step in ``row`` of ``steps(trace)`` wait at once, at most? A launch waits from its call
    to the start of its first work. Exactly, but one off is fine for the last step: where the trace ends, the queue may
    rise and fall with every launch."""
    part = of_step(trace, row)
    depth = queue_depth(part)
    if not len(depth):
        return Answer("cannot say", _missing(depth, "no launch of this step waited, or its device work is missing"))
    if answer is None:
        return Answer("open", "a whole number, please: how many launches wait at once, at most")
    if not _is_number(answer) or answer != int(answer):
        return Answer("wrong", f"{answer!r} is no whole number; write how many launches, without quotes")
    step, right = steps(trace).iloc[row], int(depth.attrs["max_depth"])
    allowed = 1 if row == len(steps(trace)) - 1 else 0
    kernels, launches = int(step["gpu_events"]), int(step["launches"])
    if abs(answer - right) <= allowed:
        how = f"its {launches} launches own {kernels} pieces of device work, and {right} of them waited at once"
        return Answer("right", how)
    if launches < kernels and abs(answer - kernels) <= max(1, TOLERANCE * kernels):
        return Answer("wrong", "you counted kernels: a graph launch waits as one, however many kernels it owns")
    if answer > launches:
        return Answer("wrong", f"the step has {launches} launches, and no more than these can wait")
    if answer < right and not step["gpu_events_inside"]:
        return Answer(
            "wrong",
            "too few: none of the step's work began while the host was still launching. So who had left?",
        )
    side = "too many: some had begun before others were launched" if answer > right else "too few"
    return Answer("wrong", f"{side}. queue_depth(of_step(trace, {row})) shows how it rises and falls")


def name_the_limit(trace: Trace, row: int, answer: str | None) -> Answer:
    """What limits the step in ``row``? One of ``verdict.LABELS``, in capitals or not."""
    found = verdict(of_step(trace, row))
    if answer is None:
        return Answer("open", f"choose one of {', '.join(LABELS)}")
    answer = answer.strip().lower() if isinstance(answer, str) else answer
    if answer not in LABELS:
        return Answer("wrong", f"{answer!r} is none of {', '.join(LABELS)}")
    if answer == found.label:
        return Answer("right", found.sentence)
    seen = found.evidence
    if not seen:
        return Answer("wrong", "look whether there is any device work at all")
    if answer == "waiting":
        blocked = seen["waiting_share"]
        return Answer("wrong", f"the launching thread stood in a wait for {blocked:.0%} of the device's idle time only")
    if answer == "cannot tell":
        return Answer("wrong", f"{seen['device_events']} pieces of device work, and a host beside them: that is enough")
    return Answer(
        "wrong",
        f"the device worked {seen['busy_share']:.1%} of the step's own span; of its idle time the host was at work for "
        f"{seen['host_share']:.0%}, and for {seen['queued_share']:.0%} the next work was launched already",
    )


# -- reasons -----------------------------------------------------------------------------------------------------------


def _why_not_there(trace: Trace, waits: pd.DataFrame, file: str, line: int) -> str:
    there = waits[[bool(site) and _same(site, file, line) for site in waits["site"]]]
    if len(there):
        kinds = ", ".join(sorted(set(there["kind"])))
        if not there["host_waits"].any():
            return f"what syncs() finds there ({kinds}) did not hold up the host: host_waits is False"
        return f"the host waits there ({kinds}), but not to protect input buffers: look for barrier=True"
    frames = {name: one for name in trace.names if (one := frame(name)) is not None and one.file}
    here = {name: one for name, one in frames.items() if _same(one.site, file, line)}
    if not here:
        return f"no frame of the file begins at {file}:{line}; a place is the line where a function was entered"
    one = next(iter(here.values()))
    if one.function == BARRIER:
        return "that is the barrier's other end: there the event is recorded, and nobody waits"
    calls = _calls(trace, here)
    return f"{one.function} is entered there ({_times(calls)}), and nothing waits right in it"


def _calls(trace: Trace, names: dict[str, Frame]) -> int:
    return int((trace.mask("python") & trace.named(lambda name: name in names)).sum())


def _why_not_long(name: str, value: float, right: dict[str, float]) -> str:
    if _close(value / 1e3, right[name]):
        return f"{name}_us: the table is in nanoseconds, the answer in microseconds"
    for other, length in right.items():
        if other != name and _close(value, length):
            return f"{name}_us: that is {_MEANING[other]}"
    if name == "unexplained" and value == 0:
        return "unexplained_us: the runtime's call is far shorter than what the caller saw. The rest went somewhere"
    return f"{name}_us: that is not {_MEANING[name]}, of the barrier that took its caller longest"


_MEANING = {
    "api": "how long the runtime's call took (api_ns)",
    "caller": "how long the caller was away (caller_ns)",
    "unexplained": "what is left of the caller's time without the call and recorded overhead (unexplained_ns)",
}


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _close(value: float, right: float) -> bool:
    return abs(value - right) <= max(0.1, TOLERANCE * abs(right))


def _same(site: str, file: str, line: int) -> bool:
    """Whether ``file:line`` is this site; the file may be its last parts only."""
    where, _, number = site.rpartition(":")
    return number == str(line) and (where == file or where.endswith("/" + file.lstrip("/")))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _missing(table: pd.DataFrame, what: str) -> str:
    said = table.attrs["cannot_say"]
    return f"{what}{': ' + said[0] if said else ''}"
