"""The static twin: a pure function from a view to inert HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from mrv2lab.widgets.step_explorer import StepExplorer, static_step
from mrv2lab.widgets.step_explorer.message import Shown
from mrv2lab.widgets.step_explorer.static_step import letter_of, static_html, static_text, step_html, visible
from tests.widgets.fake_source import FakeSource, big_source

TAGS = set("div p b i ul li table caption thead tbody tr th td svg title text rect".split())
ATTRIBUTES = set(
    "style scope cellpadding rules role width height font-size font-family fill fill-opacity x y text-anchor".split()
)


class Elements(HTMLParser):
    """Tags and attributes of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_visible_is_literal() -> None:
    assert visible("a\nb\t") == "a⏎b⇥"
    assert visible("  x ") == "␣␣x␣"
    assert visible("\u202eevil\x00\x1b") == "⟨U+202E⟩evil␀⟨U+001B⟩"
    assert visible(12) == "12"


def test_letters_go_from_the_highest_row() -> None:
    assert [letter_of(row, 1024) for row in (1023, 1022, 1000, 999, 424)] == ["A", "B", "Z", "AA", "ZZ"]


def test_rows_say_what_changed_and_who_wrote_it() -> None:
    text = re.sub("<[^>]+>", "|", step_html(FakeSource(3).view(1), "t"))
    assert "step 1 of 3, 4 requests, " in text and "record: asynchronous, nothing was added" in text
    assert re.search(r"\|A 7\|\|alice\|\|9\|\|9\|\|10 → 11 G\|\|9 → 10 G\|\|3\|", text)


def inert(html: str) -> bool:
    """Nothing but tables, text and shapes."""
    found = Elements(html)
    return found.tags <= TAGS and found.attributes <= ATTRIBUTES


def test_hostile_names_and_texts_are_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource(4)
    source.title = "<script>alert(1)</script>"
    shown = [Shown(source.title, False, 4, source.view(3)), Shown("x", False, 0, None, "<img src=x>")]
    html = static_html(shown)
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert inert(html)
    monkeypatch.setattr(static_step, "_esc", lambda text, limit=0: str(text))
    assert not inert(static_html(shown)), "the check must be able to fail"


def test_a_large_step_stays_under_60_kb() -> None:
    source = big_source(2)
    html = static_html([Shown("a", False, 2, source.view(1)), Shown("b", False, 2, source.view(1))])
    assert len(html.encode()) < 60_000
    assert "(the first 20 of 1024)" in html


def test_the_saved_output_has_the_picture_beside_the_widget() -> None:
    bundle, _ = StepExplorer(FakeSource(3), index=2)._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert "bob" in bundle["text/html"]
    assert bundle["text/plain"].startswith("fake.rec: step 2 of 3, 6 requests")


def test_a_source_without_a_step_says_why() -> None:
    shown = [Shown("empty", False, 0, None, "This recording holds no step.")]
    assert static_text(shown) == "empty: This recording holds no step."
    assert "This recording holds no step." in static_html(shown)
