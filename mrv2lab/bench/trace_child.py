"""One trace read once, in a process of its own: by us, or by HolisticTraceAnalysis in whichever interpreter has it.

``python trace_child.py WHO WHAT FILE`` prints seconds, memory and findings as a line of JSON. WHO is ``ours`` or
``peer``. WHAT is ``analyse`` (load, and what both can say of waits, idle time and the launch queue), ``all`` (the same
and more, for the findings), ``load`` (our reader alone) or ``cached`` (our reader with the columnar copy beside the
file). A script that imports nothing of ours at its head, since the peer's interpreter has nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_bytes() -> int:
    """The most memory that this process ever held resident.

    Linux hands the parent's peak over to a child in ``ru_maxrss``; ``VmHWM`` begins anew with the child's program.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stages:
    """What each stage took, or how it failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.peaks: dict[str, int] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``, None if it raised."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        try:
            return work()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}".strip(": ")[:300]
            return None
        finally:
            self.seconds[name] = time.perf_counter() - begin
            self.cpu_seconds[name] = time.process_time() - cpu_begin
            self.peaks[name] = peak_bytes()


def ours(stages: Stages, what: str, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Versions and findings."""

    def modules() -> tuple[Any, ...]:
        import pandas as pd

        from mrv2lab.trace.busy import busy, gaps
        from mrv2lab.trace.launch_queue import queue_depth
        from mrv2lab.trace.read import load
        from mrv2lab.trace.syncs import syncs

        return pd.__version__, load, syncs, gaps, queue_depth, busy

    pandas, load, syncs, gaps, queue_depth, busy = stages.run("import", modules)
    versions = {"python": platform.python_version(), "pandas": pandas}
    trace = stages.run("load", lambda: load(file, cache=what == "cached", progress=False))
    found: dict[str, Any] = {"events": len(trace) if trace is not None else None}
    if trace is None or what in ("load", "cached"):
        return versions, found
    waits = stages.run("syncs", lambda: syncs(trace))
    idle = stages.run("gaps", lambda: gaps(trace))
    depth = stages.run("queue_depth", lambda: queue_depth(trace))
    if what == "all":
        everything = busy(trace).query("device == 'all'")
        found |= {
            "span_ns": int(everything["span_ns"].sum()),
            "busy_ns": int(everything["busy_ns"].sum()),
            "idle_ns": int(everything["span_ns"].sum() - everything["busy_ns"].sum()),
            "idle_by_cause_ns": {str(key): int(ns) for key, ns in idle.groupby("cause")["duration_ns"].sum().items()},
            "max_queue_depth": depth.attrs["max_depth"],
            "launches": depth.attrs["launches"],
            "syncs": {str(kind): int(count) for kind, count in waits["kind"].value_counts().items()},
            "longest_wait_of_a_caller_ns": max((ns for ns in waits["caller_ns"].tolist() if ns >= 0), default=None),
            "cannot_say": list(dict.fromkeys(said for one in (waits, idle, depth) for said in one.attrs["cannot_say"])),
        }
    return versions, found


def peer(stages: Stages, what: str, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for HolisticTraceAnalysis, which reads the folder that the file lies in."""

    def modules() -> tuple[str, str, Any]:
        import importlib.metadata

        import pandas as pd
        from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found,unused-ignore]

        return importlib.metadata.version("HolisticTraceAnalysis"), pd.__version__, TraceAnalysis

    version, pandas, analysis = stages.run("import", modules)
    versions = {"HolisticTraceAnalysis": version, "python": platform.python_version(), "pandas": pandas}
    one = stages.run("load", lambda: analysis(trace_dir=str(file.parent)))
    if one is None:
        return versions, {}
    (rank,) = one.t.traces
    events = one.t.get_trace(rank)
    idle = stages.run("idle", lambda: one.get_idle_time_breakdown(ranks=[rank], visualize=False)[0])
    queue = stages.run("queue", lambda: one.get_queue_length_summary(ranks=[rank]))
    launches = stages.run("launches", lambda: one.get_cuda_kernel_launch_stats(ranks=[rank], visualize=False)[rank])
    found: dict[str, Any] = {"events": len(events)}
    if what == "all":
        times = stages.run("temporal breakdown", lambda: one.get_temporal_breakdown(visualize=False).iloc[0])
        step = _step_annotation(list(one.t.symbol_table.get_sym_table()))
        path = stages.run("critical path", lambda: one.critical_path_analysis(rank, step, 0))
        if path is None:
            stages.failed.setdefault("critical path", f"returned nothing for the annotation {step!r}")
        if times is not None:
            found |= {
                "span_ns": int(times["kernel_time(us)"] * 1000),
                "busy_ns": int((times["compute_time(us)"] + times["non_compute_time(us)"]) * 1000),
                "idle_ns": int(times["idle_time(us)"] * 1000),
            }
        if idle is not None:
            by_cause = idle.groupby("idle_category")["idle_time"].sum()
            found["idle_by_cause_ns"] = {str(key): int(us * 1000) for key, us in by_cause.items()}
        if queue is not None:
            found["max_queue_depth"] = int(queue["queue_length"]["max"].max())
        found["launches"] = None if launches is None else len(launches)
    return versions, found


def _step_annotation(names: list[str]) -> str:
    """A whole name or the beginning of some, as HTA wants it."""
    if any(name.startswith("ProfilerStep") for name in names):
        return "ProfilerStep"
    return min((name for name in names if name.startswith("execute_")), default="ProfilerStep")


def main(who: str, what: str, file: Path) -> None:
    """Read, and print."""
    stages = Stages()
    with contextlib.redirect_stdout(sys.stderr):
        versions, found = {"ours": ours, "peer": peer}[who](stages, what, file)
    folder = str(file.parent)
    failed = {name: text.replace(folder + "/", "").replace(folder, "") for name, text in stages.failed.items()}
    line = {
        "versions": versions,
        "seconds": stages.seconds,
        "cpu_seconds": stages.cpu_seconds,
        "failed": failed,
        "peak_bytes": stages.peaks,
        "found": found,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
