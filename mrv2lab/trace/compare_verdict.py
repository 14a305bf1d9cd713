"""Whether two traces may be compared at all, and the comparison in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mrv2lab.trace.align import microseconds
from mrv2lab.trace.compare_noise import FEWEST
from mrv2lab.trace.compare_workload import Workload, workload
from mrv2lab.trace.step_batches import FACTS
from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

HOST_PHASES = "host phases"
"""Row of the sum over our phases."""
_OF_STEP = {
    "host": "a step's host time",
    HOST_PHASES: "a step's host time in phases",
    "device": "a step's device time",
}
_COUNTED = ("barrier waits", "host waits", "copies HtoD", "bytes HtoD", "publishes", "bytes published")
"""What the sentence says of the counts: what the transfer policies differ in."""
_SHOWN = 3
"""Steps, names and phases that a sentence lists."""


class Comparability(NamedTuple):
    """What speaks against a comparison."""

    # Reasons for which no time may be compared.
    refused: list[str]
    # Reasons for which no host time may be compared, and no device time.
    host_refused: list[str]
    device_refused: list[str]
    # What a reader should know all the same.
    notes: list[str]
    workload: Workload


def comparability(a: Trace, b: Trace, left: pd.DataFrame, right: pd.DataFrame, how: str) -> Comparability:
    """Hold machine, instrument and workload of two traces beside each other; ``left`` and ``right`` are the matched
    steps, row by row, and ``how`` they were matched."""
    same = workload(left, right)
    found = Comparability([], [], [], [], same)
    _devices(a, b, found)
    _instruments(a, b, found)
    if not len(left):
        found.refused.append("no step of one is a step of the other")
        return found
    _models(a, b, found)
    if same.differs:
        found.refused.append(same.sentence)
    elif not same.known:
        found.notes.append(same.sentence)
    if how == "order":
        found.notes.append("the steps carry no common number or name: the k-th step of each is taken for the same")
    if len(left) < FEWEST:
        found.notes.append(too_few(len(left)))
    return found


def too_few(steps: int) -> str:
    """The sentence about it."""
    return f"too few steps: {steps} common step{'s' if steps > 1 else ''}, at least {FEWEST} are needed"


def _devices(a: Trace, b: Trace, found: Comparability) -> None:
    if a.info.modelled != b.info.modelled:
        which, other = (a, b) if a.info.modelled else (b, a)
        found.refused.append(
            f"the device times of {which.info.title} are modelled and those of {other.info.title} measured"
        )
    elif a.info.modelled:
        found.device_refused.append("the device times of both come from a cost model, not from a device")
    threaded = [trace.info.title for trace in (a, b) if _part(trace, "config", "runner", "stream") == "threaded"]
    if threaded and a.info.modelled and b.info.modelled:
        found.refused.append(f"{' and '.join(threaded)} ran on a threaded software stream, whose times the GIL rules")
    names = [_names(trace) for trace in (a, b)]
    if names[0] and names[1] and names[0] != names[1]:
        found.refused.append(f"different devices: {', '.join(sorted(names[0]))} and {', '.join(sorted(names[1]))}")
    elif not names[0] or not names[1]:
        unnamed = [trace.info.title for trace, known in zip((a, b), names, strict=True) if not known]
        found.notes.append(f"no device is named in {' and '.join(unnamed)}, so they may be different ones")
    if a.info.world_size != b.info.world_size and min(a.info.world_size, b.info.world_size) > 0:
        found.refused.append(f"different numbers of ranks: {a.info.world_size} and {b.info.world_size}")
    for key in sorted(a.info.versions.keys() & b.info.versions.keys()):
        if a.info.versions[key] != b.info.versions[key]:
            found.notes.append(f"different versions: {key} {a.info.versions[key]} and {b.info.versions[key]}")


def _names(trace: Trace) -> set[str]:
    """Names of the devices, as far as the file gives any."""
    named = {str(device.get("name") or "") for device in trace.info.devices} | {
        str(trace.info.extra.get("device") or "")
    }
    return named - {""}


def _instruments(a: Trace, b: Trace, found: Comparability) -> None:
    backends = [trace.info.extra.get("backend") for trace in (a, b)]
    if None not in backends and backends[0] != backends[1]:
        found.notes.append(f"different kernel backends: {backends[0]} and {backends[1]}")
    paused = [trace.info.title for trace in (a, b) if trace.info.extra.get("mode") == "step"]
    if paused:
        found.refused.append(f"{' and '.join(paused)} paused between phases: such times are no run's")
    if a.info.producer != b.info.producer:
        found.host_refused.append(
            f"{a.info.title} was recorded by {a.info.producer}, {b.info.title} by {b.info.producer}: "
            "what the instruments cost the host differs"
        )
    elif a.mask("python").any() != b.mask("python").any():
        which = a if a.mask("python").any() else b
        found.host_refused.append(f"only {which.info.title} holds Python frames, and recording them slows the host")


def _models(a: Trace, b: Trace, found: Comparability) -> None:
    models = [_part(trace, "config", "model") for trace in (a, b)]
    if models[0] is not None and models[1] is not None and models[0] != models[1]:
        found.refused.append("different models by the recordings' configurations")


def _part(trace: Trace, *keys: str) -> Any:
    """A nested value of the file's top level, or of what a profile of ours wrote there; None where it is in neither."""
    for outermost in trace.info.extra, trace.info.extra.get(FACTS):
        found: Any = outermost
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


# -- the sentence


def kernel_note(kernels: pd.DataFrame) -> list[str]:
    """What the kernel sets have not in common."""
    work = kernels[kernels["kind"].isin(["kernel", "graph"])]
    parts = []
    for change, side in ("removed", "a"), ("added", "b"):
        names = work.loc[work["change"] == change, "name"].tolist()
        if names:
            more = ", ..." if len(names) > _SHOWN else ""
            shown = ", ".join(name if len(name) <= 60 else name[:57] + "..." for name in names[:_SHOWN])
            parts.append(f"{len(names):,} kernel{'s' if len(names) > 1 else ''} only in {side} ({shown}{more})")
    return [" and ".join(parts)] if parts else []


def label(frame: pd.DataFrame, found: Comparability) -> str:
    """One of the four verdicts, for the host's part of a step: the device may say otherwise."""
    of_step = frame[frame["group"] == "step"].set_index("phase")["verdict"]
    return "cannot tell" if found.refused else str(of_step[HOST_PHASES if HOST_PHASES in of_step.index else "host"])


def sentence(
    titles: Sequence[str], frame: pd.DataFrame, counts: pd.DataFrame, found: Comparability, steps: int, runners: bool
) -> str:
    """Verdict in words: times first, then what is counted; ``runners``: the two traces are of different runners."""
    counted = _counted(titles, counts)
    if found.refused:
        return _joined([f"cannot tell which is faster: {found.refused[0]}", *counted])
    if steps < FEWEST:
        return _joined([f"cannot tell which is faster: {too_few(steps)}", *_only(titles, frame), *counted])
    rows = {row["phase"]: row for row in frame[frame["group"] == "step"].to_dict("records")}
    host = HOST_PHASES if HOST_PHASES in rows else "host"
    said = [_row(titles, rows[name], _OF_STEP[name]) for name in (host, "device")]
    moved = frame[(frame["group"] == "phase") & frame["verdict"].isin(["a faster", "b faster"])]
    moved = moved.iloc[np.argsort(-moved["difference_ns"].abs().to_numpy(np.int64), kind="stable")[:_SHOWN]]
    said += [_row(titles, row, f"phase {row['phase']}") for row in moved.to_dict("records")]
    said += _only(titles, frame)
    said += counted
    if runners or frame["verdict"].isin(["a faster", "b faster"]).any():
        said.append(f"over {steps:,} common steps of one run each; time of a step is not throughput")
    return _joined(said)


def _joined(parts: Sequence[str]) -> str:
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:] + "."


def _row(titles: Sequence[str], row: Mapping[str, Any], name: str) -> str:
    if row["verdict"] == "cannot tell":
        return f"{name}: cannot tell ({row['reason']})"
    medians = (
        f"median {microseconds(row['median_a_ns'])} in {titles[0]}, {microseconds(row['median_b_ns'])} in {titles[1]}"
    )
    if row["verdict"] == "same within noise":
        return f"{name}: same within noise ({medians})"
    shorter = titles[0] if row["verdict"] == "a faster" else titles[1]
    return f"{name}: shorter in {shorter} ({medians})"


def _only(titles: Sequence[str], frame: pd.DataFrame) -> list[str]:
    """Phases that one side has and the other has not; the longest of each."""
    said = []
    rows = frame[frame["group"] == "phase"]
    for title, mine, other in (titles[0], "a", "b"), (titles[1], "b", "a"):
        only = rows[(rows[f"n_{mine}"] > 0) & (rows[f"n_{other}"] == 0)]
        only = only.sort_values(f"median_{mine}_ns", ascending=False, kind="stable").head(_SHOWN)
        names = [
            f"{name} ({microseconds(median)})"
            for name, median in zip(only["phase"], only[f"median_{mine}_ns"], strict=True)
        ]
        if names:
            said.append(f"only in {title}: {', '.join(names)}")
    return said


def _counted(titles: Sequence[str], counts: pd.DataFrame) -> list[str]:
    """What differs in number a step."""
    rows = counts[counts["what"].isin(_COUNTED) & (counts["mean_a"] != counts["mean_b"])]
    rows = rows.sort_values("what", key=lambda names: names.map(_COUNTED.index))
    parts = [
        f"{what} {_figure(a)} and {_figure(b)}"
        for what, a, b in zip(rows["what"], rows["mean_a"], rows["mean_b"], strict=True)
    ]
    return [f"a step has in {titles[0]} and {titles[1]} on average {', '.join(parts)}"] if parts else []


def _figure(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
