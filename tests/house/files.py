"""What files may look like: length, the three parts of an op, names, and no trace of a machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

MAX_LINES = 400
PYTHON_FOLDERS = ("mrv2lab", "tests", "tools", "notebooks")

OPS_WITHOUT_OP = {"noise.py"}
"""Modules of ops/ that hold only functions which ops share. Files that start with an underscore are free."""

# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![A-Za-z0-9_.])/(?:work|root|home|fa" + "rm)/")
MACHINE_WORD = re.compile(r"\b" + "fa" + r"rm\b", re.IGNORECASE)
STORIES = "mrv2lab/model/training/"
"""Where the word is a place in a story for children."""
DATA_SUFFIXES = {".json", ".safetensors", ".gguf", ".gz", ".png", ".svg", ".csv", ".jsonl", ".txt"}
"""Files in which a word is data (a tokenizer's vocabulary); paths are looked for there too."""


def python_files(root: Path) -> list[Path]:
    """Every Python file of the project."""
    return sorted(path for folder in PYTHON_FOLDERS for path in (root / folder).rglob("*.py"))


def long_files(root: Path) -> list[str]:
    """Python files over the cap."""
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(root)}
    return [
        f"{path.relative_to(root).as_posix()}: {count} lines, {MAX_LINES} allowed"
        for path, count in counts.items()
        if count > MAX_LINES
    ]


def utils_files(root: Path) -> list[str]:
    """Files or folders called utils: a name that says nothing."""
    paths = (path for folder in PYTHON_FOLDERS for path in (root / folder).rglob("*"))
    return sorted(
        path.relative_to(root).as_posix()
        for path in paths
        if re.match(r"_?utils?(?![a-z])", path.stem.lower()) and "__pycache__" not in path.parts
    )


def op_part_violations(root: Path) -> list[str]:
    """Modules of ops/ in which an op lacks a part: spec, then kernel, then launcher, in one file."""
    problems = []
    for path in sorted((root / "mrv2lab" / "ops").glob("*.py")):
        if path.name.startswith("_") or path.name in OPS_WITHOUT_OP:
            continue
        lines: dict[str, int] = {}
        ops: list[tuple[ast.FunctionDef, ast.expr]] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                lines[node.name] = node.lineno
                ops += [(node, decorator) for decorator in node.decorator_list if _is_op(decorator)]
            elif isinstance(node, ast.Assign):
                lines |= {target.id: node.lineno for target in node.targets if isinstance(target, ast.Name)}
        if not ops:
            problems.append(f"ops/{path.name}: defines no op")
        for node, decorator in ops:
            problems += [f"ops/{path.name}: {text}" for text in _missing_parts(node, decorator, lines)]
    return problems


def _is_op(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(called, ast.Name) and called.id == "op") or (
        isinstance(called, ast.Attribute) and called.attr == "op"
    )


def _missing_parts(node: ast.FunctionDef, decorator: ast.expr, lines: dict[str, int]) -> list[str]:
    problems = []
    given: dict[str, str] = {}
    if isinstance(decorator, ast.Call):
        given = {word.arg or "": word.value.id for word in decorator.keywords if isinstance(word.value, ast.Name)}
    below = 0
    for part in ("spec", "kernel"):
        name = f"{node.name}_{part}"
        if name not in lines:
            problems.append(f"{node.name} has no {name}")
            continue
        if not below < lines[name] < node.lineno:
            problems.append(f"{node.name}: the order is spec, kernel, launcher; {name} is at line {lines[name]}")
        if given.get(part) != name:
            problems.append(f"{node.name}: its decorator must say {part}={name}")
        below = lines[name]
    return problems


def tracked_files(root: Path) -> list[Path]:
    """Files that git tracks, or would on `git add`; every file outside hidden folders where git cannot say."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        paths = (path for path in root.rglob("*") if path.is_file())
        return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts[:-1])]
    return [root / name for name in listing.split("\0") if name and (root / name).is_file()]


def glossary_problems(root: Path) -> list[str]:
    """Rows of GLOSSARY.md that do not say where: `file` `name`, ... with names that the files hold, or ``later``."""
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", (root / "GLOSSARY.md").read_text(encoding="utf-8"), re.MULTILINE)
    problems = [] if rows else ["GLOSSARY.md has no rows"]
    for word, where in rows:
        if where in ("where", "later"):
            continue
        for place in where.split(", "):
            found = re.fullmatch(r"`([\w/.]+)` `(\w+)`", place)
            if found is None:
                problems.append(f"{word}: {place} is not `file` `name`")
            elif not (root / found[1]).is_file():
                problems.append(f"{word}: {found[1]} is no file")
            elif not re.search(rf"\b{found[2]}\b", (root / found[1]).read_text(encoding="utf-8")):
                problems.append(f"{word}: {found[1]} holds no {found[2]}")
    return problems


def machine_traces(root: Path) -> list[str]:
    """Lines of tracked text files that name a machine's folders."""
    problems = []
    for path in tracked_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # not text
        name = path.relative_to(root).as_posix()
        is_data = path.suffix in DATA_SUFFIXES or name.startswith(STORIES)
        patterns = [MACHINE_PATH] if is_data else [MACHINE_PATH, MACHINE_WORD]
        for number, line in enumerate(text.splitlines(), 1):
            if any(pattern.search(line) for pattern in patterns):
                problems.append(f"{name}:{number}: {line.strip()[:80]}")
    return sorted(problems)
