"""A notebook's cells in an IPython shell of their own, forked off a server that has already loaded what they import.

A Jupyter kernel each costs 3 s before the first cell; ``make test-all`` runs them there too, with nbmake.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

TIMEOUT_S = 300
PRELOAD = ["IPython", "anywidget", "nbformat", "pandas", "plotly.graph_objects", "plotly.io", "torch", "mrv2lab"]
PRELOAD += ["mrv2lab.engine.engine", "mrv2lab.widgets.timeline.widget", "mrv2lab.recorder.recorder"]


def cells(notebook: Path) -> list[tuple[str, bool]]:
    """Source of each cell that runs, and whether it must fail (tags ``skip-execution``, ``raises-exception``)."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [("".join(one["source"]), one["metadata"].get("tags", ())) for one in found if one["cell_type"] == "code"]
    return [(source, "raises-exception" in tags) for source, tags in code if "skip-execution" not in tags]


def run(notebook: Path, output: Path, folder: Path) -> int:
    """Exit status of a process that runs ``notebook`` in ``folder``: 1 when a cell fails, or does not where it must.

    What it says, tracebacks too, is in ``output``. Raises ``TimeoutError`` after ``TIMEOUT_S`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_run, args=(notebook, output, folder))
    process.start()
    process.join(TIMEOUT_S)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{notebook.name} takes more than {TIMEOUT_S} s")
    return status


def _run(notebook: Path, output: Path, folder: Path) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ |= {"IPYTHONDIR": str(output.parent), "PLOTLY_RENDERER": "plotly_mimetype"}
    settings = Config()
    settings.HistoryManager.enabled = False
    settings.InteractiveShell.colors = "NoColor"
    shell: Any = InteractiveShell.instance(config=settings)
    for source, fails in cells(notebook):
        result = shell.run_cell(source, store_history=False)
        if result.success is fails:
            print(f"this cell {'does not fail' if fails else 'fails'}:\n{source}", flush=True)
            raise SystemExit(1)
