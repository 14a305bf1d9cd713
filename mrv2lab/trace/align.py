"""Which moment of one trace is which moment of another: offsets, with the method and what is known of its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from mrv2lab.trace.collectives import Bound, collective_bound, different_ranks
from mrv2lab.trace.trace import DEVICE_KINDS, Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]
Method = Literal["auto", "clock", "collective", "step", "first kernel", "start"]

MOST_APART_NS = 3_600_000_000_000
"""Traces of one run overlap, or follow each other within minutes; an hour between them and the clock joins nothing."""
SAME_BOOT_NS = 1_000_000_000
"""A machine's wall clock minus its monotonic clock moves by less than this while it runs, by more when it restarts."""


@dataclass(frozen=True)
class Alignment:
    """How several traces lie on the first one's axis."""

    offsets_ns: tuple[int, ...]
    """What to add to each trace's ``start``; 0 for the first."""
    method: str
    """``clock``, ``collective``, ``step``, ``first kernel`` or ``start``."""
    uncertainty_ns: int | None
    """How far the worst of them may be off, to either side; None: not known."""
    sentence: str
    """Method, uncertainty and, for ``auto``, why no better method was possible."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "offsets_ns": list(self.offsets_ns),
            "method": self.method,
            "uncertainty_ns": self.uncertainty_ns,
            "sentence": self.sentence,
        }


class _Offset(NamedTuple):
    """One trace against the first."""

    offset_ns: int
    uncertainty_ns: int | None
    how: str


def align(traces: Sequence[Trace], by: Method = "auto", *, step: int | str | None = None) -> Alignment:
    """Put traces on the axis of the first one.

    ``clock``: both clocks are ``unix``, or ``host`` of one boot. A collective that both ranks took part in bounds the
    error; a clock that contradicts it is refused. ``collective``: by those bounds alone. ``step``: the median distance
    of the starts of the steps that all have (by number, else by name), uncertain by half the distance of its
    quartiles; ``step`` picks the one step whose starts shall coincide. ``first kernel``: the first device work (of the
    step ``step``, else of the first common step, else of the file). ``start``: the first events. ``auto``: ``clock``
    where the traces overlap in time, else the first of the others that is possible.

    Raises:
        TraceError: a trace holds no events, or ``by`` is impossible for these traces; says why and what to use.
    """
    if not traces:
        raise TraceError("nothing to align: give at least one trace")
    if by not in get_args(Method):
        raise TraceError(f"by={by!r} is no way to align traces: use one of {', '.join(get_args(Method))}")
    for trace in traces:
        if not len(trace):
            raise TraceError(f"{trace.info.title} holds no events, so there is nothing to align")
    return _align(traces, by, step) if by != "auto" else first_possible(traces, _order(traces, step), step)


def first_possible(traces: Sequence[Trace], methods: Sequence[Method], step: int | str | None = None) -> Alignment:
    """:func:`align` by the first of these methods that is possible; the sentence says why the others are not.

    Raises:
        TraceError: none is possible.
    """
    refusals = []
    for method in methods:
        try:
            found = _align(traces, method, step)
        except TraceError as refusal:
            refusals.append(f"not by {method}, for {refusal}")
            continue
        return Alignment(found.offsets_ns, found.method, found.uncertainty_ns, "; ".join([found.sentence, *refusals]))
    raise TraceError(f"these traces cannot be aligned: {'; '.join(refusals)}")


def _order(traces: Sequence[Trace], step: int | str | None) -> tuple[Method, ...]:
    """The methods that ``auto`` tries, best first."""
    if step is not None:
        return "step", "first kernel", "start"
    if different_ranks(traces):
        return "clock", "collective", "step", "first kernel", "start"
    if all(_overlap(traces[0], other) for other in traces[1:]):
        return "clock", "step", "first kernel", "start"
    return "step", "first kernel", "start"


def _align(traces: Sequence[Trace], by: Method, step: int | str | None) -> Alignment:
    method = _METHODS[by]
    found = [_Offset(0, 0, "")] + [method(traces[0], other, step) for other in traces[1:]]
    if len(traces) == 1:
        return Alignment((0,), by, 0, "one trace: nothing to align")
    known = [one.uncertainty_ns for one in found if one.uncertainty_ns is not None]
    uncertainty = max(known) if len(known) == len(found) else None
    error = "the uncertainty is not known" if uncertainty is None else f"uncertain by {microseconds(uncertainty)}"
    how = "; ".join(dict.fromkeys(one.how for one in found[1:]))
    return Alignment(tuple(one.offset_ns for one in found), by, uncertainty, f"aligned by {by}: {how}; {error}")


def microseconds(ns: float) -> str:
    """A time for people: ``1,234.567 us``."""
    return f"{ns / 1e3:,.3f} us"


# -- by clock


def _overlap(a: Trace, b: Trace) -> bool:
    """Whether two traces on comparable clocks show the same time."""
    if _incomparable(a, b):
        return False
    (a_start, a_end), (b_start, b_end) = _stretch(a), _stretch(b)
    return max(a_start, b_start) <= min(a_end, b_end)


def _stretch(trace: Trace) -> tuple[int, int]:
    """First and last moment on the trace's clock."""
    return trace.info.origin_ns + int(trace.start.min()), trace.info.origin_ns + int(trace.end.max())


def _incomparable(a: Trace, b: Trace) -> str:
    """Why two clocks cannot be compared; empty if they can."""
    clocks = a.info.clock, b.info.clock
    if clocks == ("unix", "unix"):
        return ""
    if clocks == ("host", "host"):
        boots = [_boot(trace) for trace in (a, b)]
        if boots[0] is None or boots[1] is None:
            return "their host clocks say nothing about which machine and boot they belong to"
        if abs(boots[0] - boots[1]) > SAME_BOOT_NS:
            return (
                f"their host clocks started at {_moment(boots[0])} and {_moment(boots[1])}: two machines or two boots"
            )
        return ""
    return f"{a.info.title} has a clock of kind {clocks[0]!r} and {b.info.title} one of kind {clocks[1]!r}"


def _boot(trace: Trace) -> int | None:
    """Wall-clock time at which a recording's host clock read 0."""
    unix, host = (trace.info.extra.get(key) for key in ("epoch_unix_ns", "epoch_host_ns"))
    return unix - host if isinstance(unix, int) and isinstance(host, int) else None


def _moment(unix_ns: int) -> str:
    try:
        return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{unix_ns:,} ns"


_INSTEAD = "align by 'step' or 'first kernel' instead"


def _by_clock(a: Trace, b: Trace, step: int | str | None) -> _Offset:
    if why := _incomparable(a, b):
        starts = f"{a.info.origin_ns:,} ns and {b.info.origin_ns:,} ns"
        raise TraceError(f"the clocks cannot be compared (origins {starts}): {why}; {_INSTEAD}")
    (a_start, a_end), (b_start, b_end) = _stretch(a), _stretch(b)
    apart = max(a_start, b_start) - min(a_end, b_end)
    if apart > MOST_APART_NS:
        times = f"{a.info.title} starts at {_moment(a_start)}, {b.info.title} at {_moment(b_start)}"
        raise TraceError(f"{times}: {apart / 3.6e12:,.1f} hours lie between them; {_INSTEAD}")
    offset = b.info.origin_ns - a.info.origin_ns
    bound = collective_bound(a, b)
    if bound is None:
        one = a.info.clock == "host"
        how = "one host clock" if one else "both clocks are wall clocks and no collective shows how far they agree"
        return _Offset(offset, 0 if one else None, how)
    if not bound.low_ns <= offset <= bound.high_ns:
        away = max(bound.low_ns - offset, offset - bound.high_ns)
        raise TraceError(
            f"the clocks of {a.info.title} and {b.info.title} contradict {bound.collectives:,} collectives of both by "
            f"{microseconds(away)}; align by 'collective' or 'step' instead"
        )
    worst = max(offset - bound.low_ns, bound.high_ns - offset)
    return _Offset(offset, worst, f"wall clocks, bounded by {bound.collectives:,} common collectives")


def _by_collective(a: Trace, b: Trace, step: int | str | None) -> _Offset:
    bound: Bound | None = collective_bound(a, b)
    if bound is None:
        raise TraceError(
            f"{a.info.title} and {b.info.title} show no collective that all ranks of one run took part in equally "
            f"often; {_INSTEAD}"
        )
    worst = max(bound.best_ns - bound.low_ns, bound.high_ns - bound.best_ns)
    return _Offset(
        bound.best_ns, worst, f"the ends of {bound.collectives:,} common collectives, none before its last start"
    )


# -- by step


def match_steps(a: pd.DataFrame, b: pd.DataFrame) -> tuple[Array, Array, str]:
    """Rows [k], [k] of two frames of :func:`~mrv2lab.trace.steps.steps` that are the same step, and how that is known:
    ``number``, ``name`` (the k-th of that name in both) or ``order`` (same source, nothing in common: the k-th step of
    both); empty rows and ``""`` if not at all."""
    nothing = np.empty(0, np.int64)
    if not len(a) or not len(b) or set(a["source"]) != set(b["source"]):
        return nothing, nothing, ""
    for how, column in ("number", "number"), ("name", "step"):
        keys = [_keys(frame[column]) for frame in (a, b)]
        common = [key for key in keys[0] if key in keys[1]]
        if common:
            return *(np.array([key_rows[key] for key in common], np.int64) for key_rows in keys), how  # type: ignore[return-value]
    count = np.arange(min(len(a), len(b)), dtype=np.int64)
    return count, count, "order"


def _keys(values: pd.Series[Any]) -> dict[tuple[Any, int], int]:
    """(value, how often it came before) -> row; unknown values are left out."""
    seen: dict[Any, int] = {}
    keys: dict[tuple[Any, int], int] = {}
    known = values.notna().to_numpy()
    for row, value in enumerate(values.tolist()):
        if known[row]:
            keys[value, seen.get(value, 0)] = row
            seen[value] = seen.get(value, 0) + 1
    return keys


def _steps(trace: Trace) -> pd.DataFrame:
    from mrv2lab.trace.steps import steps

    return steps(trace)


def _common_steps(a: Trace, b: Trace, step: int | str | None) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """The matched steps of both, row by row, and the row of ``step`` among them (0 without one)."""
    frames = _steps(a), _steps(b)
    rows_a, rows_b, how = match_steps(*frames)
    if how not in ("number", "name"):
        have = [_what_steps(trace, frame) for trace, frame in zip((a, b), frames, strict=True)]
        raise TraceError(f"no step is in both: {have[0]}, {have[1]}; align by 'first kernel' or 'start' instead")
    left, right = frames[0].iloc[rows_a], frames[1].iloc[rows_b]
    if step is None:
        return left, right, 0
    named = (left["number"] == step) if isinstance(step, int) else (left["step"] == step)
    if not named.any():
        raise TraceError(f"step {step!r} is not in both traces: they share {_what_steps(a, left)}")
    return left, right, int(np.flatnonzero(named.to_numpy(bool))[0])


def _what_steps(trace: Trace, frame: pd.DataFrame) -> str:
    if not len(frame):
        return f"{trace.info.title} names no steps"
    first, last = frame["step"].iloc[0], frame["step"].iloc[-1]
    return f"{trace.info.title} has {first!r}" + (f" to {last!r}" if len(frame) > 1 else "")


def _by_step(a: Trace, b: Trace, step: int | str | None) -> _Offset:
    left, right, row = _common_steps(a, b, step)
    distance = left["host_start_ns"].to_numpy(np.int64) - right["host_start_ns"].to_numpy(np.int64)
    q1, median, q3 = np.percentile(distance, (25, 50, 75))
    offset = round(median) if step is None else int(distance[row])
    if step is not None:
        how = f"step {left['step'].iloc[row]!r} starts at the same moment"
    else:
        how = f"the starts of {len(distance):,} common step{'s' if len(distance) > 1 else ''}"
    spread = round((q3 - q1) / 2)
    # Where each run goes its own pace, no offset is right everywhere; that is what the spread says.
    return _Offset(offset, spread if len(distance) > 1 else None, how)


# -- by device work, by start


def _by_first_kernel(a: Trace, b: Trace, step: int | str | None) -> _Offset:
    try:
        left, right, row = _common_steps(a, b, step)
    except TraceError:
        if step is not None:
            raise
        starts = [_first_work(trace) for trace in (a, b)]
        return _Offset(starts[0] - starts[1], None, "the first device work of each file")
    started = (left["gpu_start_ns"].to_numpy(np.int64) >= 0) & (right["gpu_start_ns"].to_numpy(np.int64) >= 0)
    if step is not None:
        started &= np.arange(len(left)) == row
    if not started.any():
        if step is not None:
            raise TraceError(f"step {step!r} has no device work in one of the traces; align by 'step' instead")
        starts = [_first_work(trace) for trace in (a, b)]
        return _Offset(starts[0] - starts[1], None, "the first device work of each file")
    row = int(np.flatnonzero(started)[0])
    offset = int(left["gpu_start_ns"].iloc[row]) - int(right["gpu_start_ns"].iloc[row])
    return _Offset(offset, None, f"the first device work of step {left['step'].iloc[row]!r} in both")


def _first_work(trace: Trace) -> int:
    work = trace.start[trace.mask(*DEVICE_KINDS)]
    if not len(work):
        raise TraceError(f"no GPU activity recorded in {trace.info.title}; align by 'step' or 'start' instead")
    return int(work.min())


def _by_start(a: Trace, b: Trace, step: int | str | None) -> _Offset:
    return _Offset(int(a.start.min()) - int(b.start.min()), None, "the first event of each file")


_METHODS: dict[str, Callable[[Trace, Trace, int | str | None], _Offset]] = {
    "clock": _by_clock,
    "collective": _by_collective,
    "step": _by_step,
    "first kernel": _by_first_kernel,
    "start": _by_start,
}
