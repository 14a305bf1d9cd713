"""Well-formed members whose content refers to nothing: each check of ``decode`` and ``read`` and its sentence."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.recording import layout
from mrv2lab.recording.npy import to_npy
from mrv2lab.recording.recording import Recording
from tests.recording.tampered import CHUNK, attempt, edited, rebuilt, refused


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        ("batch.row", [8, 0, 0, 0], "the batch names row 8, but the header has R = 8"),
        ("batch.row", [-1, 0, 0, 0], "the batch names row -1, but the header has R = 8"),
        ("batch.row", [1, 2, 3], "batch.row holds 3 values, expected 4"),
        ("batch.request", [0, 0, 0, 2], "batch.request holds a value outside 0..1"),
        ("batch.num_scheduled", [1, 1, 1, -1], "batch.num_scheduled holds a value outside 0..2147483647"),
        ("diffs.table", [0, 0, 0, 7], "diffs.table holds a value outside 0..6"),
        ("diffs.row", [8, 0, 0, 0], "a diff writes to a row outside its table"),
        ("diffs.start", [2**63 - 1, 0, 0, 0], "a diff writes past the end of its row"),
        ("diffs.start", [-1, 0, 0, 0], "a diff writes past the end of its row"),
        ("diffs.length", [33, 0, 0, 0], "a diff writes past the end of its row"),
        ("diffs.length", [-3, 5, 3, 1], "diffs.length holds a value outside 0..2147483647"),
        ("diffs.length", [1, 1, 1, 1], "diffs.values holds 8 values, expected 4"),
        ("diffs.values", [2**40] * 8, "a value of table 'all_token_ids' does not fit into int32"),
        ("publishes.index", [8, 0], "a published index lies outside its table"),
        ("publishes.index", [-8, 0], "a published index lies outside its table"),
        ("publishes.values", [2**40, 0], "a value of table 'temperature' does not fit into float32"),
        ("keyframe.table", [7], "keyframe.table holds a value outside 0..6"),
        ("keyframe.index", [-9] * 7, "a published index lies outside its table"),
        ("sampled.length", [1, 1, 1, 2**31 - 1], "would take this recording over 536,870,912 bytes"),
        ("sampled.length", [1, 1, 1, 0], "sampled.token holds 4 values, expected 3"),
        ("top_k.width", [2, 3], "top_k.token holds 8 values, expected 10"),
        ("spans.descriptor", [0, 1, 0, 2], "spans.descriptor holds a value outside 0..1"),
        ("marks.descriptor", [0, 1, 0, 2], "marks.descriptor holds a value outside 0..1"),
        ("marks.wait_ns", [], "marks.wait_ns holds 0 values, expected 4"),
        ("marks.surprise", [1], "unknown column 'marks.surprise'"),
    ],
)
def test_columns(column: str, values: list[int], sentence: str, good: Path, tmp_path: Path) -> None:
    content = to_npy(np.array(values, np.int64))
    found = refused(rebuilt(good, tmp_path / "a", {f"{CHUNK}{column}.npy": content}))
    assert found.startswith(CHUNK) and sentence in found


def test_a_column_of_another_kind(good: Path, tmp_path: Path) -> None:
    floats, ints = to_npy(np.zeros(4, np.float32)), to_npy(np.zeros(8, np.int32))
    for name, content in {"marks.nbytes": floats, "top_k.logit": ints}.items():
        assert f"{name} holds" in refused(rebuilt(good, tmp_path / "a", {f"{CHUNK}{name}.npy": content}))


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda v: v["counts"].update(batch=[-1, 2]), "counts.batch[0] is -1, expected an integer in 0..2147483647"),
        (lambda v: v["counts"].update(batch=[2]), "counts.batch has 1 entries for 2 steps"),
        (lambda v: v["counts"].update(batch=[3, 2]), "batch.request holds 4 values, expected 5"),
        (lambda v: v["counts"].update(sampled=[1, 3]), "step 0 samples 1 rows of a batch of 2"),
        (lambda v: v["steps"][0].update(step="0"), "steps[0].step is '0', expected an integer"),
        (lambda v: v["steps"][0].pop("owners"), "steps[0] has the keys"),
        (lambda v: v["steps"][0].update(owners={"a": 8}), "steps[0].owners.'a' is 8, expected an integer in 0..7"),
        (lambda v: v["steps"][0].update(checksums={"x": 1}), "table 'x' is not among the header's tables"),
        (lambda v: v["steps"][1]["new"][0].update(row=-1), "steps[1].new[0].row is -1, expected an integer in 0..7"),
        (lambda v: v["marks"][0].pop(), "marks[0] has 7 entries, expected 8"),
        (lambda v: v["bases"].update({"marks.time_ns": 2**63}), "bases.'marks.time_ns' is 9223372036854775808"),
        (lambda v: v["texts"].append([1]), "texts[1] has 1 entries, expected 2"),
    ],
)
def test_json_of_another_shape(edit: Callable[[Any], Any], sentence: str, good: Path, tmp_path: Path) -> None:
    name = f"{CHUNK}steps.json"

    def in_place(value: Any) -> None:
        edit(value)

    assert sentence in refused(rebuilt(good, tmp_path / "a", {name: edited(good, name, in_place)}))


@pytest.mark.parametrize("name", [f"{CHUNK}steps.json", "header.json", "end.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"NaN", b"[" * 100_000])
def test_json_that_is_none(name: str, content: bytes, good: Path, tmp_path: Path) -> None:
    refused(rebuilt(good, tmp_path / "a", {name: content}))


def test_an_end_that_belongs_to_another_file(good: Path, tmp_path: Path) -> None:
    end = edited(good, "end.json", lambda value: value["counts"].update(marks=99))
    assert refused(rebuilt(good, tmp_path / "a", {"end.json": end})).startswith("end.json speaks of {'chunks': 3, ")
    index, times = to_npy(np.array([12], np.int64)), to_npy(np.array([1], np.int64))
    device = {"device/mark_end.index.npy": index, "device/mark_end.ns.npy": times}
    assert (
        refused(rebuilt(good, tmp_path / "b", device))
        == "device/mark_end does not fit the 12 records that it belongs to"
    )
    assert refused(rebuilt(good, tmp_path / "c", {"device/x.y.npy": times})) == "unknown column device/x.y"
    lost = rebuilt(good, tmp_path / "d", {"chunks/00001/steps.json": None})
    assert "which belongs to no whole chunk" in refused(lost)


def test_markup_is_data(good: Path) -> None:
    assert Recording.load(good).texts == {100: "<b>one</b>"}


def test_random_columns(good: Path, tmp_path: Path) -> None:
    """Damage behind a right CRC, which the checks of ``decode`` must meet alone."""
    rng = np.random.default_rng(4)
    with zipfile.ZipFile(good) as file:
        columns = [name for name in file.namelist() if name.endswith(".npy")]
        sizes = {name: np.load(file.open(name)).size for name in columns}
    kept = 0
    for name in columns * 3:
        values = rng.choice(np.array([-(2**63), -1, 0, 1, 2, 7, 8, 300, 2**31, 2**63 - 1]), sizes[name])
        path = rebuilt(good, tmp_path / "a", {name: to_npy(values)})
        kept += attempt(path, path.read_bytes()) is not None
    assert 0 < kept < 3 * len(columns)


# -- the checks can fail


@pytest.mark.parametrize(
    ("target", "name", "test"),
    [
        (layout.Layout, "check_diffs", ("diffs.start", [2**63 - 1, 0, 0, 0], "past the end")),
        (layout.Layout, "check_batch", ("batch.row", [8, 0, 0, 0], "names row 8")),
        (layout.Layout, "check_flat", ("publishes.index", [8, 0], "a published index")),
    ],
)
def test_without_a_check_a_bad_column_passes_or_crashes(
    target: Any,
    name: str,
    test: tuple[str, list[int], str],
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target, name, lambda *args: None)
    with pytest.raises(pytest.fail.Exception):
        test_columns(*test, good, tmp_path)
