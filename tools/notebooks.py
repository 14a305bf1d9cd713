"""Notebooks: the .py (py:percent) is the source, the .ipynb is a function of it and carries no outputs.

``python tools/notebooks.py`` checks the pairs under notebooks/, ``--write`` makes every .ipynb anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT_METADATA = ("mrv2lab",)


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


def stored_outputs(folder: Path) -> list[str]:
    """Notebooks with outputs, execution counts, widget state or another kernel than python3. Needs no jupytext."""
    problems = []
    for path in _ipynb(folder):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        metadata = notebook["metadata"]
        for number, cell in enumerate(notebook["cells"]):
            if cell.get("outputs") or cell.get("execution_count") is not None:
                problems.append(f"{path.name}: cell {number} has outputs or an execution count")
        if "widgets" in metadata:
            problems.append(f"{path.name}: widget state is stored")
        if metadata.get("kernelspec", {}).get("name") != "python3":
            problems.append(f"{path.name}: the kernelspec is {metadata.get('kernelspec')}, not python3")
    return problems


def disagreements(folder: Path) -> list[str]:
    """Notebooks without a source, sources without a notebook, and pairs that differ."""
    problems = []
    names = {path.stem for path in (*_ipynb(folder), *folder.glob("*.py"))}
    for name in sorted(names):
        source, notebook = folder / f"{name}.py", folder / f"{name}.ipynb"
        if not source.exists() or not notebook.exists():
            there, lacking = (notebook, source) if notebook.exists() else (source, notebook)
            problems.append(f"{there.name}: {lacking.name} is missing")
            continue
        made = build(source.read_text(encoding="utf-8"))
        stored = json.loads(notebook.read_text(encoding="utf-8"))
        if _content(made) != _content(stored):
            problems.append(f"{notebook.name}: its cells differ from {source.name}")
        for key in KEPT_METADATA:
            if made["metadata"].get(key) != stored["metadata"].get(key):
                problems.append(f"{notebook.name}: metadata {key!r} differs from {source.name}")
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


def _ipynb(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ipynb"))


def main() -> None:
    """Check, or write with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the .ipynb files from their sources")
    folder = Path(__file__).resolve().parent.parent / "notebooks"
    if parser.parse_args().write:
        for path in write(folder):
            print(f"wrote {path.name}")
    problems = stored_outputs(folder) + disagreements(folder)
    print("\n".join(problems) or "notebooks agree with their sources and carry no outputs")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
