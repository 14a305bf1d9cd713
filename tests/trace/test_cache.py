"""The columnar copy: equal to the trace, used only where it fits, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.trace import cache, read
from mrv2lab.trace.builder import DTYPES
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import Trace, TraceError
from tests.trace.synthetic import write_synthetic


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = write_synthetic(tmp_path / "trace.json", 500)
    path.write_bytes(path.read_bytes().replace(b'"queued": 0', b'"queued": inf', 3))
    return path


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Trace:
        raise AssertionError("the JSON was read")

    monkeypatch.setattr(read, "read_blocks", fail)


def same(a: Trace, b: Trace) -> bool:
    columns = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in DTYPES)
    args = all(a.args(row) == b.args(row) for row in range(len(a)))
    rest = (a.info, a.names, a.lanes, a.problems) == (b.info, b.names, b.lanes, b.problems)
    return columns and args and rest


def test_the_copy_gives_the_same_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(path, cache=True)
    assert first.problems
    assert sorted(one.name for one in path.parent.iterdir()) == ["trace.json", "trace.json.mrv2trace"]
    forbid_reading(monkeypatch)
    second = load(path)
    assert same(first, second)
    assert {name: getattr(second, name).dtype for name in DTYPES} == DTYPES


def test_false_neither_uses_nor_writes_it(path: Path) -> None:
    load(path, cache=True)
    before = cache.place(path).stat().st_mtime_ns
    cache.place(path).write_bytes(b"x")
    assert len(load(path, cache=False)) == 500
    assert cache.place(path).read_bytes() == b"x"
    assert before


def test_none_writes_it_for_large_files_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(path)
    assert not cache.place(path).exists()
    monkeypatch.setattr(read, "LARGE_BYTES", 1000)
    load(path)
    assert cache.place(path).exists()


def test_a_changed_file_is_read_anew(path: Path) -> None:
    load(path, cache=True)
    text = path.read_bytes()
    path.write_bytes(text.replace(b"aten::mm", b"aten::MM"))
    os.utime(path, ns=(1, 1))
    assert "aten::MM" in load(path).names
    stat = path.stat()
    load(path, cache=True)
    path.write_bytes(text.replace(b'"process_name"', b'"Process_name"'))  # same size, same time, another beginning
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "aten::mm" in load(path).names


def test_a_moved_file_and_its_copy_know_their_new_name(path: Path, tmp_path: Path) -> None:
    load(path, cache=True)
    moved = tmp_path / "moved.json"
    stat = path.stat()
    path.rename(moved)
    cache.place(path).rename(cache.place(moved))
    os.utime(moved, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    trace = load(moved)
    assert (trace.info.path, trace.info.title) == (str(moved), "moved.json")


@pytest.mark.parametrize("place", [0, 9, 20, 200, -60_000, -10_000, -70])
def test_a_damaged_copy_is_ignored_and_rewritten(path: Path, place: int) -> None:
    whole = load(path, cache=True)
    copy = cache.place(path)
    content = bytearray(copy.read_bytes())
    good = bytes(content)
    if content[place] == 0 and place < 0:  # padding does not count
        place = next(at for at in range(len(content) + place, len(content)) if content[at]) - len(content)
    content[place] ^= 0xFF
    copy.write_bytes(content)
    assert cache.read(path, cache.fingerprint(path)) is None
    assert same(load(path, cache=True), whole)
    assert copy.read_bytes() == good


@pytest.mark.parametrize("content", [b"", b"MRV2TRC\0", b"PK\x03\x04 something else", b"MRV2TRC\0" + b"\xff" * 40])
def test_a_foreign_copy_is_ignored(path: Path, content: bytes) -> None:
    cache.place(path).write_bytes(content)
    assert len(load(path)) == 500


def test_a_cut_copy_is_ignored(path: Path) -> None:
    load(path, cache=True)
    copy = cache.place(path)
    content = copy.read_bytes()
    for length in range(0, len(content) - 200, len(content) // 20):
        copy.write_bytes(content[:length])
        assert cache.read(path, cache.fingerprint(path)) is None


def test_a_copy_of_another_version_is_ignored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(path, cache=True)
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    assert cache.read(path, cache.fingerprint(path)) is None


def test_a_folder_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LARGE_BYTES", 1000)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    assert len(load(path)) == 500
    with pytest.raises(TraceError, match=r"mrv2trace: the columnar copy cannot be written.*cache=None"):
        load(path, cache=True)
    assert [one.name for one in path.parent.iterdir()] == ["trace.json"]


def test_an_interrupt_while_writing_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(path, cache=True)
    assert [one.name for one in path.parent.iterdir()] == ["trace.json"]


def test_a_trace_without_arguments_has_a_copy_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[{"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 1, "dur": 1}]')
    assert same(load(path, cache=True), load(path))
