"""The widget's Python side: state, messages, and what becomes of errors. No browser."""

from __future__ import annotations

import re
from typing import Any

import pytest
import traitlets

from mrv2lab.recording.schema import RecordingError
from mrv2lab.widgets.step_explorer import StepExplorer
from tests.widgets.fake_source import FakeSource

Sent = list[tuple[dict[str, Any], list[bytes]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Every message that a widget sends to its page."""
    messages: Sent = []

    def send(self: StepExplorer, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        messages.append((content, buffers or []))

    monkeypatch.setattr(StepExplorer, "send", send)
    return messages


def test_the_constructor_pushes_the_step(sent: Sent) -> None:
    explorer = StepExplorer(FakeSource(5), index=-1)
    assert explorer.index == 4 and explorer.count == 5
    assert explorer.view is not None and explorer.view.meta["index"] == 4
    (content, buffers), *more = sent
    assert more == [] and content["type"] == "views" and content["index"] == 4 and len(buffers) == 2


def test_a_page_that_says_ready_gets_the_step_again(sent: Sent) -> None:
    explorer = StepExplorer(FakeSource(5), index=2)
    explorer._receive(explorer, {"type": "ready"}, [])
    assert sent[0] == sent[1]


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_without_a_step_is_refused(sent: Sent, index: int) -> None:
    explorer = StepExplorer(FakeSource(5))
    with pytest.raises(traitlets.TraitError, match=f"index {index} is no step: there are 5, counted from 0"):
        explorer.index = index
    with pytest.raises(traitlets.TraitError):
        StepExplorer(FakeSource(5), index=index)
    assert explorer.index == 0


def test_the_page_may_ask_for_more_than_it_knows(sent: Sent) -> None:
    """A live source grows behind the page's back; End asks for the last step, whichever that is."""
    source = FakeSource(5)
    explorer = StepExplorer(source)
    source.steps.append(FakeSource(6).steps[5])
    explorer._receive(explorer, {"type": "goto", "index": 1_000_000_000}, [])
    assert (explorer.index, explorer.status) == (5, "")
    explorer._receive(explorer, {"type": "goto", "index": 6}, [])
    assert explorer.index == 5
    assert explorer.status == "This is the last step so far: Next step (N) runs the engine on."
    explorer._receive(explorer, {"type": "goto", "index": -7}, [])
    assert sent[-1][0] == {"type": "status", "text": "index -7 is no step: there are 6, counted from 0"}


def test_one_or_two_sources() -> None:
    with pytest.raises(ValueError, match="one source or two side by side, not 0"):
        StepExplorer()
    with pytest.raises(ValueError, match="not 3"):
        StepExplorer(*[FakeSource(1)] * 3)


def test_goto_moves_the_trait_and_sends_once(sent: Sent) -> None:
    explorer = StepExplorer(FakeSource(5))
    explorer._receive(explorer, {"type": "goto", "index": 3}, [])
    explorer._receive(explorer, {"type": "goto", "index": 3}, [])
    assert explorer.index == 3 and [content["index"] for content, _ in sent] == [0, 3, 3]


def test_two_sources_of_different_lengths(sent: Sent) -> None:
    explorer = StepExplorer(FakeSource(5), FakeSource(3), index=4)
    first, second = sent[0][0]["views"]
    assert "error" not in first and second["error"] == "This source has no step 4: it has 3, counted from 0."
    assert explorer.views[1] is None and explorer.count == 5


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RecordingError("the file ends in step 3"), "the file ends in step 3"),
        (IndexError("step 3 is outside 0..2"), "IndexError: step 3 is outside 0..2"),
        (RuntimeError("poisoned\n  stream"), "RuntimeError: poisoned stream"),
    ],
)
def test_an_error_in_a_source_is_one_sentence(sent: Sent, error: Exception, sentence: str) -> None:
    source = FakeSource(5, live=True)
    explorer = StepExplorer(source)
    source.fails = error
    explorer._receive(explorer, {"type": "goto", "index": 2}, [])
    assert sent[-1][0]["views"][0]["error"] == sentence and explorer.view is None
    explorer._receive(explorer, {"type": "advance", "unit": "step", "source": None}, [])
    assert sent[-1][0]["status"] == sentence


def test_advance_runs_live_sources_and_goes_to_the_end(sent: Sent) -> None:
    live, recorded = FakeSource(2, live=True), FakeSource(4)
    explorer = StepExplorer(live, recorded, index=0)
    explorer.phase = "before"
    explorer._receive(explorer, {"type": "advance", "unit": "step", "source": None}, [])
    assert len(live) == 3 and len(recorded) == 4 and explorer.index == 3 and explorer.phase == ""
    explorer = StepExplorer(recorded)
    assert explorer.advance("step") == "A recording has no next step to run; only a live engine has."
    with pytest.raises(ValueError, match="'step' or 'phase', not 'token'"):
        explorer.advance("token")


def test_interrupting_an_advance_says_how_to_go_on(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: FakeSource, unit: str) -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeSource, "advance", interrupted)
    explorer = StepExplorer(FakeSource(2, live=True))
    assert explorer.advance() == "Interrupted: engine.reset() makes a live engine usable again."


@pytest.mark.parametrize("message", [{}, {"type": "goto"}, {"type": "goto", "index": "x"}, {"type": "eval"}, None])
def test_a_message_that_makes_no_sense_is_answered(sent: Sent, message: Any) -> None:
    explorer = StepExplorer(FakeSource(2))
    explorer._receive(explorer, message, [])
    assert sent[-1][0]["type"] == "status" and sent[-1][0]["text"]


def test_an_empty_source_says_why(sent: Sent) -> None:
    explorer = StepExplorer(FakeSource(0), FakeSource(0, live=True))
    assert [view["error"] for view in sent[0][0]["views"]] == [
        "This recording holds no step.",
        "No step was made yet: Next step (N) runs the engine on.",
    ]
    assert explorer.view is None and explorer.count == 0


def test_closing_frees_everything_and_twice_is_fine() -> None:
    sources = FakeSource(2), FakeSource(2)
    explorer = StepExplorer(*sources)
    explorer.close()
    explorer.close()
    assert [source.closed for source in sources] == [1, 1]
    assert explorer.sources == () and explorer.views == () and explorer.comm is None


def test_only_small_named_state_is_saved() -> None:
    state = StepExplorer(FakeSource(6), index=3, follow="bob").get_state()
    ours = {name: value for name, value in state.items() if name in StepExplorer.class_own_traits()}
    assert ours == {
        "index": 3, "follow": "bob", "filter": "", "phase": "", "playing": False, "height": 0, "selection": {}
    }  # fmt: skip


def test_module_text_is_small_and_reaches_for_nothing() -> None:
    module, style = StepExplorer._esm, StepExplorer._css
    assert len(module.encode()) < 60 * 1024
    assert len(style.encode()) < 16_000
    for word in ("import ", "import(", "http://", "https://", "innerHTML", "insertAdjacent", "eval(", "outerHTML"):
        assert word not in module.replace("http://www.w3.org/2000/svg", ""), word
    assert "url(" not in style and "@import" not in style
    assert module.count("export default") == 1


def test_the_style_sheet_touches_nothing_else_on_the_page() -> None:
    assert foreign(StepExplorer._css) == []
    assert foreign(".mx-a { x: y }\n.bar, .mx-b { x: y }") == [".bar, .mx-b"], "the check must be able to fail"


def foreign(style: str) -> list[str]:
    """Selectors of which a part does not start at one of our classes."""
    rules = re.findall(r"^([^@{}]+)\{", re.sub(r"^--.*$", "", style, flags=re.MULTILINE), re.MULTILINE)
    parts = ((rule, re.sub(r"\([^()]*(\([^()]*\))?[^()]*\)", "", rule).split(",")) for rule in rules)
    return [rule.strip() for rule, names in parts if not all(name.strip().startswith(".mx-") for name in names)]
