"""Texts of a timeline: times for people, and strings from files made safe to send and to write into HTML and XML."""

from __future__ import annotations

import html
import re

UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\ud800-\\udfff]"
)
"""Control, zero-width and bidirectional-override characters and lone surrogates: none may hide or reorder what is
shown, and none may make the picture invalid XML."""


def escaped(text: object, limit: int = 60) -> str:
    """Cut to ``limit`` characters, made visible, and escaped for element content and attributes."""
    shown = str(text)
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    shown = HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", shown)
    shown = shown.replace("\ufffe", "⟨U+FFFE⟩").replace("\uffff", "⟨U+FFFF⟩")
    return html.escape(shown)


def plain(text: object, limit: int = 2000) -> str:
    """Cut to ``limit`` characters, and lone surrogates, which no UTF-8 can carry, as ``?``."""
    shown = str(text)
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    return shown.encode("utf-8", "replace").decode("utf-8")


def time_text(ns: float) -> str:
    """A length of time for people: three significant digits and a unit."""
    unit, word = next(((unit, word) for unit, word in UNITS if abs(ns) >= unit), UNITS[-1])
    return f"{ns / unit:.3g} {word}" if abs(ns) < 999.5 * unit else f"{ns / unit:,.0f} {word}"


def signed(ns: float) -> str:
    """The same with its sign."""
    return ("+" if ns > 0 else "-" if ns < 0 else "") + time_text(abs(ns))
