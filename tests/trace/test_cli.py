from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from mrv2lab.cli import app

run = CliRunner().invoke


def kineto(path: Path, *, step: str = "ProfilerStep#3", longer: int = 0) -> Path:
    """Two kernels and their launches in one step."""

    def event(cat: str, name: str, ts: float, dur: float, tid: Any, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    events = [
        event("user_annotation", step, 0.0, 100.0 + longer, 1),
        event("cuda_runtime", "cudaLaunchKernel", 1.0, 2.0, 1, correlation=1),
        event("kernel", "<script>alert(1)</script>[red]\x1b[31m", 5.0, 10.0, 7, correlation=1, device=0, stream=7),
        event("cuda_runtime", "cudaLaunchKernel", 20.0, 2.0, 1, correlation=2),
        event("kernel", "second", 30.0, 10.0 + longer, 7, correlation=2, device=0, stream=7),
    ]
    path.write_bytes(orjson.dumps({"traceEvents": events, "baseTimeNanoseconds": 10**18}))
    return path


def test_report_as_json(tmp_path: Path) -> None:
    result = run(app, ["trace", "report", str(kineto(tmp_path / "a.json")), "--json"])
    assert result.exit_code == 0, result.output
    facts = orjson.loads(result.stdout)
    assert (facts["gpu_span_ns"], facts["gpu_busy_ns"], facts["gpu_events"]) == (35_000, 20_000, 2)
    assert facts["steps"][0]["number"] == 3


def test_report_on_one_screen(tmp_path: Path) -> None:
    result = run(app, ["trace", "report", str(kineto(tmp_path / "a.json"))])
    assert result.exit_code == 0, result.output
    assert "busy 0.020 ms of 0.035 ms (57.14%)" in result.stdout
    assert "ProfilerStep#3" in result.stdout
    assert len(result.stdout.splitlines()) < 50


def test_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    """SGLang's step names look like rich's markup, and so may a file's."""
    path = kineto(tmp_path / "[bold]a\x1b[31m.json", step="step[DECODE bs=16]")
    result = run(app, ["trace", "report", str(path)])
    assert result.exit_code == 0, result.output
    assert "step[DECODE bs=16]" in result.stdout
    assert "[bold]a\\x1b[31m.json" in result.stdout
    assert "\x1b[31m" not in result.stdout


@pytest.mark.parametrize("command", [["report"], ["report", "--json"], ["compare"], ["convert"]])
def test_errors_are_one_sentence(tmp_path: Path, command: list[str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no trace at all")
    rest = [str(tmp_path / "other.json")] if command[0] != "report" else []
    result = run(app, ["trace", command[0], str(broken), *rest, *command[1:]])
    assert result.exit_code == 1
    assert result.stderr.startswith("mrv2lab: ")
    assert "broken.json" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_compare(tmp_path: Path) -> None:
    a, b = kineto(tmp_path / "a.json"), kineto(tmp_path / "b.json", longer=50)
    result = run(app, ["trace", "compare", str(a), str(b), "--json"])
    assert result.exit_code == 0, result.output
    facts = orjson.loads(result.stdout)
    assert facts["verdict"]
    shown = run(app, ["trace", "compare", str(a), str(b), "--align", "first kernel"])
    assert shown.exit_code == 0, shown.output
    assert "median_a" in shown.stdout
    assert shown.stdout.index("because: ") < shown.stdout.index("median_a"), "reasons come before the figures"


def test_a_trace_beside_itself(tmp_path: Path) -> None:
    result = run(app, ["trace", "compare", str(kineto(tmp_path / "a.json")), str(kineto(tmp_path / "b.json"))])
    assert result.stdout.startswith("A trace beside itself (both hold the same events).")
    other = run(app, ["trace", "compare", str(tmp_path / "a.json"), str(kineto(tmp_path / "c.json", longer=1))])
    assert "beside itself" not in other.stdout


def test_a_file_that_was_cut_off_says_so_first(tmp_path: Path) -> None:
    whole = kineto(tmp_path / "a.json").read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: whole.index(b'"kernel"')])
    result = run(app, ["trace", "report", str(tmp_path / "cut.json")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "cut.json: THE FILE WAS CUT OFF; what follows is of the part that is there."
    assert lines[1].startswith("problem: ")
    as_json = orjson.loads(run(app, ["trace", "report", str(tmp_path / "cut.json"), "--json"]).stdout)
    assert as_json["cut_off"] and "the file was cut off" in as_json["verdict"]["sentence"]


def test_compare_refuses_an_unknown_alignment(tmp_path: Path) -> None:
    a = str(kineto(tmp_path / "a.json"))
    result = run(app, ["trace", "compare", a, a, "--align", "moon"])
    assert result.exit_code == 1
    assert "moon" in result.stderr


def test_convert(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(app, ["trace", "convert", str(kineto(tmp_path / "a.json")), str(out)])
    assert result.exit_code == 0, result.output
    assert "5 events" in result.stdout
    assert orjson.loads(out.read_bytes())["traceEvents"]


def test_convert_writes_over_nothing(tmp_path: Path) -> None:
    file, other = kineto(tmp_path / "a.json"), tmp_path / "b.json"
    before = file.read_bytes()
    other.write_text("mine")
    (tmp_path / "link.json").symlink_to(file)
    (tmp_path / "folder.json").mkdir()
    for out, why, options in (
        (file, "is the file to be converted", ["--force"]),
        (tmp_path / "link.json", "is the file to be converted", ["--force"]),
        (tmp_path / "folder.json", "is a folder", ["--force"]),
        (other, "is there already", []),
        (tmp_path / "out.txt", "ends in .json or .json.gz", []),
        (tmp_path / "out", "ends in .json or .json.gz", ["--force"]),
        (tmp_path / ".json.gz", "ends in .json or .json.gz", []),
    ):
        result = run(app, ["trace", "convert", str(file), str(out), *options])
        assert (result.exit_code, why in result.stderr, result.stderr.count("\n")) == (1, True, 1), result.stderr
    assert file.read_bytes() == before and other.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "folder.json", "link.json"]
    assert run(app, ["trace", "convert", str(file), str(other), "--force"]).exit_code == 0
    assert orjson.loads(other.read_bytes())["traceEvents"]


def test_help_loads_no_analysis() -> None:
    code = (
        "import sys, mrv2lab.cli; print([m for m in ('pandas', 'torch', 'mrv2lab.trace.report') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"
