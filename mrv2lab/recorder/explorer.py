"""The step explorer for whatever has steps: engines, recordings, recording files.

Loads no torch by itself: whoever has an Engine has loaded it already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2lab.recording.recording import Recording
from mrv2lab.recording.source import StepSource
from mrv2lab.widgets.step_explorer import StepExplorer as Widget

if TYPE_CHECKING:
    from mrv2lab.engine.engine import Engine


class StepExplorer(Widget):
    """Steps of an :class:`Engine`, a :class:`Recording`, a recording's file or any ``StepSource``; or of two of them.

    An engine is recorded in memory until :meth:`close`, which gives it back; ``top_k`` is how many logits a row are
    kept of it. Everything else as in ``mrv2lab.widgets.step_explorer.StepExplorer``. Raises ``ValueError`` for what has
    no steps and for one engine twice, ``RecordingError`` and ``OSError`` as ``Recording.load`` does.
    """

    def __init__(self, *sources: Engine | Recording | StepSource | str | Path, top_k: int = 8, **options: Any) -> None:
        if len({id(source) for source in sources}) < len(sources):
            raise ValueError("both sources are the same; one explorer shows it already")
        opened: list[StepSource] = []
        try:
            for source in sources:
                opened.append(_opened(source, top_k))
            super().__init__(*opened, **options)
        except BaseException:
            for source in opened:
                source.close()
            raise


def _opened(source: Any, top_k: int) -> StepSource:
    if isinstance(source, (str, Path)):
        return Recording.load(source)
    loaded = sys.modules.get("mrv2lab.engine.engine")
    if loaded is not None and isinstance(source, loaded.Engine):
        from mrv2lab.recorder.live import LiveSource

        return LiveSource(source, top_k=top_k)
    if all(hasattr(source, name) for name in ("title", "live", "__len__", "view", "advance", "close")):
        made: StepSource = source
        return made
    raise ValueError(
        f"a {type(source).__name__} has no steps to show; give an Engine, a Recording or a recording's path"
    )
