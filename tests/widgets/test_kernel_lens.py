"""The kernel lens widget: what it sends, what it saves, and what a reader sees and does in a browser."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.recording.lens import Access, Difference, LensCalls, LensError, LensRun, Program, SourceText
from mrv2lab.widgets.kernel_lens import KernelLens, payload, static_twin
from tests.slow import mostly_slow
from tests.widgets.lens_page import messages, page

EVIL = "<img src=x onerror=\"document.title='owned'\">"
KERNEL = "@jit\ndef double_kernel(x, y):\n    i = tl.program_id(0)\n    tl.store(y + i, 2 * tl.load(x + i))  # twice"


def load(buffer: str, index: list[int], values: Any) -> Access:
    return Access("load", buffer, np.array(index), values[index], None, 13)


def store(buffer: str, index: list[int], values: Any, before: Any) -> Access:
    return Access("store", buffer, np.array(index), values, before, 13)


def double(**changes: Any) -> LensRun:
    """y = 2 x over four elements, the second of them beyond what a double can say; one program each."""
    x = np.array([3, 2**61 + 1, 5, 7])
    y = np.full(4, -7)
    programs = [Program((i, 0, 0), (load("x", [i], x), store("y", [i], 2 * x[[i]], y[[i]]))) for i in range(4)]
    run = LensRun(
        op="double",
        phase="prepare_inputs",
        doc="Twice ``x`` into ``y``.",
        params=("x", "y", "n"),
        inputs={"x": x, "y": y, "n": 4},
        writes=("y",),
        expected={"y": 2 * x},
        spec=SourceText("mrv2lab/ops/double.py", 5, "def double_spec(x, y, n):\n    y[:] = 2 * x"),
        kernel=SourceText("mrv2lab/ops/double.py", 10, KERNEL),
        launcher=SourceText("mrv2lab/ops/double.py", 20, "@op\ndef double(kernel, x, y, n):\n    kernel[(n,)](x, y)"),
        after={"y": 2 * x},
        grid=(4, 1, 1),
        programs=tuple(programs),
    )
    return replace(run, **changes)


def calls(*runs: LensRun | LensError) -> LensCalls:
    def run(index: int) -> LensRun:
        found = runs[index]
        if isinstance(found, LensError):
            raise found
        return found

    names = [(run.phase, run.op) if isinstance(run, LensRun) else ("", "broken") for run in runs]
    return LensCalls("step 3", names, run)


# -- Python -----------------------------------------------------------------------------------------------------------
def test_what_travels() -> None:
    content, columns = payload(double())
    index, values, before, dense = (
        np.frombuffer(column, np.int32 if i == 0 else np.int64) for i, column in enumerate(columns)
    )
    assert [buffer["name"] for buffer in content["buffers"]] == ["x", "y"]
    assert content["buffers"][1] | {"offset": 4, "written": True, "dense": True} == content["buffers"][1]
    assert content["programs"][2]["accesses"] == [
        {"store": False, "line": 13, "buffer": 0, "at": 4, "count": 1},
        {"store": True, "line": 13, "buffer": 1, "at": 5, "count": 1},
    ]
    assert index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert values.tolist()[:3] == [3, 6, 2**61 + 1]
    assert before.tolist()[:2] == [0, -7]
    assert dense.tolist() == [3, 2**61 + 1, 5, 7, -7, -7, -7, -7]
    assert content["scalars"] == [["n", "4"]]


def test_floats_travel_as_doubles() -> None:
    x = np.array([0.5, np.nan], np.float32)
    content, columns = payload(double(inputs={"x": x, "y": x}, programs=()))
    assert content["buffers"][0]["kind"] == "float"
    assert np.frombuffer(columns[3], np.float64)[:2].tolist()[0] == 0.5


def test_a_large_buffer_travels_only_where_touched() -> None:
    x = np.arange(10_000)
    run = double(inputs={"x": x, "y": x}, programs=(Program((0, 0, 0), (load("x", [9000], x),)),))
    content, columns = payload(run)
    assert not content["buffers"][0]["dense"]
    assert [len(column) for column in columns] == [4, 8, 8, 0]


def test_traced_once_and_only_when_shown() -> None:
    asked: list[int] = []

    def run(index: int) -> LensRun:
        asked.append(index)
        return double()

    widget = KernelLens(LensCalls("", [("a", "double"), ("b", "double")], run))
    assert asked == []
    assert widget.run is widget.run
    widget.call = 1
    widget.call = 0
    assert asked == [0, 1]


def test_selection_stays_in_range() -> None:
    widget = KernelLens(calls(double(), double()))
    widget.call, widget.program = 7, -3
    assert (widget.call, widget.program) == (1, 0)
    with pytest.raises(ValueError, match="there is no call 2; there are 2, from 0"):
        KernelLens(calls(double(), double()), call=2)


def test_a_call_that_cannot_be_traced_is_a_sentence() -> None:
    (first, _), (second, columns) = messages(KernelLens(calls(double(), LensError("the kernel raised"))))
    assert first["run"]["verdict"] == "kernel = spec: bit for bit"
    assert second["sentence"] == "the kernel raised"
    assert "run" not in second
    assert columns == []


def test_whatever_goes_wrong_is_a_sentence() -> None:
    """An exception in a message handler would reach nobody, and one in a repr would hide the widget."""
    problems = [RuntimeError("no such row"), KeyboardInterrupt()]

    def run(index: int) -> LensRun:
        raise problems[index]

    widget = KernelLens(LensCalls("", [("", "a"), ("", "b")], run))
    assert "RuntimeError: no such row" in widget._repr_mimebundle_()[0]["text/html"]
    said = [content["sentence"] for content, _ in messages(widget)]
    assert said[0] == "RuntimeError: no such row"
    assert said[1].startswith("Interrupted while the kernel was interpreted;")


def test_closing_forgets_the_runs() -> None:
    widget = KernelLens(double())
    widget._repr_mimebundle_()
    widget.close()
    assert widget._traced == {}
    assert widget.comm is None


def test_no_data_in_saved_state() -> None:
    widget = KernelLens(double())
    assert set(widget.get_state()) - {"_esm", "_css"} >= {"call", "program"}
    assert "double_kernel" not in str({key: value for key, value in widget.get_state().items() if key != "_esm"})
    module = str(widget.get_state("_esm")["_esm"])
    assert len(module.encode()) < 40_000
    assert "innerHTML" not in module
    assert not re.search(r"^import\b|\bimport\(|\brequire\(|https?:", module, re.MULTILINE)


# -- the static twin --------------------------------------------------------------------------------------------------
def test_the_saved_picture_says_it_in_words() -> None:
    bundle, _ = KernelLens(double())._repr_mimebundle_()
    assert bundle["text/plain"] == "KernelLens(double: kernel = spec: bit for bit)"
    html = bundle["text/html"]
    assert "<b>double</b>, grid (4, 1, 1), 4 programs: kernel = spec: bit for bit" in html
    assert "Twice <code>x</code> into <code>y</code>." in html
    assert "<li>L line 13: x[0] = 3</li><li>S line 13: y[0]: -7 → 6</li>" in html
    assert "  13      tl.store(y + i, 2 * tl.load(x + i))  # twice" in html
    assert "<script" not in html


def test_the_saved_picture_of_nothing() -> None:
    bundle, _ = KernelLens(LensCalls("step 0", [], lambda _: double()))._repr_mimebundle_()
    assert "This step launched no operation that a recording can replay." in bundle["text/html"]


def hostile() -> LensRun:
    text = SourceText(EVIL, 1, f"def f(): return '{EVIL}'")
    return double(op=EVIL, doc=EVIL, notes=(EVIL,), spec=text, kernel=text, launcher=text, missing=EVIL)


def test_the_saved_picture_escapes() -> None:
    assert "<img" not in static_twin(hostile())
    assert "<img" not in static_twin(LensError(EVIL))


# -- in a browser -----------------------------------------------------------------------------------------------------
browser_test = [
    pytest.mark.browser,
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="Playwright is not installed"),
]


class Shown:
    """A lens in a page of its own. ``errors``: what the console complained about."""

    def __init__(self, browser: Any, folder: Path, widget: KernelLens, **options: Any) -> None:
        size = options.pop("size", (1100, 1000))
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        path = folder / "lens.html"
        path.write_text(page(widget, **options), encoding="utf-8")
        self.page.goto(path.as_uri())
        self.page.evaluate("window.ready")
        self.page.wait_for_selector(".mrv2-lens option, .mrv2-lens p:has-text('no operation')", state="attached")

    def text(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in self.page.locator(selector).all_inner_texts()]

    def focus(self) -> None:
        self.page.locator(".mrv2-lens").first.focus()


def shot(shown: Shown, name: str) -> None:
    """Keep a picture where MRV2LAB_SCREENSHOTS says."""
    if folder := os.environ.get("MRV2LAB_SCREENSHOTS"):
        shown.page.screenshot(path=Path(folder) / f"kernel_lens_{name}.png", full_page=True)


class TestInABrowser:
    pytestmark = browser_test

    def test_spec_and_kernel_stand_side_by_side(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(calls(double(), double())))
        boxes = [shown.page.locator("pre").nth(i).bounding_box() for i in range(2)]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
        assert shown.text(".line .no")[:3] == ["5", "6", "10"]
        assert shown.text("option") == ["prepare_inputs · double"] * 2
        assert shown.text(".verdict") == ["✓ kernel = spec: bit for bit"]
        assert shown.text(".where") == ["Program 1 of 4, id (0, 0, 0): 1 load, 1 store."]
        assert shown.text(".line.s .no") == ["13"]
        shot(shown, "first")
        assert shown.errors == []

    def test_cells_of_a_program(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(double()))
        shown.page.evaluate("model.set('program', 1)")
        assert shown.text(".buffer:nth-of-type(1) li.cell")[:2] == ["0 3", "1 2305843009213693953L loaded"]
        # What program 0 stored is there; what program 1 stores shows its before and after.
        assert [text.split()[1] for text in shown.text(".buffer:nth-of-type(2) li.cell")] == ["6", "-7", "-7", "-7"]
        assert "-7 becomes → 4611686018427387906S stored" in shown.text("li.cell.s")[0]
        assert shown.text("ol button") == [
            "line 13 L load x[1] = 2305843009213693953",
            "line 13 S store y[1]: -7 → 4611686018427387906",
        ]

    def test_keyboard(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(double()))
        shown.focus()
        seen = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"):
            shown.page.keyboard.press(key)
            seen.append(shown.page.evaluate("model.state.program"))
        assert seen == [1, 2, 1, 3, 3, 0, 0]
        assert shown.page.locator("[role=status]").inner_text() == "Program 1 of 4, id (0, 0, 0): 1 load, 1 store"
        assert shown.page.locator(".mrv2-lens").get_attribute("data-lm-suppress-shortcuts") == "true"
        shown.page.keyboard.press("Tab")
        shown.page.keyboard.press("Escape")
        assert shown.page.evaluate("document.activeElement.className") == "mrv2-lens"
        shown.page.keyboard.press("Escape")
        assert shown.page.evaluate("document.activeElement === document.body")

    def test_one_access_alone(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(double()))
        button = shown.page.locator("ol button").nth(1)
        button.focus()
        shown.page.keyboard.press("Enter")
        assert button.get_attribute("aria-pressed") == "true"
        assert shown.page.locator(".line.sel .no").inner_text() == "13"
        assert shown.page.locator(".cell.sel").count() == 1
        shown.page.keyboard.press("Enter")
        assert shown.page.locator(".sel").count() == 0

    def test_another_op_begins_at_its_first_program(self, browser: Any, tmp_path: Path) -> None:
        wrong = double(difference=Difference("y", (2,), 10, 11, 1), notes=("cut",), op="worse")
        shown = Shown(browser, tmp_path, KernelLens(calls(double(), wrong, LensError("the kernel raised"))))
        shown.page.evaluate("model.set('program', 3)")
        shown.page.locator("select").select_option("1")
        assert shown.page.evaluate("model.state.program") == 0
        assert shown.text(".verdict") == ["≠ kernel and spec differ: y[2] is 11 by the kernel and 10 by the spec"]
        assert shown.text(".note")[0] == "cut"
        shown.page.locator("select").select_option("2")
        assert shown.text(".doc") == ["the kernel raised"]
        assert not shown.page.locator("pre").first.is_visible()
        assert not shown.page.locator(".bar input").is_visible()

    def test_an_empty_lens_says_why(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(LensCalls("step 0", [], lambda _: double())))
        assert shown.text(".doc") == ["This step launched no operation that a recording can replay."]
        without = double(missing="Triton is not installed.", programs=(), grid=None)
        shown = Shown(browser, tmp_path, KernelLens(without))
        assert shown.text(".verdict") == ["– Spec only. Triton is not installed."]
        assert shown.page.locator("pre").nth(1).is_visible()
        idle = double(programs=(Program((0, 0, 0)),), grid=(1, 1, 1))
        shown = Shown(browser, tmp_path, KernelLens(idle))
        assert shown.text(".where")[0].endswith("it returned before it touched memory.")

    @pytest.mark.slow
    def test_dropped_accesses_are_said(self, browser: Any, tmp_path: Path) -> None:
        text = "program (0, 0, 0) stores to y[-1], outside its 4 elements"
        shown = Shown(browser, tmp_path, KernelLens(double(programs=(Program((0, 0, 0), (), (text,)),))))
        assert shown.text(".outside") == [f"Dropped: {text}."]
        assert shown.text(".verdict")[0].startswith("≠ the kernel leaves its arguments: program (0, 0, 0) stores")

    @pytest.mark.slow
    def test_two_views_and_their_ends(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(double()), views=2)
        shown.page.locator("button[aria-label='Next program']").first.click()
        assert shown.text(".where") == ["Program 2 of 4, id (1, 0, 0): 1 load, 1 store."] * 2
        shown.page.evaluate("cleanups.shift()[0]()")
        shown.page.evaluate("model.set('program', 2)")
        assert shown.text(".where") == ["Program 3 of 4, id (2, 0, 0): 1 load, 1 store."]
        shown.page.evaluate("cleanups.shift()[0]()")
        assert shown.page.locator(".mrv2-lens").count() == 0
        assert shown.page.evaluate("model.count()") == 0
        assert shown.errors == []

    def test_html_in_names_stays_text(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(hostile()))
        assert EVIL in shown.text(".doc")[0]
        assert shown.page.locator("img").count() == 0
        assert shown.page.title() == "Kernel lens"
        mutant = ("el.textContent = text", "el.innerHTML = text")
        assert Shown(browser, tmp_path, KernelLens(hostile()), mutant=mutant).page.locator("img").count() > 0

    @pytest.mark.slow
    def test_narrow_and_dark(self, browser: Any, tmp_path: Path) -> None:
        shown = Shown(browser, tmp_path, KernelLens(double()), size=(320, 800), dark=True)
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= 320
        shot(shown, "narrow_dark")

    @pytest.mark.parametrize("dark", mostly_slow([False, True], 1))
    def test_axe_finds_nothing_serious(self, browser: Any, tmp_path: Path, dark: bool) -> None:
        axe = pytest.importorskip("axe_playwright_python.sync_playwright")
        bad = double(programs=(replace(double().programs[0], outside=("a store outside",)),))
        shown = Shown(browser, tmp_path, KernelLens(calls(bad, double())), dark=dark)
        shown.page.evaluate("document.querySelector('details').open = true")
        results = axe.Axe().run(shown.page)
        found = [v for v in results.response["violations"] if v["impact"] in ("serious", "critical")]
        assert [(v["id"], [node["html"] for node in v["nodes"]]) for v in found] == []
