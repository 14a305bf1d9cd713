"""Everything the analyses say about a trace, as one dictionary for a program or a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrv2lab.trace.busy import busy, gaps
from mrv2lab.trace.launch_queue import queue_depth
from mrv2lab.trace.links import orphans
from mrv2lab.trace.overlap import overlap
from mrv2lab.trace.same_stream import same_stream_overlaps
from mrv2lab.trace.steps import steps
from mrv2lab.trace.tables import copies, kernels, launches
from mrv2lab.trace.trace import DEVICE_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd


def report(trace: Trace) -> dict[str, Any]:
    """Plain values only (int, float, str, bool, None, lists and dictionaries of them); times in ns.

    ``title``, ``producer``, ``modelled``, ``events``, ``cut_off`` (the file ends before its events do), ``problems``
    (sentences about the file), ``verdict`` (label and sentence), ``outside`` (of the devices' span:
    :func:`mrv2lab.trace.verdict.outside`), ``gpu_span_ns``, ``gpu_busy_ns`` (all devices together), ``gpu_events``,
    ``devices`` (rows of :func:`mrv2lab.trace.busy.busy`), ``same_stream_overlaps`` (how many), ``same_stream_labels``
    (how many of each label), ``orphan_gpu_events``, ``max_kernels_per_launch``, ``max_queue_depth``, ``gaps`` (by
    cause: how many, how long), ``overlap``, ``kernels`` (the ten longest), ``copies``, ``launches``, ``waits`` (by
    kind: :func:`mrv2lab.trace.wait_totals.wait_totals`), ``syncs`` (waits of the host first, the longest first),
    ``steps`` (rows of those analyses) and ``cannot_say`` (what the file does not hold, each sentence once).
    """
    from mrv2lab.trace.syncs import syncs
    from mrv2lab.trace.verdict import cut_off, outside, verdict
    from mrv2lab.trace.wait_totals import longest_first, wait_totals

    by_device, idle, depth, at_once = busy(trace), gaps(trace), queue_depth(trace), overlap(trace)
    same, waits, of_steps = same_stream_overlaps(trace), syncs(trace), steps(trace)
    names, moved, calls = kernels(trace), copies(trace), launches(trace)
    judged = verdict(trace)
    everything = by_device[by_device["device"] == "all"]
    by_cause = idle.groupby("cause", sort=True)["duration_ns"].agg(["count", "sum"])
    frames = (by_device, of_steps, waits, idle, depth, at_once, same, names, moved, calls)
    return {
        "title": trace.info.title,
        "producer": trace.info.producer,
        "modelled": trace.info.modelled,
        "events": len(trace),
        "cut_off": cut_off(trace),
        "problems": [str(problem) for problem in trace.problems],
        "verdict": {"label": judged.label, "sentence": judged.sentence},
        "outside": outside(trace),
        "gpu_span_ns": int(everything["span_ns"].sum()),
        "gpu_busy_ns": int(everything["busy_ns"].sum()),
        "gpu_events": int(trace.mask(*DEVICE_KINDS).sum()),
        "devices": rows(by_device),
        "same_stream_overlaps": len(same),
        "same_stream_labels": same.attrs["counts"],
        "orphan_gpu_events": int(orphans(trace).sum()),
        "max_kernels_per_launch": int(calls["max_kernels"].max()) if len(calls) else 0,
        "max_queue_depth": depth.attrs["max_depth"],
        "gaps": {
            str(cause): {"count": int(count), "ns": int(ns)}
            for cause, count, ns in by_cause.itertuples(index=True, name=None)
        },
        "overlap": rows(at_once),
        "kernels": rows(names.head(10)),
        "copies": rows(moved),
        "launches": rows(calls),
        "waits": rows(wait_totals(trace)),
        "syncs": rows(longest_first(waits)),
        "steps": rows(of_steps),
        "cannot_say": list(dict.fromkeys(said for frame in frames for said in frame.attrs["cannot_say"])),
    }


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as plain dictionaries; what is missing is None."""
    plain = frame.astype(object)
    found: list[dict[str, Any]] = plain.where(plain.notna(), None).to_dict("records")
    return found
