"""Which module imports what, read from the source with ast: DESIGN's layer table and the torch-free packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "mrv2lab"

# DESIGN.md, "Layers", in its order: a package imports those of a smaller number, or ones above it with the same number.
LAYERS: dict[str, int | str] = {
    "config": 0,
    "sampling_params": 0,
    "protocol": 0,
    "observer": 0,
    "runtime": 1,
    "ops": 2,
    "memory": 3,
    "attention": 4,
    "model": 4,
    "state": 4,
    "sample": 4,
    "graphs": 5,
    "spec": 5,
    "parallel": 5,
    "runner": 6,
    "runner_v1": 6,
    "engine": 7,
    "trace": "S",
    "recording": "S",
    "widgets": "S",
    "recorder": "J",
    "check": "J",
    "teach": "J",
    "bench": "J",
    "__init__": "J",
    "__main__": "J",
    "cli": "J",
    "magics": "J",
}
ORDER = list(LAYERS)
FORBIDDEN = {"runner_v1": {"state", "memory", "sample", "runner"}}
"""The contrast must be real: V1 shares none of MRV2's state."""

TORCH = {"torch", "triton", "torchvision", "torchaudio"}
NO_TORCH = ("trace", "recording", "widgets")
"""Not even in a function or under TYPE_CHECKING."""
LAZY_TORCH = ("config", "protocol", "sampling_params", "observer")
"""Only under TYPE_CHECKING: annotations may name a tensor."""
TRANSFORMERS_ALLOWED = ("model/training", "bench/engine_transformers.py", "bench/engine_flash.py")


@dataclass(frozen=True)
class Import:
    """One imported module name, absolute; ``typing_only`` is true under ``if TYPE_CHECKING:``."""

    path: Path
    line: int
    module: str
    typing_only: bool


def imports(root: Path) -> Iterator[Import]:
    """Every import of every module under ``root/mrv2lab``, inside functions and by import_module("...") too.

    ``from a import b`` yields ``a.b``: whether b is a module or a name makes no difference to the package it is in.
    """
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parent = parts[:-1]  # the package that one leading dot means, for an __init__ too
        yield from _imports_of(path, parent, path.read_text(encoding="utf-8"))


@cache
def _imports_of(path: Path, parent: tuple[str, ...], text: str) -> tuple[Import, ...]:
    """Once for all the rules: five of them walk every module."""
    return tuple(_walk(ast.parse(text), path, parent, typing_only=False))


def _walk(node: ast.AST, path: Path, parent: tuple[str, ...], typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(path, node.lineno, alias.name, typing_only)
    elif isinstance(node, ast.ImportFrom):
        base = list(parent[: len(parent) - node.level + 1]) if node.level else []
        base += [node.module] if node.module else []
        for alias in node.names:
            yield Import(path, node.lineno, ".".join([*base, alias.name]), typing_only)
    elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__") and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield Import(path, node.lineno, name.value.lstrip("."), typing_only)
    if isinstance(node, ast.If) and _called(node.test) == "TYPE_CHECKING":
        for child in node.body:
            yield from _walk(child, path, parent, typing_only=True)
        for child in node.orelse:
            yield from _walk(child, path, parent, typing_only)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, path, parent, typing_only)


def _called(node: ast.AST) -> str:
    """Last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def layer_violations(root: Path) -> list[str]:
    """Imports that DESIGN's table forbids, TYPE_CHECKING ones included, and packages that it does not name."""
    problems = []
    for path in sorted((root / PACKAGE).iterdir()):
        is_package = path.is_dir() and any(path.rglob("*.py"))
        if (is_package or path.suffix == ".py") and path.stem not in LAYERS:
            problems.append(f"{PACKAGE}/{path.name}: not in the layer table")
    for found in imports(root):
        target = _package_of(found.module)
        here = found.path.relative_to(root / PACKAGE)
        source = here.parts[0].removesuffix(".py")
        if target is None or target == source or source not in LAYERS:
            continue
        if not _allowed(source, target, here):
            problems.append(f"{PACKAGE}/{here.as_posix()}:{found.line}: {source} may not import {target}")
    return problems


def _package_of(module: str) -> str | None:
    """The entry of the table that an absolute module name belongs to; None outside mrv2lab."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__"


def _allowed(source: str, target: str, here: Path) -> bool:
    if target in FORBIDDEN.get(source, ()):
        return False
    mine, theirs = LAYERS[source], LAYERS[target]
    if mine == "J":
        return True
    if mine == "S":
        replay = here.parts[0] == "recording" and here.parts[1].removesuffix(".py").startswith("replay")
        return theirs in ("S", 0) or (replay and target == "ops")
    if isinstance(mine, int) and isinstance(theirs, int):
        return theirs < mine or (theirs == mine and ORDER.index(target) < ORDER.index(source))
    return False  # numbered packages import neither S nor J


def torch_violations(root: Path) -> list[str]:
    """Imports of torch or Triton where there may be none."""
    problems = []
    for found in imports(root):
        here = found.path.relative_to(root / PACKAGE)
        source = here.parts[0].removesuffix(".py")
        if found.module.split(".")[0] not in TORCH:
            continue
        if source in NO_TORCH or (source in LAZY_TORCH and not found.typing_only):
            problems.append(f"{PACKAGE}/{here.as_posix()}:{found.line}: {source} may not import {found.module}")
    return problems


def transformers_violations(root: Path) -> list[str]:
    """Imports of transformers, which is a test's reference, a trainer's tool and a peer in a process of its own, never
    the engine's."""
    return [
        f"{found.path.relative_to(root).as_posix()}:{found.line}: imports {found.module}"
        for found in imports(root)
        if found.module.split(".")[0] == "transformers"
        and not found.path.relative_to(root / PACKAGE).as_posix().startswith(TRANSFORMERS_ALLOWED)
    ]
