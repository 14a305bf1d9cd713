"""The checks of tools/notebooks.py on small folders with one planted violation, without git and in git's index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import test_house
from tools import notebooks

SOURCE = """# ---
# jupyter:
#   mrv2lab:
#     marks: [slow]
# ---

# %% [markdown]
# # A title

# %% tags=["raises-exception"]
# %matplotlib inline
1 / 0
"""


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with one good pair."""
    pytest.importorskip("jupytext")
    (tmp_path / "00_a.py").write_text(SOURCE)
    assert [path.name for path in notebooks.write(tmp_path)] == ["00_a.ipynb"]
    return tmp_path


def edit(folder: Path, change) -> None:
    path = folder / "00_a.ipynb"
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def test_a_good_pair_passes(pair: Path) -> None:
    assert notebooks.write(pair) == [], "the .ipynb is a function of the .py"
    assert notebooks.stored_outputs(notebooks.in_git(pair)) == []
    assert notebooks.disagreements(notebooks.in_git(pair)) == []
    notebook = json.loads((pair / "00_a.ipynb").read_text())
    assert notebook["metadata"]["mrv2lab"] == {"marks": ["slow"]}
    assert notebook["cells"][1]["metadata"] == {"tags": ["raises-exception"]}
    assert "".join(notebook["cells"][1]["source"]) == "%matplotlib inline\n1 / 0"


def test_the_notebook_is_valid(pair: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(json.loads((pair / "00_a.ipynb").read_text()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda nb: nb["cells"][1].update(outputs=[{"output_type": "stream"}]), "outputs"),
        (lambda nb: nb["cells"][1].update(execution_count=3), "execution count"),
        (lambda nb: nb["metadata"].update(widgets={}), "widget state"),
        (lambda nb: nb["metadata"].pop("kernelspec"), "kernelspec"),
        (lambda nb: nb["metadata"]["kernelspec"].update(name="conda-x"), "kernelspec"),
    ],
)
def test_stored_outputs_are_found(pair: Path, change, problem: str) -> None:
    edit(pair, change)
    (found,) = notebooks.stored_outputs(notebooks.in_git(pair))
    assert problem in found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda nb: nb["cells"][0].update(source="# Another title"), "cells differ"),
        (lambda nb: nb["cells"][1]["metadata"].clear(), "cells differ"),
        (lambda nb: nb["cells"].pop(), "cells differ"),
        (lambda nb: nb["metadata"].pop("mrv2lab"), "metadata 'mrv2lab' differs"),
    ],
)
def test_disagreements_are_found(pair: Path, change, problem: str) -> None:
    edit(pair, change)
    (found,) = notebooks.disagreements(notebooks.in_git(pair))
    assert problem in found


def test_halves_of_a_pair_are_found(pair: Path) -> None:
    (pair / "01_b.py").write_text("# %%\n1\n")
    (pair / "00_a.py").unlink()
    assert notebooks.disagreements(notebooks.in_git(pair)) == [
        "00_a.ipynb: 00_a.py is missing",
        "01_b.py: 01_b.ipynb is missing",
    ]


# -- what is judged: git's index, so that a learner may save what he likes --------------------------------------------


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose notebooks/ holds the good pair, added and not committed."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # where pytest itself runs in a hook
        monkeypatch.delenv(name, raising=False)
    root = pair / "repository"
    (root / "notebooks").mkdir(parents=True)
    for path in (pair / "00_a.py", pair / "00_a.ipynb"):
        path.rename(root / "notebooks" / path.name)
    git(root, "init", "-q")
    git(root, "add", "notebooks")
    return root


def save_outputs(folder: Path) -> None:
    """What Ctrl+S does after a run."""
    edit(folder, lambda nb: nb["cells"][1].update(outputs=[{"output_type": "stream"}], execution_count=1))


def house_tests(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_house, "ROOT", root)
    test_house.test_notebooks_carry_no_outputs()
    test_house.test_notebooks_agree_with_their_sources()


def test_saved_outputs_break_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_outputs(repository / "notebooks")
    with (repository / "notebooks" / "00_a.py").open("a") as source:
        source.write("\n# %%\n2\n")
    house_tests(repository, monkeypatch)


def test_outputs_in_the_index_are_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_outputs(repository / "notebooks")
    git(repository, "add", "notebooks")
    with pytest.raises(pytest.fail.Exception, match=r"00_a\.ipynb: cell 1 has outputs(.|\n)*run `make notebooks`$"):
        house_tests(repository, monkeypatch)
    notebooks.write(repository / "notebooks")
    with pytest.raises(
        pytest.fail.Exception, match="cell 1 has outputs"
    ):  # clean on disk, and a commit would still take them
        house_tests(repository, monkeypatch)
    git(repository, "add", "notebooks")
    house_tests(repository, monkeypatch)


def test_a_pair_that_differs_in_the_index_is_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = repository / "notebooks"
    edit(folder, lambda nb: nb["cells"][0].update(source="# Another title"))
    git(repository, "add", "notebooks")
    with pytest.raises(pytest.fail.Exception, match=r"its cells differ from 00_a\.py(.|\n)*run `make notebooks`$"):
        house_tests(repository, monkeypatch)


def test_half_a_pair_in_the_index_is_found(repository: Path) -> None:
    git(repository, "rm", "-q", "--cached", "notebooks/00_a.py")
    assert notebooks.disagreements(notebooks.in_git(repository / "notebooks")) == ["00_a.ipynb: 00_a.py is missing"]


def test_a_folder_that_git_does_not_hold_is_read_from_disk(repository: Path) -> None:
    git(repository, "rm", "-q", "--cached", "notebooks/00_a.py", "notebooks/00_a.ipynb")
    save_outputs(repository / "notebooks")
    (found,) = notebooks.stored_outputs(notebooks.in_git(repository / "notebooks"))
    assert "cell 1 has outputs" in found


@pytest.mark.slow
def test_a_commit_with_outputs_is_refused(repository: Path) -> None:
    """The hook's own command in a real `git commit`: -a and paths use an index of their own, which counts then."""
    tool = repository / "tools" / "notebooks.py"
    tool.parent.mkdir()
    tool.write_text(Path(notebooks.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.write_text(f"#!/bin/sh\nexec '{sys.executable}' tools/notebooks.py\n")
    hook.chmod(0o755)
    for setting in ("user.name=a", "user.email=a@b.c", "commit.gpgsign=false", "core.hooksPath=.git/hooks"):
        git(repository, "config", *setting.split("="))
    git(repository, "commit", "-q", "-m", "a good pair")
    save_outputs(repository / "notebooks")
    git(repository, "commit", "-q", "--allow-empty", "-m", "outputs on disk only")
    for words in (["commit", "-a", "-m", "b"], ["commit", "notebooks", "-m", "b"], ["commit", "-m", "b"]):
        if words == ["commit", "-m", "b"]:
            git(repository, "add", "notebooks")
        result = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True)
        assert result.returncode != 0, words
        assert "00_a.ipynb: cell 1 has outputs" in result.stdout + result.stderr
        assert (result.stdout + result.stderr).rstrip().endswith("run `make notebooks`")
