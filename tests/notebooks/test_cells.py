"""Every cell of every notebook runs; a cell that fails, or does not where it must, is seen.

In a real kernel: ``tests/recorder/test_live_notebook.py``, in JupyterLab ``tests/browser``, each notebook in
``make test-all``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebooks.shell import run

pytest.importorskip("IPython")
pytest.importorskip("anywidget")

FOLDER = Path(__file__).parents[2] / "notebooks"


def _marks(notebook: Path) -> list[pytest.MarkDecorator]:
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    return [getattr(pytest.mark, name) for name in metadata.get("mrv2lab", {}).get("marks", ())]


NOTEBOOKS = [pytest.param(path, id=path.stem, marks=_marks(path)) for path in sorted(FOLDER.glob("*.ipynb"))]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_cell_runs(notebook: Path, tmp_path: Path) -> None:
    status = run(notebook, tmp_path / "output", FOLDER)
    assert status == 0, (tmp_path / "output").read_text()[-6000:]


@pytest.mark.parametrize(
    ("source", "tags", "status", "said"),
    [
        ("get_ipython().user_ns['seen'] = display(1)", [], 0, "1\n"),
        ("1 / 0", [], 1, "ZeroDivisionError"),
        ("f(", [], 1, "SyntaxError"),
        ("raise SystemExit", [], 1, "SystemExit"),
        ("1 / 0", ["raises-exception"], 0, "ZeroDivisionError"),
        ("1 + 1", ["raises-exception"], 1, "does not fail"),
        ("1 / 0", ["skip-execution"], 0, ""),
    ],
)
def test_what_counts_as_a_failure(source: str, tags: list[str], status: int, said: str, tmp_path: Path) -> None:
    good = {"cell_type": "code", "metadata": {}, "source": ["import os\n", "assert True"]}
    made = {"cells": [good, {"cell_type": "code", "metadata": {"tags": tags}, "source": source}], "metadata": {}}
    (tmp_path / "made.ipynb").write_text(json.dumps(made))
    assert run(tmp_path / "made.ipynb", tmp_path / "output", tmp_path) == status
    assert said in (tmp_path / "output").read_text()
