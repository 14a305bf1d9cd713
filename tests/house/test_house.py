"""The rules of the house, applied to the project itself. That each check can fail is shown in test_planted.py."""

from __future__ import annotations

import importlib
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house import files, imports
from tools import notebooks

ROOT = Path(__file__).resolve().parents[2]


def test_layers() -> None:
    assert imports.layer_violations(ROOT) == []


def test_no_torch_in_the_torch_free_packages() -> None:
    assert imports.torch_violations(ROOT) == []


def test_no_transformers_in_the_engine() -> None:
    assert imports.transformers_violations(ROOT) == []


def test_line_cap() -> None:
    assert files.long_files(ROOT) == []


def test_no_file_called_utils() -> None:
    assert files.utils_files(ROOT) == []


def test_three_parts_in_each_op() -> None:
    assert files.op_part_violations(ROOT) == []


def test_no_machine_paths() -> None:
    assert files.machine_traces(ROOT) == []


def test_notebooks_carry_no_outputs() -> None:
    problems = notebooks.stored_outputs(notebooks.in_git(ROOT / "notebooks"))
    if problems:
        pytest.fail("\n".join([*problems, notebooks.REMEDY]), pytrace=False)


def test_notebooks_agree_with_their_sources() -> None:
    pytest.importorskip("jupytext")
    problems = notebooks.disagreements(notebooks.in_git(ROOT / "notebooks"))
    if problems:
        pytest.fail("\n".join([*problems, notebooks.REMEDY]), pytrace=False)


def torch_free_modules() -> list[str]:
    """Layer 0, every module of ops/ and of the S packages, and the package itself."""
    found = ["mrv2lab", *(f"mrv2lab.{name}" for name in imports.LAZY_TORCH)]
    for package in ("ops", *imports.NO_TORCH):
        for path in sorted((ROOT / "mrv2lab" / package).rglob("*.py")):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return found


def test_layer_0_and_ops_import_without_torch() -> None:
    code = f"""
import importlib, sys
for name in {torch_free_modules()!r}:
    importlib.import_module(name)
    loaded = {{"torch", "triton"}} & set(sys.modules)
    assert not loaded, f"{{name}} loads {{loaded}}"
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_public_names_resolve() -> None:
    import mrv2lab

    for name in mrv2lab.__all__:
        assert getattr(mrv2lab, name) is not None
    assert set(mrv2lab.__all__) <= set(dir(mrv2lab))
    with pytest.raises(AttributeError, match="no_such_name"):
        mrv2lab.no_such_name  # noqa: B018


def test_public_names_are_imported_for_type_checkers_too() -> None:
    """The lazy table and the TYPE_CHECKING imports say the same."""
    import mrv2lab

    typed = {
        found.module.removeprefix("mrv2lab.")
        for found in imports.imports(ROOT)
        if found.path == ROOT / "mrv2lab" / "__init__.py" and found.module.startswith("mrv2lab.")
    }
    assert typed == {f"{module}.{name}" for name, module in mrv2lab.PUBLIC.items()}


def test_version_is_one() -> None:
    import mrv2lab

    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", mrv2lab.__version__)


def test_binder_builds_by_itself() -> None:
    """What repo2docker does not forgive: it sees only binder/, defaults to Python 3.10, and runs past errors."""
    folder = ROOT / "binder"
    assert (folder / "runtime.txt").read_text().strip() in {"python-3.11", "python-3.12", "python-3.13"}
    lines = (folder / "requirements.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert any(line.startswith("-e .") for line in requirements), "without it the package is not installed"
    assert not any(re.match(r"torch|.*\bengine\b", line) for line in requirements), "pip would take a CUDA build"
    post = folder / "postBuild"
    assert post.read_text().startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in post.read_text()
    assert post.stat().st_mode & stat.S_IXUSR
    assert not (folder / "Dockerfile").exists(), "it would silence the other files"


def test_glossary_names_what_is_there() -> None:
    assert files.glossary_problems(ROOT) == []


def test_proprietary_packages_stay_outside_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "nsight" in extras
    assert extras["all"] == ["mrv2lab[engine,lab,test]"]


def test_the_wheel_holds_the_data(tmp_path: Path) -> None:
    """Checkpoints, ES modules, the typing marker and the licence are in the wheel, tests are not."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    zipfile = importlib.import_module("zipfile")
    built = next(wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path)))
    names = set(zipfile.ZipFile(built).namelist())
    data = [
        path.relative_to(ROOT).as_posix()
        for pattern in ("model/checkpoints/**/*", "widgets/**/*.js", "widgets/**/*.css", "py.typed")
        for path in (ROOT / "mrv2lab").glob(pattern)
        if path.is_file()
    ]
    assert "mrv2lab/py.typed" in data
    assert [path for path in data if path not in names] == []
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "tools/", "notebooks/")) for name in names)
