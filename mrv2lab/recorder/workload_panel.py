"""A form in the notebook: choose a workload and settings, run them, keep the results, lay two on one axis."""

from __future__ import annotations

import html
import itertools
import string
import threading
import time
from collections.abc import Iterator
from typing import Any

import ipywidgets as w
import pandas as pd
import torch

from mrv2lab.config import PRESETS
from mrv2lab.recorder.nsight import nsight_hint
from mrv2lab.recorder.overlay import overlay
from mrv2lab.recorder.side_by_side import Run, figures_frame, run_settings
from mrv2lab.recorder.workload_form import ARRIVALS, POLICIES, WorkloadForm

MODELS: tuple[str, ...] = ("tiny", "tiny-draft", "smollm2", *PRESETS)
REDRAW_S = 0.2
"""Seconds between two moves of the progress bar."""
WIDE = {"description_width": "12em"}
OF_CSV = ("requests", "prompt_len", "max_tokens", "sampled", "temperature", "seeded")
"""Controls that a CSV file takes the place of."""


class WorkloadPanel(w.VBox):  # type: ignore[misc]
    """Controls for one :class:`WorkloadForm`, a button that runs it, and what came out.

    ``values`` are fields of :class:`WorkloadForm` to begin with. The button works in a thread, so that *Cancel* and the
    notebook stay alive; :meth:`run` does the same and waits. Every run stays in ``runs`` as A, B, C, ...; what cannot
    be run is said in the panel, and everything else stays as it was.
    """

    def __init__(self, **values: Any) -> None:
        form = WorkloadForm(**values)
        self.runs: dict[str, Run] = {}
        """What has run, by letter. :meth:`overlay` lays two of them on one axis."""
        self.controls: dict[str, Any] = _controls(form)
        """The form's widgets, by field."""
        self._names = _letters()
        self._next: list[str] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._cancelled = threading.Event()
        self._ends_at = self._drawn_at = 0.0
        self.run_button = w.Button(
            description="Run", button_style="primary", tooltip="Run the workload on each setting"
        )
        self.cancel_button = w.Button(description="Cancel", disabled=True, tooltip="Stop after the present step")
        self.run_button.on_click(lambda _: self.start())
        self.cancel_button.on_click(lambda _: self.cancel())
        self._bar = w.IntProgress(0, 0, 1, description="Progress", style=WIDE)
        self._status = w.HTML()
        self._figures = w.HTML()
        self._code = w.Textarea(
            description="The same in Python", disabled=False, rows=16, style=WIDE, layout=w.Layout(width="100%")
        )
        for control in self.controls.values():
            control.observe(self._changed, "value")
        boxes = [w.HBox([self.controls[name] for name in row], layout=w.Layout(flex_flow="row wrap")) for row in ROWS]
        buttons = w.HBox([self.run_button, self.cancel_button, self._bar], layout=w.Layout(flex_flow="row wrap"))
        frame = w.Layout(border="1px solid var(--jp-border-color2, #bdbdbd)", padding="8px")
        super().__init__([*boxes, buttons, self._status, self._figures, self._code], layout=frame)
        self.message = ""
        """What the panel says: progress, an error, or why it is empty."""
        self._changed(None)
        self._say(f"Nothing has run yet: press Run. {machine()}")

    # -- the form ------------------------------------------------------------------------------------------------------

    def form(self) -> WorkloadForm:
        """The controls' values. Raises ``ValueError`` with a sentence for any that cannot be."""
        return WorkloadForm(**{name: control.value for name, control in self.controls.items()})

    def settings(self) -> str:
        """Python that makes the runs which Run would make now. Raises ``ValueError`` as :meth:`form` does."""
        form = self.form()
        return form.code(self._peek(form.num_settings))

    def _peek(self, count: int) -> list[str]:
        """The names of the next runs."""
        while len(self._next) < count:
            self._next.append(next(self._names))
        return self._next[:count]

    def _changed(self, _: Any) -> None:
        arrivals = self.controls["arrivals"].value
        self.controls["every"].disabled = arrivals != "steady"
        self.controls["csv"].disabled = arrivals != "csv"
        for name in OF_CSV:
            self.controls[name].disabled = arrivals == "csv"
        try:
            self._code.value = self.settings()
        except ValueError as error:
            self._code.value = f"# {error}"

    # -- running -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a run is going on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> bool:
        """What the button does: begin to run, in a thread. False, and a sentence in the panel, where it cannot."""
        with self._starting:
            return self._start()

    def _start(self) -> bool:
        if self.running:
            self._say("A run is going on: wait for it, or press Cancel.")
            return False
        try:
            form = self.form()
            workload = form.workload()
        except ValueError as error:
            self._say(f"Cannot run: {error}")
            return False
        names = self._peek(form.num_settings)
        self._cancelled.clear()
        self._ends_at, self._drawn_at = time.monotonic() + form.time_limit_s, 0.0
        self._bar.value, self._bar.max = 0, form.num_settings * (form.steps or 1)
        self.run_button.disabled, self.cancel_button.disabled = True, False
        self._code.value = form.code(names)
        self._say(f"Running {' and '.join(names)} ...")
        self._thread = threading.Thread(
            target=self._work, args=(form, workload, names), name="mrv2lab-workload-panel", daemon=True
        )
        self._thread.start()
        return True

    def cancel(self) -> None:
        """End the run at its next step; what is complete is kept."""
        self._cancelled.set()

    def run(self, timeout: float | None = None) -> dict[str, Run]:
        """:meth:`start`, and wait. Returns the new runs by name.

        Raises ``ValueError`` with the panel's sentence where it cannot run, ``TimeoutError`` after ``timeout`` seconds
        (the run goes on to its own time limit); an interrupt cancels.
        """
        known = set(self.runs)
        if not self.start():
            raise ValueError(self.message)
        assert self._thread is not None
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise
        if self._thread.is_alive():
            raise TimeoutError(f"the run is not over after {timeout} s; panel.cancel() ends it at its next step")
        return {name: run for name, run in self.runs.items() if name not in known}

    def _work(self, form: WorkloadForm, workload: Any, names: list[str]) -> None:
        try:
            runs = run_settings(
                workload,
                form.settings(names),
                model=form.model.strip(),
                steps=form.steps or None,
                progress=False,
                on_step=lambda name, turns: self._go_on(form, names, name, turns),
            )
            self._keep(form, runs)
        except BaseException as error:  # in a thread nobody else would say it
            self._say(f"The run broke off: {type(error).__name__}: {error}")
        finally:
            self.run_button.disabled, self.cancel_button.disabled = False, True

    def _go_on(self, form: WorkloadForm, names: list[str], name: str, turns: int) -> bool:
        now = time.monotonic()
        if now - self._drawn_at > REDRAW_S:
            self._drawn_at = now
            self._bar.value = names.index(name) * (form.steps or 1) + min(turns, form.steps)
            self._bar.description = f"{name}, step {turns}"  # the status would be read aloud each time
        return not self._cancelled.is_set() and now < self._ends_at

    def _keep(self, form: WorkloadForm, runs: dict[str, Run]) -> None:
        self.runs |= {name: run for name, run in runs.items() if run.error is None}
        kept = [name for name in runs if name in self.runs]
        self._next = [name for name in self._next if name not in kept]
        self._bar.value, self._bar.description = self._bar.max, "Progress"
        said = [f"{name} failed: {run.error}." for name, run in runs.items() if run.error is not None]
        said += [f"{name}: {' '.join(run.problems)}." for name, run in runs.items() if run.problems]
        if kept:
            said.insert(0, f"Done: {' and '.join(kept)}." + (" overlay() lays two on one axis." * (len(self.runs) > 1)))
        if self._cancelled.is_set():
            said.append("Cancelled: what ran until then is kept, and unfinished requests were aborted.")
        elif time.monotonic() >= self._ends_at:
            said.append(f"Stopped at the time limit of {form.time_limit_s:g} s; unfinished requests were aborted.")
        self._say(" ".join(said))
        if kept:
            self._code.value = form.code(kept)  # what was made; a control that changes shows the next one
        self._figures.value = _worded(self.frame()).to_html(border=0, na_rep="", float_format=_number)

    # -- results -------------------------------------------------------------------------------------------------------

    def frame(self) -> pd.DataFrame:
        """The figures of all runs: a row a figure, a column a run."""
        return figures_frame({run.title: run for run in self.runs.values()})

    def overlay(self, first: str | None = None, second: str | None = None, **options: Any) -> Any:
        """Two runs on one axis, step by step: the two that are named, else the latest two (or the only one).

        See :func:`mrv2lab.recorder.overlay.overlay`, whose ``options`` these are. Raises ``ValueError`` where
        there is no such run.
        """
        names = [name for name in (first, second) if name is not None] or list(self.runs)[-2:]
        if not names:
            raise ValueError("nothing has run yet: press Run, or panel.run()")
        for name in names:
            if name not in self.runs:
                raise ValueError(f"there is no run {name!r}; there is {', '.join(self.runs) or 'none'}")
        return overlay(*[self.runs[name] for name in names], **options)

    def _say(self, sentence: str) -> None:
        self.message = sentence
        self._status.value = f'<div role="status" aria-live="polite">{html.escape(sentence)}</div>'


def machine() -> str:
    """What the times on this machine will be, and whether Nsight could look too."""
    if not torch.cuda.is_available():
        return "No CUDA device here: device times are modelled."
    return f"{torch.cuda.get_device_name()}: device times are measured. {nsight_hint()}"


WORDS = {
    "tokens": "output tokens",
    "step_us": "median step, µs",
    "phase_us": "median time of a phase, µs",
    "waits": "waits",
    "wait_us": "time in waits, µs",
    "h2d_copies": "copies to the device, a step",
    "h2d_bytes": "bytes to the device, a step",
    "d2h_copies": "copies from the device, a step",
    "publishes": "publishes, a step",
}
"""The figures in words; one that is not here keeps its name."""


def _worded(frame: pd.DataFrame) -> pd.DataFrame:
    """The same with the figures' names in words."""
    return frame.rename(index=WORDS, level="figure") if len(frame) else frame


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _letters() -> Iterator[str]:
    """A, B, ..., Z, A2, B2, ..."""
    for round_ in itertools.count(1):
        for letter in string.ascii_uppercase:
            yield letter if round_ == 1 else f"{letter}{round_}"


ROWS: tuple[tuple[str, ...], ...] = (
    ("model", "device"),
    ("v1", "v1_policy"),
    ("mrv2", "mrv2_policy"),
    ("async_scheduling",),
    ("arrivals", "every", "csv"),
    ("requests", "steps", "seed", "time_limit_s"),
    ("prompt_len", "max_tokens"),
    ("sampled", "temperature", "seeded"),
)


def _controls(form: WorkloadForm) -> dict[str, Any]:
    """A labelled widget for each field, in the order of the rows."""

    def share(description: str, value: float) -> Any:  # a FloatSlider has no name for axe
        look = {"style": {"description_width": "initial"}, "layout": w.Layout(width="auto")}
        return w.FloatText(value, step=0.1, description=description, **look)

    def flag(description: str, value: bool) -> Any:
        return w.Checkbox(value, description=description, indent=False)

    return {
        "model": w.Combobox(value=form.model, options=MODELS, description="Model", style=WIDE, ensure_option=False),
        "device": w.Dropdown(value=form.device, options=("auto", "cpu", "cuda"), description="Device", style=WIDE),
        "v1": flag("Runner V1", form.v1),
        "v1_policy": w.Dropdown(value=form.v1_policy, options=POLICIES, description="V1's policy", style=WIDE),
        "mrv2": flag("Runner MRV2", form.mrv2),
        "mrv2_policy": w.Dropdown(value=form.mrv2_policy, options=POLICIES, description="MRV2's policy", style=WIDE),
        "async_scheduling": flag("Asynchronous scheduling", form.async_scheduling),
        "arrivals": w.Dropdown(value=form.arrivals, options=ARRIVALS, description="Arrivals", style=WIDE),
        "every": w.IntText(form.every, description="Steps between", style=WIDE),
        "csv": w.Text(form.csv, description="CSV file", style=WIDE),
        "requests": w.IntText(form.requests, description="Requests", style=WIDE),
        "steps": w.IntText(form.steps, description="Steps (0 = all)", style=WIDE),
        "seed": w.IntText(form.seed, description="Seed", style=WIDE),
        "time_limit_s": w.FloatText(form.time_limit_s, description="Time limit (s)", style=WIDE),
        "prompt_len": w.Text(form.prompt_len, description="Prompt tokens", style=WIDE),
        "max_tokens": w.Text(form.max_tokens, description="Output tokens", style=WIDE),
        "sampled": share("share of the requests that are sampled (0-1)", form.sampled),
        "temperature": w.FloatText(form.temperature, description="Temperature", style=WIDE),
        "seeded": share("share of the sampled requests that get a seed (0-1)", form.seeded),
    }
