"""The widget: one trace or two, small named state, slices by custom message.

Messages from the page: ``ready`` (a page without data: send it), ``details`` (``id`` of a slice). To the page:
``data`` (see ``message.py``), ``details``, ``selection`` (a sentence), ``show`` (a stretch) and ``status``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from mrv2lab.trace.trace import KIND, KINDS, Trace, TraceError
from mrv2lab.widgets.timeline.assets import module_text, style_text
from mrv2lab.widgets.timeline.axis import offsets_of
from mrv2lab.widgets.timeline.details import details_of
from mrv2lab.widgets.timeline.message import Overlays, domain_of, encode
from mrv2lab.widgets.timeline.overlays import capped, check_traces, difference_of, for_each, marks_of, steps_of
from mrv2lab.widgets.timeline.slices import SliceLane, slices_of
from mrv2lab.widgets.timeline.static_timeline import static_html, static_text

if TYPE_CHECKING:
    import pandas as pd


class Timeline(anywidget.AnyWidget):
    """One trace, or two on one axis: A's own nanoseconds, on which B is moved by ``align``.

    ``align``: ``"start"``, ``"step"``, ``"first kernel"`` or an offset in ns a trace. ``titles``: one a trace, else the
    trace's own. ``kinds``: names of :data:`KINDS` to show at first, all by default. ``steps``, ``marks``: a frame of
    the first trace, or one frame a trace (columns ``step, host_start_ns, host_end_ns`` and ``start_ns, end_ns, kind,
    label``, times of their own trace). ``difference``: a frame ``start_ns, end_ns, delta_ns, label``, times of A.
    ``height``: of the lanes, in pixels. ``view``: the stretch ``(start_ns, end_ns)`` of the axis that is in sight at
    first, everything by default. Raises :class:`TraceError` for what it cannot show.
    """

    _esm = module_text()
    _css = style_text()

    selection_ns = traitlets.Tuple(
        traitlets.Int(), traitlets.Int(), default_value=None, allow_none=True, help="Start and end on the axis."
    ).tag(sync=True)
    kinds = traitlets.List(traitlets.Unicode(), help="Kinds that are shown.").tag(sync=True)
    hidden_lanes = traitlets.List(traitlets.Int(), help="Lanes, positions in ``lanes``, that are not shown.").tag(
        sync=True
    )
    selected_slice = traitlets.Int(-1, help="Number of the selected slice; -1: none.").tag(sync=True)
    channel = traitlets.Unicode(help="Joins the page's listener for data with its views.").tag(sync=True)
    pushed = traitlets.Bool(False, help="Whether data was sent; a page that then has none asks for it.").tag(sync=True)

    def __init__(
        self,
        *traces: Trace,
        align: str | Sequence[int] = "start",
        titles: Sequence[str] | None = None,
        kinds: Iterable[str] | None = None,
        steps: Any = None,
        marks: Any = (),
        difference: pd.DataFrame | None = None,
        height: int = 420,
        view: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        check_traces(traces)
        step_frames = for_each(steps, len(traces), "steps")
        mark_frames = for_each(marks, len(traces), "marks")
        self._traces: tuple[Trace, ...] = traces
        self.offsets: tuple[int, ...]
        """What is added to each trace's times to lie on the axis, ns."""
        self.offsets, unlike = offsets_of(traces, align, step_frames)
        self._slices = slices_of(traces, self.offsets)
        self._titles = _titles(traces, titles)
        self._overlays: Overlays = {
            "steps": [steps_of(frame, offset) for frame, offset in zip(step_frames, self.offsets, strict=True)],
            "marks": [
                mark
                for trace, (frame, offset) in enumerate(zip(mark_frames, self.offsets, strict=True))
                for mark in marks_of(frame, trace, offset, self._slices, traces[trace].lanes)
            ],
            "difference": difference_of(difference, self.offsets[0]),
        }
        self._note = " ".join(filter(None, (unlike, capped(self._overlays))))
        self._view = _view(view)
        self._height = max(int(height), 120)
        self.status = ""
        """The last sentence that was said in the status line."""
        super().__init__(kinds=list(KINDS if kinds is None else kinds), channel=uuid.uuid4().hex, **options)
        self.on_msg(self._receive)
        self._push()
        self.pushed = True

    # -- what Python reads

    @property
    def traces(self) -> tuple[Trace, ...]:
        """What is shown; empty after ``close()``."""
        return self._traces

    @property
    def lanes(self) -> tuple[SliceLane, ...]:
        """The lanes of the picture, top to bottom; ``hidden_lanes`` holds positions in here."""
        return self._slices.lanes

    @property
    def selection(self) -> Trace | tuple[Trace, ...]:
        """The events that touch ``selection_ns`` and are shown: their kind is in ``kinds``, their lane not hidden.
        Everything shown while nothing is selected. A Trace for one trace, a tuple for two."""
        chosen = tuple(self._selected_of(index) for index in range(len(self._traces)))
        return chosen[0] if len(chosen) == 1 else chosen

    @property
    def selected(self) -> Trace | None:
        """The one selected slice as a Trace of one event; None if there is none."""
        if self.selected_slice < 0 or not self._traces:
            return None
        lane = self._slices.lane_of(self.selected_slice)
        return self._traces[lane.trace].select(self._slices.event[[self.selected_slice]])

    def select(self, event: int, trace: int = 0) -> None:
        """Select an event, by its position in a trace, and bring it into sight. Raises :class:`TraceError`."""
        found = self._slices.find(trace, event)
        if found < 0:
            raise TraceError(f"there is no event {event} in trace {trace}: it has {self._count(trace)}, from 0")
        self.selected_slice = found
        start, duration = int(self._slices.start[found]), int(self._slices.duration[found])
        self.show(start - 4 * duration - 100, start + 5 * duration + 100)

    def show(self, start_ns: int, end_ns: int) -> None:
        """Bring a stretch of the axis into sight."""
        self.send({"type": "show", "start": int(start_ns), "end": int(end_ns)})

    def __repr__(self) -> str:
        return self._sentence() if self._traces else "Timeline (closed)"

    def close(self) -> None:
        """Remove every view and free traces and slices. Twice is fine."""
        self._traces = ()
        self._slices = slices_of((), ())
        self._overlays = {"steps": [], "marks": [], "difference": []}
        self._titles = []
        self.on_msg(self._receive, remove=True)
        super().close()

    # -- state

    @traitlets.validate("selection_ns")
    def _check_selection(self, proposal: Any) -> tuple[int, int] | None:
        if proposal["value"] is None:
            return None
        start, end = proposal["value"]
        return (int(min(start, end)), int(max(start, end)))

    @traitlets.validate("kinds")
    def _check_kinds(self, proposal: Any) -> list[str]:
        wrong = [kind for kind in proposal["value"] if kind not in KIND]
        if wrong:
            raise TraceError(f"kinds has {wrong[0]!r}, which is no kind; there are {', '.join(KINDS)}")
        return list(proposal["value"])

    @traitlets.validate("selected_slice")
    def _check_slice(self, proposal: Any) -> int:
        index = int(proposal["value"])
        if not -1 <= index < len(self._slices):
            raise TraceError(f"selected_slice={index} is no slice: there are {len(self._slices)}, from 0; -1 is none")
        return index

    @traitlets.observe("selection_ns", "kinds", "hidden_lanes")
    def _tell_selection(self, change: Any) -> None:
        if self.pushed and self._traces and self.selection_ns is not None:
            self.send({"type": "selection", "text": self._selection_sentence()})

    def _selected_of(self, index: int) -> Trace:
        trace = self._traces[index]
        shown = trace.mask(*self.kinds)
        for number in self.hidden_lanes:
            if 0 <= number < len(self.lanes) and self.lanes[number].trace == index:
                first, last = self._slices.offsets[number : number + 2]
                shown[self._slices.event[first:last]] = False
        if not shown.all():
            trace = trace.select(shown)
        stretch: Any = self.selection_ns
        if stretch is None:
            return trace
        return trace.between(*(moment - self.offsets[index] for moment in stretch))

    def _selection_sentence(self) -> str:
        chosen = self.selection if isinstance(self.selection, tuple) else (self.selection,)
        start, end = self.selection_ns
        counts = ", ".join(
            (f"{'AB'[index]}: " if len(chosen) > 1 else "") + f"{len(one):,} event{'s' * (len(one) != 1)}"
            for index, one in enumerate(chosen)
        )
        stretch = f"{end - start:,} ns selected, from {start:,} to {end:,} ns"
        if not any(map(len, chosen)):
            return f"{stretch}: nothing that is shown lies in it."
        return f"{stretch}. {counts}; .selection holds them."

    def _count(self, trace: int) -> int:
        return len(self._traces[trace]) if 0 <= trace < len(self._traces) else 0

    # -- messages

    def _push(self) -> None:
        self.send(*encode(self._slices, self._titles, self._overlays, self._height, self._note, self._view))

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        """Answer the page. Whatever goes wrong is said in the status line: an exception in here reaches nobody."""
        try:
            kind = content.get("type")
            if kind == "ready":
                self._push()
            elif kind == "details":
                self._send_details(int(content["id"]))
            else:
                self._say(f"The page sent a message that this version does not know: {kind!r}.")
        except (Exception, KeyboardInterrupt) as error:
            self._say(f"{type(error).__name__}: {error}")

    def _send_details(self, number: int) -> None:
        if not 0 <= number < len(self._slices):
            raise TraceError(f"there is no slice {number}: there are {len(self._slices)}, from 0")
        lane = self._slices.lane_of(number)
        trace = self._traces[lane.trace]
        details = details_of(trace, int(self._slices.event[number]))
        work = [self._slices.find(lane.trace, event) for event in details.pop("work")]
        launch = details.pop("launch")
        details["launch"] = self._slices.find(lane.trace, launch) if launch >= 0 else -1
        offset = self.offsets[lane.trace]
        if offset:
            details["facts"].append(
                ["start on the axis", f"{int(trace.start[self._slices.event[number]]) + offset:,} ns"]
            )
        if len(self._traces) > 1:
            details["facts"].append(["trace", f"{'AB'[lane.trace]} {self._titles[lane.trace][0]}"])
        self.send({"type": "details", "id": number, **details, "work": work})

    def _say(self, text: str) -> None:
        self.status = text
        self.send({"type": "status", "text": text})

    # -- saved output

    def _sentence(self) -> str:
        return static_text(self._slices, self._titles, domain_of(self._slices))

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and beside it a picture and words that need neither a kernel nor a script."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None or not self._traces:
            return bundle
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        html = static_html(self._slices, self._titles, self._overlays)
        return {**data, "text/plain": self._sentence(), "text/html": html}, metadata


def _view(view: tuple[int, int] | None) -> tuple[int, int] | None:
    if view is None:
        return None
    start, end = (int(moment) for moment in view)
    if end <= start:
        raise TraceError(f"view=({start}, {end}) is no stretch: give (start_ns, end_ns), the end behind the start")
    return start, end


def _titles(traces: Sequence[Trace], titles: Sequence[str] | None) -> list[tuple[str, bool]]:
    """Title, and whether device times are modelled, of each trace."""
    if titles is not None and len(titles) != len(traces):
        raise TraceError(f"titles= has {len(titles)} for {len(traces)} trace(s); give one each")
    names = [trace.info.title for trace in traces] if titles is None else [str(title) for title in titles]
    return [(name or "trace", trace.info.modelled) for name, trace in zip(names, traces, strict=True)]
