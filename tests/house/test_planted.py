"""Each house check on small trees with one planted violation: a check that cannot fail is a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import files, imports


def plant(root: Path, tree: dict[str, str]) -> Path:
    """Write a tree of files; paths are relative to ``root``."""
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


# -- layers ------------------------------------------------------------------------------------------------------------

ALLOWED = [
    ("config.py", "import numpy, os.path"),
    ("observer.py", "from mrv2lab.protocol import SchedulerOutput"),
    ("memory/staged.py", "from mrv2lab.ops.apply_write import apply_write\nfrom ..runtime import Runtime"),
    ("state/rows.py", "from .blocks import BlockTables\nfrom mrv2lab.model import kv_cache"),
    ("engine/engine.py", "import mrv2lab.runner_v1.model_runner, mrv2lab.graphs"),
    ("runner_v1/buffers.py", "from mrv2lab import runtime, model"),
    ("trace/read.py", "from mrv2lab.widgets import timeline\nfrom mrv2lab.protocol import SchedulerOutput"),
    ("recording/replay.py", "from mrv2lab.ops.post_update import post_update_spec"),
    ("recording/replay/rows.py", "from ...ops import post_update"),
    ("bench/run.py", "from mrv2lab import Engine\nimport mrv2lab.cli, mrv2lab.trace"),
    ("__init__.py", "from .engine import Engine"),
]
FORBIDDEN = [
    ("config.py", "from mrv2lab.protocol import X", "config may not import protocol"),
    ("protocol.py", "def f():\n    from .observer import Observer", "protocol may not import observer"),
    ("runtime/rt.py", "from mrv2lab.ops import gather", "runtime may not import ops"),
    ("runtime/rt.py", "from .. import ops", "runtime may not import ops"),
    ("runtime/rt.py", "from ..ops.gather import x", "runtime may not import ops"),
    ("attention/torch.py", "import mrv2lab.state.rows", "attention may not import state"),
    ("model/kv.py", "TYPE = 1\nif TYPE_CHECKING:\n    from mrv2lab.state import R", "model may not import state"),
    ("model/kv.py", "if typing.TYPE_CHECKING:\n    import mrv2lab.sample", "model may not import sample"),
    ("runner/mr.py", "import importlib\nimportlib.import_module('mrv2lab.engine')", "runner may not import engine"),
    ("runner/mr.py", "from mrv2lab import runner_v1", "runner may not import runner_v1"),
    ("runner_v1/mr.py", "from mrv2lab.state.rows import X", "runner_v1 may not import state"),
    ("runner_v1/mr.py", "from mrv2lab.memory import X", "runner_v1 may not import memory"),
    ("runner_v1/mr.py", "from ..sample import X", "runner_v1 may not import sample"),
    ("runner_v1/mr.py", "from ..runner import X", "runner_v1 may not import runner"),
    ("engine/e.py", "from mrv2lab.trace import read", "engine may not import trace"),
    ("engine/e.py", "from mrv2lab import Engine", "engine may not import __init__"),
    ("engine/e.py", "import mrv2lab", "engine may not import __init__"),
    ("engine/e.py", "from mrv2lab.cli import app", "engine may not import cli"),
    ("trace/read.py", "from mrv2lab.runtime import Runtime", "trace may not import runtime"),
    ("trace/read.py", "from mrv2lab.ops.post_update import post_update_spec", "trace may not import ops"),
    ("recording/write.py", "from mrv2lab.ops.post_update import post_update_spec", "recording may not import ops"),
    ("recording/replay.py", "from mrv2lab.state import rows", "recording may not import state"),
    ("widgets/view.py", "from mrv2lab.recorder import capture", "widgets may not import recorder"),
    ("helpers.py", "", "helpers.py: not in the layer table"),
    ("extra/__init__.py", "", "extra: not in the layer table"),
]


@pytest.mark.parametrize(("name", "text"), ALLOWED)
def test_layers_allow(tmp_path: Path, name: str, text: str) -> None:
    assert imports.layer_violations(plant(tmp_path, {f"mrv2lab/{name}": text})) == []


@pytest.mark.parametrize(("name", "text", "problem"), FORBIDDEN)
def test_layers_forbid(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (found,) = imports.layer_violations(plant(tmp_path, {f"mrv2lab/{name}": text}))
    assert problem in found


# -- torch and transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace/read.py", "import torch"),
        ("recording/read.py", "def f():\n    from torch import nn"),
        ("widgets/view.py", "if TYPE_CHECKING:\n    import triton.language as tl"),
        ("config.py", "import torch.nn"),
        ("protocol.py", "def f():\n    import torch"),
        ("protocol.py", "if TYPE_CHECKING:\n    import numpy\nelse:\n    import torch"),
        ("observer.py", "import importlib\ntorch = importlib.import_module('torch')"),
    ],
)
def test_torch_is_found(tmp_path: Path, name: str, text: str) -> None:
    (found,) = imports.torch_violations(plant(tmp_path, {f"mrv2lab/{name}": text}))
    assert f"mrv2lab/{name}" in found


def test_torch_is_allowed_elsewhere(tmp_path: Path) -> None:
    tree = {
        "mrv2lab/protocol.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "mrv2lab/memory/staged.py": "import torch",
        "mrv2lab/trace/read.py": "import torchlike\nfrom mrv2lab.trace import torch",
    }
    assert imports.torch_violations(plant(tmp_path, tree)) == []


def test_transformers_only_in_training(tmp_path: Path) -> None:
    tree = {
        "mrv2lab/model/training/train.py": "import transformers",
        "mrv2lab/model/hf.py": "def f():\n    from transformers import AutoModel",
    }
    (found,) = imports.transformers_violations(plant(tmp_path, tree))
    assert found.startswith("mrv2lab/model/hf.py:2")


# -- files -------------------------------------------------------------------------------------------------------------


def test_line_cap(tmp_path: Path) -> None:
    tree = {"mrv2lab/a.py": "x = 1\n" * 400, "mrv2lab/b/c.py": "x = 1\n" * 401, "tests/test_a.py": "\n" * 500}
    assert files.long_files(plant(tmp_path, tree)) == [
        "mrv2lab/b/c.py: 401 lines, 400 allowed",
        "tests/test_a.py: 500 lines, 400 allowed",
    ]


def test_utils(tmp_path: Path) -> None:
    names = ["mrv2lab/utils.py", "mrv2lab/a/utils_np.py", "mrv2lab/_util/x.py", "tests/Utils.py"]
    tree = dict.fromkeys([*names, "mrv2lab/utility_theory.py", "mrv2lab/utilization.py"], "")
    found = files.utils_files(plant(tmp_path, tree))
    assert found == ["mrv2lab/_util", "mrv2lab/a/utils_np.py", "mrv2lab/utils.py", "tests/Utils.py"]


OP = """
@op(spec=add_spec, kernel=add_kernel, writes=("out",))
def add(kernel, out): ...
"""
SPEC = "def add_spec(out): ...\n"
KERNEL = "@jit\ndef add_kernel(out): ...\n"


def test_three_parts_are_enough(tmp_path: Path) -> None:
    tree = {
        "mrv2lab/ops/add.py": SPEC + KERNEL + OP,
        "mrv2lab/ops/alias.py": "add_spec = other_spec\n" + KERNEL + OP,
        "mrv2lab/ops/_op.py": "",
        "mrv2lab/ops/noise.py": "def uniform(): ...",
    }
    assert files.op_part_violations(plant(tmp_path, tree)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (KERNEL + OP, "add has no add_spec"),
        (SPEC + OP, "add has no add_kernel"),
        (KERNEL + SPEC + OP, "the order is spec, kernel, launcher"),
        (OP + SPEC + KERNEL, "the order is spec, kernel, launcher"),
        (SPEC + KERNEL + OP.replace("spec=add_spec", "spec=other_spec"), "must say spec=add_spec"),
        (SPEC + KERNEL + OP.replace("kernel=add_kernel", "kernel=other"), "must say kernel=add_kernel"),
        (SPEC + KERNEL + "@_op.op\ndef add(kernel, out): ...", "must say spec=add_spec"),
        (SPEC + KERNEL, "defines no op"),
    ],
)
def test_missing_parts_are_found(tmp_path: Path, text: str, problem: str) -> None:
    found = files.op_part_violations(plant(tmp_path, {"mrv2lab/ops/add.py": text}))
    assert any(problem in line for line in found)


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_machine_paths(tmp_path: Path, folder: str) -> None:
    tree = {
        "a.md": f"see /{folder}/x",
        "b.json": f'{{"file": "/{folder}/me/x.py"}}',
        "c.md": f"docs/{folder}/x and https://a.example/{folder}/y are no machine's, nor is ./{folder}/",
    }
    found = files.machine_traces(plant(tmp_path, tree))
    assert [line.split(":")[0] for line in found] == ["a.md", "b.json"]


def test_machine_word(tmp_path: Path) -> None:
    word = "fa" + "rm"
    tree = {"a.py": f"# on the {word}", "b.py": f"# a {word}er", "tokenizer.json": f'["{word}"]'}
    tree[f"{files.STORIES}prompts.py"] = f"PLACES = ['on a {word}']"
    (found,) = files.machine_traces(plant(tmp_path, tree))
    assert found.startswith("a.py:1")


def test_machine_traces_skips_binary_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe/" + b"root/x")
    assert files.machine_traces(tmp_path) == []


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("`mrv2lab/a.py` `Row`", None),
        ("`mrv2lab/a.py` `Row`, `mrv2lab/b/c.py` `gather`", None),
        ("later", None),
        ("`mrv2lab/a.py`", "is not `file` `name`"),
        ("`mrv2lab/b` `gather`", "mrv2lab/b is no file"),
        ("`mrv2lab/gone.py` `Row`", "mrv2lab/gone.py is no file"),
        ("`mrv2lab/a.py` `Ro`", "mrv2lab/a.py holds no Ro"),
    ],
)
def test_glossary(tmp_path: Path, where: str, problem: str | None) -> None:
    table = f"| word | meaning | where |\n|---|---|---|\n| row | a \\| b, {{`x`}} | {where} |\n"
    tree = {"GLOSSARY.md": table, "mrv2lab/a.py": "class Row: ...", "mrv2lab/b/c.py": "def gather(): ..."}
    found = files.glossary_problems(plant(tmp_path, tree))
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])


def test_a_glossary_without_rows_is_found(tmp_path: Path) -> None:
    assert files.glossary_problems(plant(tmp_path, {"GLOSSARY.md": "# Glossary"})) == ["GLOSSARY.md has no rows"]
