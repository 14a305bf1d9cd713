"""The explorer's ES module and style sheet, joined from the files beside this one."""

from __future__ import annotations

from pathlib import Path

from mrv2lab.widgets.assets import joined

FOLDER = Path(__file__).parent
MODULES = ("data", "dom", "rows", "gather", "pages", "logits", "timeline", "words", "explorer")
"""In order of definition: a class may be used by a later file only."""


def module_text() -> str:
    """The ES module; it exports ``{render}`` as anywidget's front-end module does."""
    return joined(FOLDER, (f"{name}.js" for name in MODULES))


def style_text() -> str:
    """The style sheet; every selector starts at a class ``mx-...``, so that nothing else on the page changes."""
    return joined(FOLDER, ["style.css"])
