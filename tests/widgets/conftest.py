"""A browser that reaches nothing, and pages that must stay without errors, dialogs and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
OpenPage = Callable[..., Any]


@pytest.fixture(scope="package")
def browser(chromium_path: str) -> Iterator[Any]:
    """One Chromium for this folder; gone before another folder's starts: two sync Playwrights cannot run at once."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install mrv2lab[test]")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=chromium_path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """``open_page(html, width=1200, scheme="light", forced="none")``; checks at the end that nothing went wrong."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_(html: str, width: int = 1200, scheme: str = "light", forced: str = "none") -> Any:
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme, forced_colors=forced)
        contexts.append(context)
        context.route("**/*", lambda route: (wrong.append(f"request {route.request.url}"), route.abort()))
        page = context.new_page()
        page.wrong = wrong
        page.on("pageerror", lambda error: wrong.append(f"error {error}"))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.set_content(html)
        page.wait_for_selector(".mx-root [data-panel]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
