"""One run or trace as a timeline with everything on it, or two on one axis. Traces need no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrv2lab.trace.trace import Trace

if TYPE_CHECKING:
    from mrv2lab.recorder.side_by_side import Run
    from mrv2lab.widgets.timeline import Timeline


def overlay(*runs: Run | Trace, **options: Any) -> Timeline:
    """One run's or trace's timeline, or two on one axis step by step: with the steps, the host's waits as marks and, of
    two, the difference of each step. ``options`` are Timeline's and win.

    Two traces without a common step are aligned by their first kernels, or else by their starts, and have no
    differences. Raises ``TypeError`` for anything but one or two Runs and Traces, ``ValueError`` for a run without a
    trace, ``TraceError`` as Timeline does and for two runs without a common step.
    """
    from mrv2lab.trace.compare import compare
    from mrv2lab.trace.steps import steps
    from mrv2lab.trace.wait_marks import wait_marks
    from mrv2lab.widgets.timeline import Timeline

    if not 1 <= len(runs) <= 2:
        raise TypeError(f"overlay() takes one or two runs or traces, got {len(runs)}")
    traces = [_trace(run) for run in runs]
    runs_alone = not any(isinstance(run, Trace) for run in runs)
    shown: dict[str, Any] = {
        "align": "step",
        "steps": [steps(trace) for trace in traces],
        "marks": [wait_marks(trace) for trace in traces],
    }
    if len(traces) == 2:
        # Two runs of one workload have steps in common; two traces may be anything.
        compared = compare(traces[0], traces[1], "step" if runs_alone else "auto")
        if not runs_alone:
            shown["align"] = list(compared.alignment.offsets_ns)
        if len(compared.steps):
            shown["difference"] = compared.steps
    titles = [_title(run) for run in runs]
    if all(titles):
        shown["titles"] = titles
    return Timeline(*traces, **shown | options)


def _trace(run: Run | Trace) -> Trace:
    if isinstance(run, Trace):
        return run
    found = getattr(run, "trace", None)
    if isinstance(found, Trace):
        return found
    if not hasattr(run, "trace"):
        given = type(run).__name__
        raise TypeError(
            f"overlay() takes Runs of run_settings() and Traces, got {given}; Trace.load(path) reads a file"
        )
    raise ValueError(f"run {run.name!r} has no trace: {run.error or 'run_settings(..., profile=True) takes one'}")


def _title(run: Run | Trace) -> str:
    """The timeline has an A and a B of its own, so a run says that it is one."""
    return run.info.title if isinstance(run, Trace) else f"run {getattr(run, 'title', '')}".strip()
