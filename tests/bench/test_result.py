"""Benchmark results: the summary's numbers, and the file's head."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mrv2lab.bench import machine, result
from mrv2lab.bench.result import check_writable, newest_result, summary, write_result


def test_summary() -> None:
    made = summary([5, 1, 4, 2, 3, 7, 6])
    assert made == {"median": 4, "mean": 4, "q1": 2, "q3": 6, "min": 1, "max": 7, "n": 7}
    assert summary([2, 1])["median"] == 1.5


def test_summary_of_one() -> None:
    assert summary([3.5]) == {"median": 3.5, "mean": 3.5, "q1": 3.5, "q3": 3.5, "min": 3.5, "max": 3.5, "n": 1}


def test_write_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it can be typed again: no folder of this machine in it."""
    asked = ["/somewhere/bin/python3", "-m", "mrv2lab.bench.step_bench", "--out", "/somewhere/a file.json"]
    monkeypatch.setattr(sys, "orig_argv", asked)
    path = tmp_path / "new" / "x.json"
    write_result(path, "step_cpu", {"step": summary([1, 2])})
    made = json.loads(path.read_text())
    assert list(made) == ["name", "date", "command", "machine", "figures"]
    assert made["name"] == "step_cpu"
    assert made["command"] == "python -m mrv2lab.bench.step_bench --out 'a file.json'"
    assert made["date"].endswith("+00:00")
    assert made["figures"]["step"]["n"] == 2
    assert made["machine"]["torch"]
    assert "missing" not in made["machine"]
    assert path.read_bytes().endswith(b"}\n")


def test_a_commit_is_marked_where_there_are_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "0123456789ab", "status": " M a.py"}
    monkeypatch.setattr(machine, "_git", lambda root, *words: said[words[0]])
    assert machine.git_commit() == "0123456789ab+"
    said["status"] = ""
    assert machine.git_commit() == "0123456789ab"

    def no_git(*_: object) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(machine, "_git", no_git)
    assert machine.git_commit() is None
    assert result.describe_machine()["commit"] is None


def test_newest_result_of_a_gpu(tmp_path: Path) -> None:
    def write(name: str, date: str, gpu: str | None) -> None:
        (tmp_path / name).write_text(json.dumps({"date": date, "machine": {"gpu": gpu}, "figures": name}))

    assert newest_result("policies", tmp_path) is None
    write("2026-01-01-cpu-policies.json", "2026-01-09T00:00:00+00:00", None)
    assert newest_result("policies", tmp_path) is None
    write("a-policies.json", "2026-01-03T00:00:00+00:00", "NVIDIA H200")
    write("b-policies.json", "2026-01-02T00:00:00+00:00", "NVIDIA H200")
    write("c-runners.json", "2026-01-05T00:00:00+00:00", "NVIDIA H200")
    newest = newest_result("policies", tmp_path)
    assert newest is not None
    assert newest["figures"] == "a-policies.json"


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("{}")
    for fine in ("there.json", "new.json", "a/b/new.json"):
        check_writable(tmp_path / fine)
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"], "it only looks"
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        check_writable(tmp_path)
    with pytest.raises(NotADirectoryError, match=r"there\.json is no folder"):
        check_writable(tmp_path / "there.json" / "new.json")


def test_what_is_read_only_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result.os, "access", lambda path, _: path != tmp_path)  # root may write anywhere
    with pytest.raises(PermissionError, match="is read-only"):
        check_writable(tmp_path / "new.json")
