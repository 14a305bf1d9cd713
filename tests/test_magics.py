"""``%%record`` in a real IPython shell."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from mrv2lab import Recorder, Recording, StepExplorer
from tests.engine.small import sampled, small_engine

Run = Callable[[str], tuple[str, str]]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    module = types.ModuleType("a_notebook")  # else it would take the place of __main__
    made = InteractiveShell(config=config, user_module=module)
    made.run_line_magic("load_ext", "mrv2lab")
    with small_engine(async_scheduling=False) as engine:
        made.user_ns |= {"engine": engine, "sampled": sampled}
        yield made
    made.reset(new_session=False)
    del sys.modules[module.__name__]


@pytest.fixture
def run(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a cell; what it showed on stdout and stderr."""

    def run(cell: str) -> tuple[str, str]:
        shell.run_cell(cell)
        out, err = capsys.readouterr()
        return out, err

    return run


def test_a_cell_is_recorded(shell: InteractiveShell, run: Run) -> None:
    out, err = run("%%record\nengine.generate([[1, 2], [3]], sampled(4));")
    assert (out, err) == ("recording: 4 steps, 2 requests, 4 waits (4 for outputs), in memory\n", "")
    recording = shell.user_ns["recording"]
    assert isinstance(recording, Recording)
    assert [len(step.req_ids) for step in recording] == [2, 2, 2, 2]
    assert len(shell.user_ns["engine"].requests) == 2


def test_the_cells_own_output_is_shown_as_usual(shell: InteractiveShell, run: Run) -> None:
    out, _ = run("%%record two\nengine.submit([1], sampled(1))\nprint('hello')\nx = 1 + 1\nx")
    assert out.startswith("hello\n")
    assert "2\n" in out
    assert out.endswith("two: 0 steps, 0 requests, 0 waits (0 for outputs), in memory\n")
    assert shell.user_ns["x"] == 2
    assert "two" in shell.user_ns
    assert "recording" not in shell.user_ns


def test_options(shell: InteractiveShell, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cell.mrv2rec"
    out, err = run(f"%%record -o {path} --top-k 3 --check-every 2 mine\nengine.generate([[1, 2]], sampled(4));")
    assert (out, err) == (f"mine: 4 steps, 1 request, 4 waits (4 for outputs), in {path}\n", "")
    mine = shell.user_ns["mine"]
    assert (mine.header.top_k, mine.header.check_every, mine.title) == (3, 2, "cell.mrv2rec")
    assert [bool(step.checksums) for step in mine] == [False, True, False, True]
    assert mine.verify() == []
    explorer = StepExplorer(path)
    assert explorer.count == 4
    explorer.close()


def test_a_wait_of_the_cells_own_is_counted(run: Run) -> None:
    out, _ = run("%%record\nengine.submit([1], sampled(1))\nengine.step()\nengine.rt.synchronize()")
    assert out.endswith("recording: 1 step, 1 request, 3 waits (1 for outputs), in memory\n")


def test_an_error_is_shown_and_what_ran_is_kept(shell: InteractiveShell, run: Run) -> None:
    out, err = run("%%record\nengine.generate([[1, 2]], sampled(4))\n1 / 0")
    assert out.count("ZeroDivisionError: division by zero") == 1
    assert "magics.py" not in out
    assert err == (
        "UsageError: recording: 4 steps, 1 request, 4 waits (4 for outputs), in memory; the cell broke off\n"
    )
    assert len(shell.user_ns["recording"]) == 4
    assert not shell.run_cell("%%record\n1 / 0").success  # so that "Run All" stops here
    shell.user_ns["engine"].step()  # detached, and usable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "before", "sentence"),
    [
        ("", "del engine", 'there is no Engine in this notebook; make one first: engine = Engine(model="tiny")'),
        ("", "other = type(engine)(engine.config.model, device='cpu')", "there are several engines, engine, other; "),
        ("-e nobody", "", "-e nobody: nobody is not defined"),
        ("-e sampled", "", "-e sampled: sampled is no Engine but a function"),
        ("--top-k 62", "", "top_k must lie between 0 (no logits) and the vocabulary's 61, got 62"),
        ("--check-every -1", "", "check_every must be 0 (no checks) or a number of steps, got -1"),
        ("-o /no/such/folder/file", "", "/no/such/folder"),
        ("3x", "", "'3x' cannot be a variable's name"),
        ("-e engine engine", "", "'engine' is the engine; give the recording another name"),
        ("--fast", "", "unrecognized arguments: --fast"),
        ("--top-k many", "", "invalid int value: 'many'"),
    ],
)
def test_wrong_use_gives_one_sentence(shell: InteractiveShell, run: Run, line: str, before: str, sentence: str) -> None:
    engine = shell.user_ns["engine"]
    observer = engine.observer
    run(before)
    out, err = run(f"%%record {line}\nran = True")
    assert err.startswith("UsageError: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""
    assert "ran" not in shell.user_ns
    assert engine.observer is observer
    if "other" in shell.user_ns:
        shell.user_ns["other"].close()


def test_two_names_of_one_engine_are_one(run: Run) -> None:
    out, _ = run("again = engine\n_hidden = engine")
    out, err = run("%%record\nengine.step();")
    assert err == ""
    assert out.startswith("recording: ")


def test_an_engine_that_is_being_recorded_is_refused(shell: InteractiveShell, run: Run) -> None:
    with Recorder(shell.user_ns["engine"]):
        _, err = run("%%record\nengine.step()")
    assert err.startswith("UsageError: %%record: this engine is being recorded already")
    assert err.count("\n") == 1
    explorer = StepExplorer(shell.user_ns["engine"])
    _, err = run("%%record\nengine.step()")
    assert "close the explorer" in err
    explorer.close()
    assert run("%%record\nengine.step();")[1] == ""


def test_help_and_loading_again(shell: InteractiveShell, run: Run) -> None:
    run("%reload_ext mrv2lab\n%load_ext mrv2lab")
    assert run("%%record\nengine.step();")[1] == ""
    text = shell.object_inspect_text("%%record")
    for word in ("--engine", "--output FILE", "--top-k K", "--check-every N", "%record [-e NAME]"):
        assert word in text
