"""The explorer in Chromium: what the panels show, the phase cursor, links, hostile data, two sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrv2lab.widgets.step_explorer.assets import module_text
from tests.widgets.conftest import OpenPage
from tests.widgets.fake_source import ATTACK, FakeSource
from tests.widgets.harness import page as harness

pytestmark = pytest.mark.browser

READ_GRID = """(label) => {
  const grid = [...document.querySelectorAll('[role=grid]')].find((g) => g.getAttribute('aria-label') === label);
  const shown = [...grid.querySelectorAll('.mx-tbody > [role=row]:not([hidden])')];
  return shown.sort((a, b) => a.dataset.i - b.dataset.i).map((r) => [...r.children].map((c) => c.innerText.trim()));
}"""


def grid(page: Any, label: str) -> list[list[str]]:
    """The visible cells of a grid, top to bottom."""
    cells: list[list[str]] = page.evaluate(READ_GRID, label)
    return [[text.replace("\n", "") for text in row] for row in cells]


def saved(page: Any, name: str) -> Any:
    """A trait of the model as it was saved last, once what the model holds is saved."""
    last = "model.sent.filter((m) => m.type === 'save').at(-1)?.state[name]"
    page.wait_for_function(f"(name) => JSON.stringify({last}) === JSON.stringify(model.state[name])", arg=name)
    return page.evaluate(f"(name) => {last}", name)


def test_every_panel_shows_the_step(open_page: OpenPage, screenshots: Path) -> None:
    page = open_page(harness(FakeSource(), state={"index": 1}))
    assert grid(page, "Request rows")[-1] == (
        ["A7", "alice", "…alert(1)> ⟨U+202E⟩…Once", "9", "9", "11G", "10G", "3", "30 OnceG", "0.7"]
    )
    assert grid(page, "Staged diffs")[0] == ["total_len", "D5", "0", "1", "9", "apply_write"]
    assert grid(page, "Batch, in batch order")[0] == ["0", "B6", "bob", "decode", "1", "9", "0", "10"]
    assert grid(page, "Tokens of the step")[:2] == [
        ["0", "B6", "42", "␣", "9", "3:1", "→ 0"],
        ["1", "A7", "59", "…", "9", "6:1", "→ 1"],
    ]
    assert grid(page, "Block tables, in batch order")[1] == ["1", "A7", "alice", "4 5 6"]
    assert page.locator(".mx-strip > span:visible").all_inner_texts()[:7] == ["∅", "B×", "B", "B+", "A", "A", "A+"]
    assert grid(page, "Sampled tokens")[0] == ["B6", "bob", "0", "13", "⟨U+202E⟩", ""]
    assert page.locator(".mx-bars tr.chosen").all_inner_texts() == ["▶ 13\t⟨U+202E⟩\t\n\t11.488"]
    assert page.locator(".mx-words li").all_inner_texts()[0] == f"{ATTACK} admitted to row 5: 9 tokens to prefill"
    assert page.locator(".mx-plot [data-phase]").count() == 14
    assert "modelled" in page.locator("[data-panel=timeline] .mx-note").inner_text()
    badges = page.locator(".mx-badge").all_inner_texts()
    assert badges[:2] == ["recorded", "record: asynchronous, nothing was added"]
    assert page.locator(".mx-empty:visible").count() == 0
    page.screenshot(path=screenshots / "step_explorer_light_1200.png", full_page=True)


def test_a_step_whose_data_cannot_be_read_stops_nothing(open_page: OpenPage) -> None:
    page = open_page(harness(FakeSource(), state={"index": 0}))
    page.evaluate(
        "() => { const reply = model.reply; model.reply = () => { model.reply = reply; "
        "model.emit('msg:custom', {type: 'views', views: [{columns: []}]}, []); }; }"
    )
    page.get_by_label("Following step", exact=True).click()
    page.wait_for_function("document.querySelector('.mx-status').textContent.includes('could not be read')")
    page.get_by_label("Following step", exact=True).click()
    page.wait_for_function("document.querySelector('.mx-toolbar input[type=number]').value === '1'")


def test_the_phase_cursor_shows_rows_as_they_were(open_page: OpenPage) -> None:
    page = open_page(harness(FakeSource(), state={"index": 1}))
    button = '.mx-phases [data-phase="{}"]'
    page.click(button.format("before"))
    assert grid(page, "Request rows")[-1][5:7] == ["10", "9"]
    assert [row[1] for row in grid(page, "Request rows")] == ["free", "free", "bob", "alice"]
    page.click(button.format("update_states"))
    assert grid(page, "Request rows")[1][:2] == ["D5", f"{ATTACK}C"]
    assert "1 diff" not in page.locator("[data-panel=staged] .mx-hint").inner_text()
    assert "not applied yet" in page.locator("[data-panel=staged] .mx-hint").inner_text()
    page.click(button.format("apply_writes"))
    assert grid(page, "Request rows")[1][5:7] == ["9C", "0C"]
    assert saved(page, "phase") == "apply_writes"
    page.click(button.format("postprocess"))
    assert grid(page, "Request rows")[1][5:7] == ["10G", "9G"]
    assert saved(page, "phase") == "", "the last stop has no name: stepping stays at the end"
    page.locator('[aria-label="Request rows"] [data-i="1"]').click()
    said = page.locator("[data-panel=rows] .mx-detail").inner_text()
    assert "total_len 0 → 9, CPU apply_write in apply_writes; " in said
    assert "total_len 9 → 10, GPU kernel post_update in postprocess" in said


def test_the_phase_cursor_test_can_fail(open_page: OpenPage) -> None:
    good = "this.at(change) > stop"
    assert good in module_text()
    mutant = module_text().replace(good, "false")  # every change has always happened
    page = open_page(harness(FakeSource(), state={"index": 1, "phase": "before"}, module=mutant))
    assert grid(page, "Request rows")[-1][5:7] != ["10", "9"]


def test_phases_and_panels_are_linked_both_ways(open_page: OpenPage) -> None:
    page = open_page(harness(FakeSource(), state={"index": 1}))
    page.locator('.mx-plot [data-phase="gather"]').click()
    lit = "[...document.querySelectorAll('.mx-panel.lit')].map((p) => p.dataset.panel)"
    assert page.evaluate(lit) == ["gather", "pages"]
    assert page.locator("[data-panel=gather] .mx-chip").inner_text() == "◆ gather"
    assert saved(page, "phase") == "apply_writes", (
        "nothing changes in gather: rows stand where the stop before it left them"
    )
    assert saved(page, "selection") == {"kind": "phase", "phase": "gather"}
    page.locator("[data-panel=staged] [role=grid]").focus()
    assert page.locator(".mx-phases .lit").all_inner_texts() == ["update_states2", "apply_writes12"]
    assert page.evaluate("[...document.querySelectorAll('.mx-plot .lit')].map((b) => b.dataset.phase)") == (
        ["update_states", "apply_writes"]
    )
    page.locator("summary").click()
    page.locator('[aria-label^="Marks"] [data-i="3"]').click()
    assert (
        page.locator("[data-panel=timeline] .mx-detail").inner_text().startswith("h2d apply_writes.1 in apply_writes")
    )
    assert saved(page, "selection") == {"kind": "mark", "mark": 3, "name": "apply_writes.1", "phase": "apply_writes"}


def hostile_page() -> FakeSource:
    source = FakeSource(title=ATTACK)
    source.steps[3].meta["words"].append(ATTACK)
    source.steps[3].meta |= {"diverged": ATTACK, "notes": [ATTACK], "device": ATTACK}
    source.steps[3].meta["marks"][0] |= {"name": ATTACK, "reads": [ATTACK], "site": ATTACK}
    source.steps[3].meta["spans"][0]["name"] = ATTACK
    return source


def test_hostile_data_is_text(open_page: OpenPage) -> None:
    page = open_page(harness(hostile_page(), state={"index": 3, "follow": ATTACK}))
    page.locator("summary").click()
    page.locator('[aria-label^="Marks"] [data-i="0"]').click()
    assert page.locator("img, script:not(body > script), iframe").count() == 0
    assert page.get_by_text(ATTACK).count() > 10
    assert "dave⏎⟨U+202E⟩evad" in page.locator("[data-panel=rows]").inner_text()
    for character in ("\u202e", "\x00"):
        assert character not in page.locator(".mx-root").inner_text()


def test_the_hostile_test_can_fail(open_page: OpenPage) -> None:
    good = "cell.parts[1].textContent = was.text = text"
    assert good in module_text()
    mutant = module_text().replace(good, "cell.parts[1].innerHTML = was.text = text")
    page = open_page(harness(hostile_page(), state={"index": 3}, module=mutant))
    assert page.locator("img").count() > 0
    page.wrong.clear()  # the policy refused what the mutant let in


def test_filter_and_follow(open_page: OpenPage) -> None:
    page = open_page(harness(FakeSource(), state={"index": 3}))
    page.get_by_label("Filter by request").fill("BO")
    for label in ("Request rows", "Batch, in batch order", "Tokens of the step", "Sampled tokens"):
        assert len(grid(page, label)) == 1, label
    page.get_by_label("Filter by request").fill("nobody")
    assert page.locator("[data-panel=rows] .mx-empty").inner_text() == "No row's request matches the filter."
    page.get_by_label("Filter by request").fill("")
    page.get_by_label("Follow a request").select_option("bob")
    assert saved(page, "follow") == "bob" and saved(page, "filter") == ""
    for panel in ("rows", "gather", "pages", "logits"):
        assert page.locator(f"[data-panel={panel}] .followed:visible").count() > 0, panel
    assert page.locator(".ln.strong").count() == 1


def test_two_sources_mark_what_differs(open_page: OpenPage, screenshots: Path) -> None:
    other = FakeSource(runner="v1", shift=3, live=True, mode="step", title="live engine")
    page = open_page(harness(FakeSource(), other, state={"index": 2}))
    assert page.locator("[data-panel=rows] [role=grid]").count() == 2
    first = grid(page, "Sampled tokens")
    assert all(row[3].startswith("≠ ") for row in first), "a sign, not colour alone"
    assert not any("≠" in cell for row in grid(page, "Batch, in batch order") for cell in row)
    assert "step: paused after gather, read from the device (synchronised)" in page.locator(".mx-sources").inner_text()
    assert page.get_by_role("button", name="Next step of the live engine").is_visible()
    page.get_by_role("button", name="Next step of the live engine").click()
    page.wait_for_function("document.querySelector('.mx-status').textContent.startsWith('Nothing to do')")
    assert page.evaluate("model.sent.filter((m) => m.type === 'advance')") == (
        [{"type": "advance", "source": None, "unit": "step"}]
    )
    page.screenshot(path=screenshots / "step_explorer_two_1200.png", full_page=True)


def test_shown_twice_works_twice_and_leaves_nothing(open_page: OpenPage) -> None:
    page = open_page(harness(FakeSource(), state={"index": 1}, views=2))
    roots = page.locator(".mx-root")
    assert roots.count() == 2
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    roots.nth(0).get_by_role("button", name="Following step").click()
    page.wait_for_function("[...document.querySelectorAll('input[type=number]')].every((i) => i.value === '2')")
    roots.nth(1).get_by_label("Filter by request").fill("bob")
    assert roots.nth(0).get_by_label("Filter by request").input_value() == "bob"
    page.evaluate("cleanups[0]()")
    assert roots.count() == 1
    roots.nth(0).get_by_role("button", name="Following step").click()
    page.wait_for_function("document.querySelector('input[type=number]').value === '3'")
    page.evaluate("cleanups[1]()")
    assert roots.count() == 0 and page.evaluate("model.count()") == 0
    page.evaluate("model.reply(4)")
    assert page.locator(".mx-root").count() == 0


def test_a_leaking_view_is_noticed(open_page: OpenPage) -> None:
    good = "this.model.off(event, callback)"
    assert good in module_text()
    page = open_page(harness(FakeSource(2), module=module_text().replace(good, "undefined")))
    page.evaluate("cleanups[0]()")
    assert page.evaluate("model.count()") > 0


def test_empty_sources_and_missing_parts_say_why(open_page: OpenPage) -> None:
    page = open_page(harness(FakeSource(0, live=True)))
    assert page.locator(".mx-empty:visible").all_inner_texts() == (
        ["No step was made yet: Next step (N) runs the engine on."] * 7
    )
    page = open_page(harness(FakeSource(1, ids=(), top_k=0, texts=False, timed=False)))
    texts = page.locator(".mx-empty:visible").all_inner_texts()
    assert texts == [
        "The scheduler decided nothing out of the ordinary.",
        "No times: this source kept no spans and no marks.",
        "No row is live: no request was admitted yet.",
        "Nothing was staged: no request came and none got a block.",
        "No request is in the batch: the step has no tokens.",
        "No logits were kept: Recorder(engine, top_k=8) keeps the greatest.",
        "Nothing was sampled: the step has no tokens.",
    ]


def test_a_readers_pause_is_left_out_of_the_timeline(open_page: OpenPage) -> None:
    source = FakeSource(live=True)
    end = max(span["end"] for span in source.steps[1].meta["spans"])
    source.steps[1].meta["gap"] = {"at": end / 2, "hidden": 1_514_000.0}
    page = open_page(harness(source, state={"index": 1}))
    assert "… 1.51 s later" in page.locator(".mx-plot text.axis").all_text_contents()
