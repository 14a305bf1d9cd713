"""The widget: one or two step sources, small named state, data by custom message.

Messages from the page: ``ready`` (a view was made: send it the step), ``goto`` (``index``), ``advance`` (``source`` or
null for every live one, ``unit`` "step" or "phase"). To the page: ``views`` (see ``message.py``) and ``status``.
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from mrv2lab.recording.source import StepSource
from mrv2lab.recording.view import StepView
from mrv2lab.widgets.step_explorer.assets import module_text, style_text
from mrv2lab.widgets.step_explorer.message import Shown, encode
from mrv2lab.widgets.step_explorer.static_step import static_html, static_text

MAX_SOURCES = 2
LAST_STEP = "This is the last step so far: Next step (N) runs the engine on."


class StepExplorer(anywidget.AnyWidget):
    """Steps forward and back through one source, or through two side by side, aligned by step index.

    ``index`` counts from 0, a negative one from the last step. ``follow`` names a request to keep in sight, ``height``
    is the greatest height in pixels (0: as high as it gets). Raises ``ValueError`` for no or more than two sources and
    ``TraitError`` for an index without a step. An error inside a source becomes a sentence in the status line.
    """

    _esm = module_text()
    _css = style_text()

    index = traitlets.Int(0, help="Position among the source's steps.").tag(sync=True)
    follow = traitlets.Unicode("", help="Request that is highlighted in every panel; empty: none.").tag(sync=True)
    filter = traitlets.Unicode("", help="Only requests whose id contains this, in any case.").tag(sync=True)
    phase = traitlets.Unicode("", help="Cursor stop at which rows are shown; empty: the last.").tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    height = traitlets.Int(0, min=0).tag(sync=True)
    selection = traitlets.Dict(help="What was selected last: {kind, request, row, phase, mark, ...}.").tag(sync=True)

    def __init__(
        self, *sources: StepSource, index: int = 0, follow: str | None = None, height: int = 0, **kwargs: Any
    ) -> None:
        if not 1 <= len(sources) <= MAX_SOURCES:
            raise ValueError(f"a StepExplorer shows one source or two side by side, not {len(sources)}")
        self._sources: tuple[StepSource, ...] = sources
        self._shown: tuple[Shown, ...] = ()
        self.status = ""
        """The sentence in the status line."""
        super().__init__(index=index, follow=follow or "", height=height, **kwargs)
        self.on_msg(self._receive)
        self._push()

    # -- what Python reads

    @property
    def sources(self) -> tuple[StepSource, ...]:
        """What is shown; empty after ``close()``."""
        return self._sources

    @property
    def views(self) -> tuple[StepView | None, ...]:
        """The current view of every source; None where a source has no such step or could not say."""
        return tuple(one.view for one in self._shown)

    @property
    def view(self) -> StepView | None:
        """The current view of the first source."""
        return self._shown[0].view if self._shown else None

    @property
    def count(self) -> int:
        """Steps of the longest source, now."""
        return max((len(source) for source in self._sources), default=0)

    # -- stepping

    def advance(self, unit: str = "step", source: int | None = None) -> str | None:
        """Run the live sources (or one of them) on by a ``"step"`` or a ``"phase"`` and show where they stand.

        Returns the sentence in the status line, None if all went well. Raises ``RuntimeError`` after :meth:`close`.
        """
        if not self._sources:
            raise RuntimeError("this explorer was closed; make a new StepExplorer")
        if unit not in ("step", "phase"):
            raise ValueError(f"unit is 'step' or 'phase', not {unit!r}")
        chosen = self._sources if source is None else self._sources[source : source + 1]
        sentences = [_sentence_of(live, unit) for live in chosen if live.live]
        if not sentences:
            sentences = ["A recording has no next step to run; only a live engine has."]
        self.phase = ""
        self._show(max(self.count - 1, 0), " ".join(text for text in sentences if text))
        return self.status or None

    def __repr__(self) -> str:
        return static_text(self._shown) if self._sources else "StepExplorer (closed)"

    def close(self) -> None:
        """Close the sources and free what is held. Twice is fine."""
        sources, self._sources = getattr(self, "_sources", ()), ()
        self._shown = ()
        try:
            self.on_msg(self._receive, remove=True)
            super().close()
        finally:
            for source in sources:
                source.close()

    @traitlets.validate("index")
    def _check_index(self, proposal: Any) -> int:
        count, index = self.count, int(proposal["value"])
        if not count and index in (0, -1):
            return 0
        if not -count <= index < count:
            raise traitlets.TraitError(f"index {index} is no step: there are {count}, counted from 0")
        return index % count

    @traitlets.observe("index")
    def _index_changed(self, change: Any) -> None:
        if self._shown:  # the constructor pushes once everything is there
            self._push(self._next_status)

    _next_status = ""

    def _show(self, index: int, status: str = "") -> None:
        """Look at the sources anew, at an index that may be the present one."""
        self._next_status = status
        try:
            if index == self.index:
                self._push(status)
            else:
                self.index = index  # its observer pushes
        finally:
            self._next_status = ""

    # -- messages

    def _push(self, status: str = "") -> None:
        """Look at every source and send what it shows to every view of this widget."""
        self._shown = tuple(look_at(source, self.index) for source in self._sources)
        self.status = status
        content, buffers = encode(self.index, self._shown, status)
        self.send(content, buffers)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        """Answer the page. Whatever goes wrong is said in the status line: an exception in here reaches nobody."""
        try:
            kind = content.get("type")
            if kind == "ready":
                self.send(*encode(self.index, self._shown, self.status))
            elif kind == "goto":
                self._go(int(content["index"]))
            elif kind == "advance":
                self.advance(str(content.get("unit", "step")), content.get("source"))
            else:
                self._say(f"The page sent a message that this version does not know: {kind!r}.")
        except (Exception, KeyboardInterrupt) as error:
            self._say(_sentence(error))

    def _go(self, index: int) -> None:
        """To a step, or to the last one where the page asks for more: a live source may have grown behind its back."""
        last = max(self.count - 1, 0)
        self._show(min(index, last), LAST_STEP if index == last + 1 else "")

    def _say(self, text: str) -> None:
        self.status = text
        self.send({"type": "status", "text": text})

    # -- saved output

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and beside it a picture and words that need neither a kernel nor a script."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/plain": static_text(self._shown), "text/html": static_html(self._shown)}, metadata


def look_at(source: StepSource, index: int) -> Shown:
    """What a source shows at ``index``: its step, or a sentence why there is none. Never raises."""
    title, live, count, view, error = "source", False, 0, None, ""
    try:
        title, live, count = source.title, source.live, len(source)
        if index < count:
            view = source.view(index)
        elif count:
            error = f"This source has no step {index}: it has {count}, counted from 0."
        elif live:
            error = "No step was made yet: Next step (N) runs the engine on."
        else:
            error = "This recording holds no step."
    except (Exception, KeyboardInterrupt) as problem:
        error = _sentence(problem)
    return Shown(title, live, count, view, error)


def _sentence_of(source: StepSource, unit: str) -> str:
    """Advance one source; what it has to say."""
    try:
        return source.advance(unit) or ""
    except (Exception, KeyboardInterrupt) as error:
        return _sentence(error)


def _sentence(error: BaseException) -> str:
    """One line for a person."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted: engine.reset() makes a live engine usable again."
    text = " ".join(str(error.args[0] if error.args else "").split())
    return text if isinstance(error, (ValueError, traitlets.TraitError)) and text else f"{type(error).__name__}: {text}"
