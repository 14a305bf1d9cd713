"""Notebooks: the .py (py:percent) is the source, the .ipynb is a function of it and carries no outputs.

``python tools/notebooks.py`` checks the pairs under notebooks/, ``--write`` makes every .ipynb anew. Checked is what
the next commit would hold (git's index): outputs that a learner saved in JupyterLab matter only once they are staged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# ipykernel's own words: with others JupyterLab would rewrite the header of every source it saves.
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
KEPT_METADATA = ("mrv2lab",)
SUFFIXES = (".ipynb", ".py")
REMEDY = "then `git add notebooks`; but first run `make notebooks`"
"""Ends every complaint."""


def on_disk(folder: Path) -> dict[str, str]:
    """Name -> text of the sources and notebooks in ``folder``, as the files are."""
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.suffix in SUFFIXES}


def in_git(folder: Path) -> dict[str, str]:
    """Name -> text of the sources and notebooks in ``folder``, as git's index holds them: what a commit would take.

    Where git holds none of them (no git, no repository, nothing added yet), the files themselves.
    """
    folder = folder.resolve()
    # git sets GIT_INDEX_FILE for its hooks relative to the top of the working tree, so that is where git is asked.
    top = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder)
    inside = folder.relative_to(top).as_posix()
    try:
        listing = _git(top, "ls-files", "-z", "--cached", "--", inside)
        names = {name for name in listing.split("\0") if (top / name).parent == folder and name.endswith(SUFFIXES)}
        return {Path(name).name: _git(top, "show", f":{name}") for name in names} or on_disk(folder)
    except (OSError, subprocess.CalledProcessError):
        return on_disk(folder)


def _git(top: Path, *words: str) -> str:
    # Bytes, since text mode would turn a stored "\r\n" into "\n".
    return subprocess.run(["git", *words], cwd=top, capture_output=True, check=True).stdout.decode("utf-8")


def build(source: str) -> dict[str, Any]:
    """The .ipynb of a py:percent text: no outputs, kernel python3, cell ids made from place and content."""
    import jupytext

    notebook = jupytext.reads(source, fmt="py:percent")
    cells = []
    for index, cell in enumerate(notebook.cells):
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        tags = cell.metadata.get("tags")
        made: dict[str, Any] = {
            "cell_type": cell.cell_type,
            "id": f"{index:03d}-{digest}",
            "metadata": {"tags": list(tags)} if tags else {},
            "source": cell.source.splitlines(keepends=True),
        }
        if cell.cell_type == "code":
            made |= {"execution_count": None, "outputs": []}
        cells.append(made)
    metadata = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    metadata |= {key: notebook.metadata[key] for key in KEPT_METADATA if key in notebook.metadata}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _content(notebook: dict[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What must agree in a pair: type, text and tags of every cell."""
    return [
        (cell["cell_type"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", ())))
        for cell in notebook["cells"]
    ]


def stored_outputs(texts: Mapping[str, str]) -> list[str]:
    """Notebooks with outputs, execution counts, widget state or another kernel than python3. Needs no jupytext."""
    problems = []
    for name in sorted(name for name in texts if name.endswith(".ipynb")):
        notebook = json.loads(texts[name])
        metadata = notebook["metadata"]
        for number, cell in enumerate(notebook["cells"]):
            if cell.get("outputs") or cell.get("execution_count") is not None:
                problems.append(f"{name}: cell {number} has outputs or an execution count")
        if "widgets" in metadata:
            problems.append(f"{name}: widget state is stored")
        if metadata.get("kernelspec", {}).get("name") != "python3":
            problems.append(f"{name}: the kernelspec is {metadata.get('kernelspec')}, not python3")
    return problems


def disagreements(texts: Mapping[str, str]) -> list[str]:
    """Notebooks without a source, sources without a notebook, and pairs that differ."""
    problems = []
    for name in sorted({name.rpartition(".")[0] for name in texts}):
        source, notebook = f"{name}.py", f"{name}.ipynb"
        if source not in texts or notebook not in texts:
            there, lacking = (notebook, source) if notebook in texts else (source, notebook)
            problems.append(f"{there}: {lacking} is missing")
            continue
        made, stored = build(texts[source]), json.loads(texts[notebook])
        if _content(made) != _content(stored):
            problems.append(f"{notebook}: its cells differ from {source}")
        for key in KEPT_METADATA:
            if made["metadata"].get(key) != stored["metadata"].get(key):
                problems.append(f"{notebook}: metadata {key!r} differs from {source}")
    return problems


def write(folder: Path) -> list[Path]:
    """Make every .ipynb in ``folder`` from its source; returns those that changed."""
    changed = []
    for source in sorted(folder.glob("*.py")):
        target = source.with_suffix(".ipynb")
        text = json.dumps(build(source.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            changed.append(target)
    return changed


def main() -> None:
    """Check, or write with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the .ipynb files from their sources")
    folder = Path(__file__).resolve().parent.parent / "notebooks"
    if parser.parse_args().write:
        for path in write(folder):
            print(f"wrote {path.name}")
        texts = on_disk(folder)
    else:
        texts = in_git(folder)
    problems = stored_outputs(texts) + disagreements(texts)
    print("\n".join([*problems, REMEDY] if problems else ["notebooks agree with their sources and carry no outputs"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
