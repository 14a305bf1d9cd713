"""Two traces beside each other, phase by phase and step by step, with a verdict that may be "cannot tell"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.align import Alignment, Method, align, first_possible, match_steps, microseconds
from mrv2lab.trace.compare_noise import judge
from mrv2lab.trace.compare_phases import Phases, counts, phases
from mrv2lab.trace.compare_structure import kernels, same_events, waits
from mrv2lab.trace.compare_verdict import HOST_PHASES, Comparability, comparability, kernel_note, label, sentence
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What :func:`compare` found. Every frame has ``attrs["cannot_say"]``, a list of sentences."""

    titles: tuple[str, str]
    frame: pd.DataFrame
    """One row a quantity: ``group`` (``step`` or ``phase``), ``phase`` (of a step: ``host``, its range;
    ``host phases``, the sum of our phases; ``device``, first start to last end; ``device busy``), ``n_a``, ``n_b``
    (values, one a step that has it), ``median_a_ns``, ``median_b_ns``, ``q1_a_ns``, ``q3_a_ns``, ``q1_b_ns``,
    ``q3_b_ns``, ``difference_ns`` (b - a) (nullable), ``ratio`` (b / a), ``p`` (Holm-corrected), ``verdict`` (a
    faster, b faster, same within noise, cannot tell), ``reason``. A phase has a value in each step that has it; where
    the two differ in how many those are, the reason says so."""
    steps: pd.DataFrame
    """One row a common step: ``step``, ``number``, ``start_ns``, ``end_ns`` (its range in a, on a's axis),
    ``b_start_ns`` (where b's begins on that axis), ``a_ns``, ``b_ns``, ``delta_ns`` (host range, b - a), ``a_gpu_ns``,
    ``b_gpu_ns``, ``delta_gpu_ns`` (NA: no device work), ``kind`` (in a: prefill, decode, mixed, unknown), ``workload``
    (requests and tokens in both: same, different, not known), ``label``."""
    counts: pd.DataFrame
    """One row a thing that can be counted in a step: ``what``, ``median_a``, ``median_b``, ``mean_a``, ``mean_b``, over
    the common steps."""
    kernels: pd.DataFrame
    """See :func:`~mrv2lab.trace.compare_structure.kernels`: of the whole traces."""
    syncs: pd.DataFrame
    """See :func:`~mrv2lab.trace.compare_structure.waits`: of the whole traces."""
    alignment: Alignment
    label: str
    """The verdict on a step's host time (in phases, where there are any), one of ``frame.verdict``."""
    verdict: str
    """One sentence."""
    workload: str
    """One sentence: whether both did the same work in the common steps."""
    reasons: tuple[str, ...]
    """What speaks against the comparison, or limits it."""

    def __repr__(self) -> str:
        return f"Comparison of {self.titles[0]} (a) and {self.titles[1]} (b): {self.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values: str, int, float, bool, None, lists, dicts."""
        frames = {name: getattr(self, name) for name in ("frame", "steps", "counts", "kernels", "syncs")}
        return {
            "a": self.titles[0],
            "b": self.titles[1],
            "label": self.label,
            "verdict": self.verdict,
            "workload": self.workload,
            "reasons": list(self.reasons),
            "alignment": self.alignment.to_dict(),
            **{name: [_plain(row) for row in frame.to_dict("records")] for name, frame in frames.items()},
            "cannot_say": list(dict.fromkeys(one for frame in frames.values() for one in frame.attrs["cannot_say"])),
        }


def compare(a: Trace, b: Trace, align: Method = "auto", *, step: int | str | None = None) -> Comparison:
    """Compare two traces over the steps that they have in common.

    ``align`` (see :func:`~mrv2lab.trace.align.align`) places b on a's axis; ``auto`` takes ``step``, else ``first
    kernel``, else ``start``. Lengths do not depend on it. Times are judged by the rule of
    :mod:`~mrv2lab.trace.compare_noise` (rank test, Holm-corrected over all rows of ``frame``, and a difference beyond
    the spread). Every row is ``cannot tell``, with the reason, where the steps' requests or tokens differ, the devices
    or models are different ones, or modelled times would be held against measured ones.

    Raises:
        TypeError: something else than two Traces.
        TraceError: a trace holds no events, or cannot be aligned this way.
    """
    for given in (a, b):
        if not isinstance(given, Trace):
            raise TypeError(
                f"compare() takes two Traces, got {type(given).__name__}: "
                "Trace.load(path) reads a file, and a Run has its trace in .trace"
            )
    for trace in (a, b):
        if not len(trace):
            raise TraceError(f"{trace.info.title} holds no events, so there is nothing to compare")
    alignment = _alignment(a, b, align, step)
    every = steps(a), steps(b)
    rows_a, rows_b, how = match_steps(*every)
    left, right = every[0].iloc[rows_a].reset_index(drop=True), every[1].iloc[rows_b].reset_index(drop=True)
    found = comparability(a, b, left, right, how)
    names = _titles(a, b)
    for title, table, matched in (names[0], every[0], left), (names[1], every[1], right):
        if not len(table):
            found.notes.append(f"{title}: {table.attrs['cannot_say'][0]}")
        elif len(matched) < len(table):
            found.notes.append(f"{len(table) - len(matched):,} of {len(table):,} steps of {title} are in it alone")
        if (table["host_start_ns"].to_numpy()[1:] < table["host_end_ns"].to_numpy()[:-1]).any():
            found.notes.append(f"steps of {title} overlap (several in flight): their ranges on the host are latencies")
    frame = _frame(a, b, left, right, found, names)
    frame.attrs["cannot_say"] = [
        f"{title}: {one}" for title, table in zip(names, every, strict=True) for one in table.attrs["cannot_say"]
    ]
    counted = _counts(a, b, left, right)
    structure = kernels(a, b)
    if frame["verdict"].isin(["a faster", "b faster"]).any():
        found.notes.append("one run each: what slowed the machine in one of them counts as a difference; repeat both")
    runners = {trace.info.extra.get("runner") for trace in (a, b)}
    said = sentence(names, frame, counted, found, len(left), len(runners - {None}) > 1)
    if same_events(a, b):
        found.notes.insert(0, f"{names[0]} and {names[1]} hold the same events: a trace beside itself")
        said = f"A trace beside itself (both hold the same events). {said}"
    return Comparison(
        titles=names,
        frame=frame,
        steps=_steps(left, right, alignment.offsets_ns[1], names, found.workload.by_step),
        counts=counted,
        kernels=structure,
        syncs=waits(a, b),
        alignment=alignment,
        label=label(frame, found),
        verdict=said,
        workload=f"{found.workload.sentence[:1].upper()}{found.workload.sentence[1:]}.",
        reasons=(*found.refused, *found.host_refused, *found.device_refused, *found.notes, *kernel_note(structure)),
    )


def _alignment(a: Trace, b: Trace, by: Method, step: int | str | None) -> Alignment:
    if by != "auto":
        return align((a, b), by, step=step)
    return first_possible((a, b), ("step", "first kernel", "start"), step)


def _titles(a: Trace, b: Trace) -> tuple[str, str]:
    same = a.info.title == b.info.title
    return ("a", "b") if same or not a.info.title or not b.info.title else (a.info.title, b.info.title)


# -- times


def _frame(
    a: Trace, b: Trace, left: pd.DataFrame, right: pd.DataFrame, found: Comparability, titles: tuple[str, str]
) -> pd.DataFrame:
    import pandas as pd

    sides = _of_steps(left), _of_steps(right)
    of_phases = _phases(a, b, left, right, found, titles)
    samples = {("step", name): (sides[0][name], sides[1][name]) for name in sides[0]}
    samples |= {("step" if name == HOST_PHASES else "phase", name): pair for name, pair in of_phases.items()}
    both = [key for key, (of_a, of_b) in samples.items() if len(of_a) and len(of_b)]
    judged = dict(zip(both, judge([samples[key] for key in both]), strict=True))
    rows = []
    for (group, name), (of_a, of_b) in samples.items():
        row: dict[str, Any] = {"group": group, "phase": name, "n_a": len(of_a), "n_b": len(of_b)}
        for side, values in ("a", of_a), ("b", of_b):
            quartiles = np.rint(np.percentile(values, (25, 50, 75))).astype(np.int64).tolist() if len(values) else None
            for place, part in enumerate(("q1", "median", "q3")):
                row[f"{part}_{side}_ns"] = quartiles[place] if quartiles else None
        known = (group, name) in judged
        row["difference_ns"] = row["median_b_ns"] - row["median_a_ns"] if known else None
        row["ratio"] = row["median_b_ns"] / row["median_a_ns"] if known and row["median_a_ns"] else math.nan
        row["p"] = judged[group, name].p if known else math.nan
        row["verdict"], row["reason"] = "cannot tell", ""
        if found.refused:
            row["reason"] = found.refused[0]
        elif not known:
            row["reason"] = (
                f"only in {titles[0]}" if len(of_a) else f"only in {titles[1]}" if len(of_b) else "in neither"
            )
        elif of_scope := found.device_refused if (group, name) in _DEVICE_ROWS else found.host_refused:
            row["reason"] = of_scope[0]
        else:
            row["verdict"], row["reason"] = judged[group, name].call, judged[group, name].reason
        if known and len(of_a) != len(of_b):
            steps_with = f"in {len(of_a):,} of {len(left):,} common steps of {titles[0]}, {len(of_b):,} of {titles[1]}"
            row["reason"] = f"{row['reason']}; {steps_with}" if row["reason"] else steps_with
        rows.append(row)
    frame = pd.DataFrame(rows, columns=_COLUMNS)
    return frame.astype({column: "Int64" for column in _COLUMNS if column.endswith("_ns")})


_DEVICE_ROWS = (("step", "device"), ("step", "device busy"))
_COLUMNS = (
    "group phase n_a n_b median_a_ns median_b_ns q1_a_ns q3_a_ns q1_b_ns q3_b_ns difference_ns ratio p verdict reason"
).split()


def _of_steps(frame: pd.DataFrame) -> dict[str, Array]:
    """The step's own figures, each [k] int64; of those steps that have them."""
    worked = (frame["gpu_start_ns"] >= 0).to_numpy(bool)
    columns = {"host": "host_ns", "device": "gpu_ns", "device busy": "gpu_busy_ns"}
    values = {name: frame[column].to_numpy(np.int64) for name, column in columns.items()}
    return {name: found if name == "host" else found[worked] for name, found in values.items()}


def _phases(
    a: Trace, b: Trace, left: pd.DataFrame, right: pd.DataFrame, found: Comparability, titles: tuple[str, str]
) -> dict[str, tuple[Array, Array]]:
    """Phase -> its times in both, empty where a trace does not have it. Nothing if they name different things."""
    of_a, of_b = phases(a, left), phases(b, right)
    if of_a.source != of_b.source:
        found.notes.append(f"no phases to compare: {_what(titles[0], of_a)}, {_what(titles[1], of_b)}")
        return {}
    names = dict.fromkeys([*of_a.times, *of_b.times])
    pairs = {name: (of_a.where_seen(name), of_b.where_seen(name)) for name in names}
    if of_a.source == "phases":
        total = [np.sum([side.times[name] for name in side.times if "/" not in name], axis=0) for side in (of_a, of_b)]
        pairs = {HOST_PHASES: (total[0], total[1])} | pairs
    return pairs


def _what(title: str, found: Phases) -> str:
    meaning = {
        "phases": "names the phases of this project",
        "frames": "holds frames of vLLM's model runner",
        "annotations": "holds other named ranges",
        "none": "names none",
    }
    return f"{title} {meaning[found.source]}"


# -- counts, steps


def _counts(a: Trace, b: Trace, left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    of_a, of_b = counts(a, left), counts(b, right)
    rows = [
        {
            "what": what,
            "median_a": float(np.median(of_a[what])),
            "median_b": float(np.median(of_b[what])),
            "mean_a": float(of_a[what].mean()),
            "mean_b": float(of_b[what].mean()),
        }
        for what in of_a
        if len(of_a[what])
    ]
    frame = pd.DataFrame(rows, columns=["what", "median_a", "median_b", "mean_a", "mean_b"])
    frame.attrs["cannot_say"] = [] if len(rows) else ["no step is in both traces, so nothing was counted a step"]
    return frame


def _steps(
    left: pd.DataFrame, right: pd.DataFrame, offset: int, titles: tuple[str, str], workload: list[str]
) -> pd.DataFrame:
    import pandas as pd

    worked = ((left["gpu_start_ns"] >= 0) & (right["gpu_start_ns"] >= 0)).to_numpy(bool)
    a_ns, b_ns = left["host_ns"].to_numpy(np.int64), right["host_ns"].to_numpy(np.int64)
    gpu = [pd.array(frame["gpu_ns"].to_numpy(np.int64), "Int64") for frame in (left, right)]
    for values in gpu:
        values[~worked] = pd.NA
    frame = pd.DataFrame(
        {
            "step": left["step"].astype("str"),
            "number": left["number"],
            "start_ns": left["host_start_ns"],
            "end_ns": left["host_end_ns"],
            "b_start_ns": right["host_start_ns"] + offset,
            "a_ns": a_ns,
            "b_ns": b_ns,
            "delta_ns": b_ns - a_ns,
            "a_gpu_ns": gpu[0],
            "b_gpu_ns": gpu[1],
            "delta_gpu_ns": gpu[1] - gpu[0],
            "kind": left["kind"],
            "workload": pd.Series(workload, dtype="str"),
        }
    )
    frame["label"] = [
        f"{name}: {_shorter(delta, titles)}" for name, delta in zip(frame["step"], frame["delta_ns"], strict=True)
    ]
    frame["label"] = frame["label"].astype("str")
    frame.attrs["cannot_say"] = [] if len(frame) else ["no step is in both traces"]
    return frame


def _shorter(delta: int, titles: tuple[str, str]) -> str:
    if not delta:
        return "equally long on the host"
    return f"{microseconds(abs(delta))} shorter on the host in {titles[0] if delta > 0 else titles[1]}"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without NumPy's or pandas' types; NaN and NA are None."""
    import pandas as pd

    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in row.items()}
    return {str(key): None if value is pd.NA or value != value else value for key, value in plain.items()}
