"""The explorer's ES module and style sheet: plain files, joined in a fixed order. No build step, no imports, no CDN.

Several files, since each holds one concept; one module, since the host gets a text and can resolve no relative import.
Comment lines and indentation stay behind: the text is synced with every instance and saved in every notebook, which
asks for less than 60 KiB. A line of the files is therefore never inside a template literal or a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
MODULES = ("data", "dom", "rows", "gather", "pages", "logits", "timeline", "words", "explorer")
"""In order of definition: a class may be used by a later file only."""


def module_text() -> str:
    """The ES module; it exports ``{render}`` as anywidget's front-end module does."""
    return _joined(f"{name}.js" for name in MODULES)


def style_text() -> str:
    """The style sheet; every selector starts at a class ``mx-...``, so that nothing else on the page changes."""
    return _joined(["style.css"])


def _joined(names: Iterable[str]) -> str:
    text = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
    text = re.sub(r"^\s*/\*.*?\*/\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
