"""Files that are foreign, from the future, or made to do harm: one sentence, and nothing but RecordingError."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mrv2lab.recording import decode, layout, members
from mrv2lab.recording.npy import to_npy
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import StepRecord
from tests.recording.made_up import header
from tests.recording.tampered import CHUNK, edited, rebuilt, refused

# -- not a recording ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"P", "the file ends at byte 1 without an end, before its header"),
        (b"PK\x03\x04", "the file ends at byte 4 without an end, before its header"),
        (b"hello, world" * 10, "is no zip file, and so no recording"),
        (b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c", "is no zip file, and so no recording"),
        (b"PK\x05\x06" + bytes(18), "is a zip file without a header.json"),
    ],
)
def test_other_files(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert refused(path) == sentence


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        Recording.load(tmp_path)


def test_a_foreign_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as file:
        file.writestr("word/document.xml", "<xml/>")
    assert refused(tmp_path / "a.docx") == "holds 'word/document.xml', which is no part of a recording"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "something-else"}, "header.json does not say that this is a mrv2lab-recording"),
        ({"version": 7}, "was written by a newer mrv2lab (schema 7, this one reads up to 1): upgrade mrv2lab"),
        ({"version": 0}, "version is 0, expected an integer in 1..9223372036854775807"),
        ({"version": "1"}, "version is '1', expected an integer in 1..9223372036854775807"),
        ({"header": None}, "header is None, expected an object"),
    ],
)
def test_foreign_and_future_headers(change: dict[str, Any], sentence: str, good: Path, tmp_path: Path) -> None:
    content = edited(good, "header.json", lambda value: value | change)
    assert refused(rebuilt(good, tmp_path / "a", {"header.json": content})) == sentence


def test_a_future_header_may_have_any_fields(good: Path, tmp_path: Path) -> None:
    content = orjson.dumps({"format": "mrv2lab-recording", "version": 2, "new": "things"})
    assert "upgrade" in refused(rebuilt(good, tmp_path / "a", {"header.json": content}))


# -- a zip that no writer of ours makes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../../evil",
        "/etc/passwd",
        "chunks/../header.json",
        "chunks/00000/x",
        "chunks/00000/a.b.npy/c",
        "chunks/00000/../../a.b.npy",
        "CHUNKS/00000/steps.json",
        "header.json/",
        "C:\\x",
        "a\0b",
        "é",
        "x" * 5000,
    ],
)
def test_names_that_no_recording_has(name: str, good: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.parent.rglob("*"))
    path = rebuilt(good, tmp_path / "a", {name: b"x"})
    assert refused(path).endswith("which is no part of a recording")
    assert sorted(set(tmp_path.parent.rglob("*")) - set(before)) == [path], "nothing is ever written"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice(good: Path, tmp_path: Path) -> None:
    path = rebuilt(good, tmp_path / "a", {})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("header.json", "{}")
    assert refused(path) == "holds 'header.json' twice"


def test_an_encrypted_member(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    content[6] |= 1
    (tmp_path / "a").write_bytes(content)
    assert refused(tmp_path / "a") == "holds 'header.json' encrypted; recordings are not"


def test_another_compression(good: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_BZIP2) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert refused(tmp_path / "a").endswith("pack it anew with plain deflate")


def test_a_symlink_in_the_zip_is_only_its_text(good: Path, tmp_path: Path) -> None:
    info = zipfile.ZipInfo("header.json")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a", "w") as file:
        file.writestr(info, "/etc/hostname")
    assert refused(tmp_path / "a").startswith("header.json is no JSON: ")


def test_a_symlink_to_a_recording_is_a_recording(good: Path, tmp_path: Path) -> None:
    os.symlink(good, tmp_path / "link.mrv2rec")
    assert len(Recording.load(tmp_path / "link.mrv2rec")) == 6


def test_packed_anew_by_another_tool_it_is_still_a_recording(good: Path, tmp_path: Path) -> None:
    """Other order, stored instead of deflated: what an unpack and a zip leave."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_STORED) as new:
        for name in sorted(old.namelist()):
            new.writestr(name, old.read(name))
    found = Recording.load(tmp_path / "a")
    assert (len(found), found.complete) == (6, True)


# -- bombs -------------------------------------------------------------------------------------------------------------


def peak(path: Path, **options: Any) -> tuple[str, int]:
    """The refusal and the most bytes that were held on the way to it."""
    tracemalloc.start()
    try:
        return refused(path, **options), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_that_says_so(good: Path, tmp_path: Path) -> None:
    path = rebuilt(good, tmp_path / "a", {f"{CHUNK}marks.nbytes.npy": bytes(64 << 20)})
    sentence, held = peak(path, max_bytes=16 << 20)
    assert sentence == (
        "chunks/00000/marks.nbytes.npy would take this recording over 16,777,216 bytes of memory; "
        "pass a greater max_bytes if you trust the file"
    )
    assert held < 4 << 20


def test_a_bomb_that_lies_is_unpacked_no_further_than_its_word(tmp_path: Path) -> None:
    name, packed = b"header.json", zlib.compress(bytes(64 << 20), wbits=-15)
    fixed = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 0, 8, 0, 33, 0, len(packed), 64 << 10, len(name), 0)
    (tmp_path / "a").write_bytes(fixed + name + packed)
    sentence, held = peak(tmp_path / "a")
    assert sentence == "'header.json' is damaged, before its header"
    assert held < 4 << 20


def test_a_bomb_of_records(good: Path, tmp_path: Path) -> None:
    """4 million marks are 16 MB unpacked, and would be a gigabyte of records."""
    n = 4_000_000
    content = edited(good, f"{CHUNK}steps.json", lambda v: v["counts"].update(marks=[n, 0]))
    zeros = to_npy(np.zeros(n, np.uint8))
    columns = {f"{CHUNK}marks.{name}.npy": zeros for name in ("descriptor", "nbytes", "wait_ns", "time_ns")}
    path = rebuilt(good, tmp_path / "a", {f"{CHUNK}steps.json": content} | columns)
    sentence, held = peak(path)
    assert sentence.startswith("chunks/00000/: its steps would take this recording over 536,870,912 bytes")
    assert held < 64 << 20


def test_a_bomb_of_json(good: Path, tmp_path: Path) -> None:
    content = b"[" + b"[]," * (1 << 20) + b"[]]"
    sentence, held = peak(rebuilt(good, tmp_path / "a", {"header.json": content}), max_bytes=64 << 20)
    assert sentence.startswith("header.json would take this recording over 67,108,864 bytes")
    assert held < 16 << 20


def test_a_bomb_of_keyframes(good: Path, tmp_path: Path) -> None:
    """Ten bytes in a column ask for a table of a hundred megabytes, as often as they like."""
    tables = header().tables | {"all_token_ids": ((1024, 25_600), "int32")}
    steps = [
        StepRecord(i, keyframe={"all_token_ids": np.zeros(tables["all_token_ids"][0], np.int32)}) for i in range(6)
    ]
    Recording(header(tables=tables), steps).save(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 4096
    assert "a keyframe of table 'all_token_ids' would take this recording over" in refused(tmp_path / "a")
    assert len(Recording.load(tmp_path / "a", max_bytes=1 << 30)) == 6


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"tables": {"t": ((2**31 - 1, 2**31 - 1), "int64")}},
            "the header's tables take 36,893,488,113,059,364,872 bytes",
        ),
        ({"tables": {f"t{i}": ((1,), "int32") for i in range(257)}}, "the header names 257 tables, 256 are allowed"),
        ({"tables": {"t": ((1,), "object")}}, "table 't' has the unknown dtype 'object'"),
        ({"tables": {"t": ((1,), "int32, int32")}}, "table 't' has the unknown dtype 'int32, int32'"),
        ({"tables": {"t": ((), "int32")}}, "table 't' has 0 dimensions, expected 1 to 3"),
        ({"tables": {"t": ((-1,), "int32")}}, "header.tables.'t'[0][0] is -1, expected an integer in 0..2147483647"),
        ({"config": {}}, "header.config.scheduler.max_num_reqs is None, expected an integer in 1..65536"),
        ({"config": {"scheduler": {"max_num_reqs": 10**9}}}, "header.config.scheduler.max_num_reqs is 1000000000, exp"),
        ({"mode": 3}, "header.mode is 3, expected str"),
    ],
)
def test_absurd_headers(change: dict[str, Any], sentence: str, good: Path, tmp_path: Path) -> None:
    content = edited(good, "header.json", lambda value: value["header"].update(change))
    assert refused(rebuilt(good, tmp_path / "a", {"header.json": content})).startswith(sentence)


def test_without_budgets_the_bombs_go_off(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.Budget, "take", lambda *args: None)
    monkeypatch.setattr(members, "_inflate", lambda data, size: zlib.decompress(data, -15))
    monkeypatch.setattr(decode, "_RECORD_BYTES", 0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_bomb_that_says_so(good, tmp_path)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_bomb_that_lies_is_unpacked_no_further_than_its_word(tmp_path)
