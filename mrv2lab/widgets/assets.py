"""A widget's ES module and style sheet: plain files, joined in a fixed order. No build step, no imports, no CDN.

Several files, since each holds one concept; one module, since the host gets a text and can resolve no relative import.
Comment lines and indentation stay behind: the text is synced with every instance and saved in every notebook, which
asks for less than 60 KiB. A line of the files is therefore never inside a template literal or a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def joined(folder: Path, names: Iterable[str]) -> str:
    """The files ``names`` of ``folder`` as one text, without comment lines, indentation and empty lines."""
    text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
    text = re.sub(r"^\s*/\*.*?\*/\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


_TOUCHY = re.compile(r"[`'/\\]")
"""What may begin a template, a pattern or a comment, or escape a quote."""
_SPACED = re.compile(r" *([=,;:?(){}\[\]<>&|]) *")


def tight(module: str) -> str:
    """A module without the spaces around its punctuation. Only where that is plainly safe: a line with anything in
    ``_TOUCHY`` stays as it is, and so do double-quoted texts; ``+``, ``-`` and words keep their spaces."""

    def line(text: str) -> str:
        parts = text.split('"')
        if _TOUCHY.search(text) or len(parts) % 2 == 0:
            return text
        parts[::2] = [_SPACED.sub(r"\1", part) for part in parts[::2]]
        return '"'.join(parts)

    return "\n".join(map(line, module.split("\n")))
