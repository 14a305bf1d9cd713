"""The file as it grows: what a reader finds after each chunk, after a kill, and after a mistake of the recorder."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import Diff, Publish, RecordingError, StepRecord, TopK
from mrv2lab.recording.write import SUFFIX, DeviceTimes, RecordingWriter
from tests.recording.made_up import header, step


def steps(count: int, first: int = 0) -> list[StepRecord]:
    return [step(number) for number in range(first, first + count)]


def numbers(recording: Recording) -> list[int]:
    return [record.step for record in recording]


def test_members_and_their_order(tmp_path: Path) -> None:
    assert SUFFIX == ".mrv2rec"
    path = tmp_path / f"a{SUFFIX}"
    with RecordingWriter(path, header()) as writer:
        writer.append(steps(17))
        writer.close(DeviceTimes(np.zeros(34, np.int64), np.zeros(34, np.int64), np.full(34, -1)))
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        assert file.testzip() is None
    chunks = [name.split("/")[1] for name in names if name.startswith("chunks/")]
    assert names[0] == "header.json"
    assert sorted(set(chunks)) == ["00000", "00001"] and chunks == sorted(chunks)
    assert [name for name in names if name.endswith("steps.json")] == [
        "chunks/00000/steps.json",
        "chunks/00001/steps.json",
    ]
    assert names[chunks.count("00000")] == "chunks/00000/steps.json", "last of its chunk"
    ends = ["device/span_end.index.npy", "device/span_end.ns.npy"]
    assert names[-5:] == [*ends, "device/mark_start.index.npy", "device/mark_start.ns.npy", "end.json"]


def test_np_load_reads_the_columns(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "a", header()) as writer:
        writer.append([step()])
    with np.load(tmp_path / "a", allow_pickle=False) as columns:
        assert columns["chunks/00000/batch.row"].tolist() == [7, 6]
        assert columns["chunks/00000/marks.nbytes"].tolist() == [64, 256]
        assert columns["chunks/00000/marks.time_ns"].tolist() == [0, 100], "differences; the first time is in bases"
        assert columns["chunks/00000/sampled.token"].tolist() == [100, 101]
        assert columns["chunks/00000/diffs.values"].tolist() == [11, 12, 13, -(2**63)]


def test_the_same_steps_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        with RecordingWriter(tmp_path / name, header()) as writer:
            writer.append(steps(20))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_growing_file_is_readable_after_every_chunk(tmp_path: Path) -> None:
    path = tmp_path / "a.mrv2rec"
    with RecordingWriter(path, header()) as writer:
        empty = Recording.load(path)
        assert (len(empty), empty.complete) == (0, False)
        assert empty.problems[0].startswith("cut off before its first steps: the file ends at byte ")
        for number in range(40):
            writer.append([step(number)], {number: f"t{number}"})
            found = Recording.load(path)
            whole = (number + 1) // 16 * 16
            assert numbers(found) == list(range(whole))
            assert found.texts == {i: f"t{i}" for i in range(whole)}
            assert not found.complete
        assert found.problems[0].startswith("cut off after step 31: the file ends at byte ")
        assert found.problems[0].endswith("device times are missing (it may still be in writing)")
    done = Recording.load(path)
    assert (numbers(done), done.complete, done.problems) == (list(range(40)), True, [])


def test_a_chunk_reaches_the_file_in_one_write(tmp_path: Path) -> None:
    """``ZipFile`` by itself would write and rewrite each member's header, and a reader would meet empty members."""
    path, seen = tmp_path / "a", []
    writer = RecordingWriter(path, header())
    raw = writer._file._file

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def write(self, data: bytes) -> int:
            written = raw.write(data)
            raw.flush()
            seen.append(len(Recording.load(path)))
            return written

    writer._file._file = Watched()  # type: ignore[assignment]
    writer.append(steps(33))
    writer.close()
    assert seen == [16, 32, 33, 33], "two whole chunks, the rest, and the end of the file"


def test_flush_writes_a_short_chunk(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "a", header()) as writer:
        writer.append(steps(3))
        writer.flush()
        assert numbers(Recording.load(tmp_path / "a")) == [0, 1, 2]
        writer.flush()
        writer.append(steps(2, 3))
    assert numbers(Recording.load(tmp_path / "a")) == [0, 1, 2, 3, 4]


def test_device_times_come_last_and_in_order(tmp_path: Path) -> None:
    times = DeviceTimes(
        np.array([10, -1, 30, -1], np.int64),
        np.array([-1, 5, 2**62, -1], np.int64),
        np.array([1, -1, -7, 0], np.int64),
        uncertainty_ns=850,
        drift_ppm=-1.5,
        method="fit of 2 anchors",
    )
    with RecordingWriter(tmp_path / "a", header(), chunk_steps=1) as writer:
        writer.append(steps(2))
        assert {span.device_end_ns for s in Recording.load(tmp_path / "a") for span in s.spans} == {-1}
        writer.close(times)
    loaded = Recording.load(tmp_path / "a")
    assert [span.device_end_ns for s in loaded for span in s.spans] == [10, -1, 30, -1]
    assert [mark.device_start_ns for s in loaded for mark in s.marks] == [-1, 5, 2**62, -1]
    assert [mark.device_end_ns for s in loaded for mark in s.marks] == [1, -1, -7, 0]
    assert loaded.clock == {"uncertainty_ns": 850, "drift_ppm": -1.5, "method": "fit of 2 anchors"}


def test_too_few_device_times_are_refused_and_the_steps_stay(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "a", header())
    writer.append(steps(2))
    with pytest.raises(RecordingError, match=r"3 device times \(span_end\) for 4 recorded entries"):
        writer.close(DeviceTimes(np.zeros(3, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)))
    assert writer.closed
    assert len(Recording.load(tmp_path / "a")) == 2


def test_a_with_that_is_broken_off_keeps_the_steps_and_says_so(tmp_path: Path) -> None:
    def interrupted() -> None:
        with RecordingWriter(tmp_path / "a", header()) as writer:
            writer.append(steps(5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    loaded = Recording.load(tmp_path / "a")
    assert (len(loaded), loaded.complete) == (5, False)
    assert loaded.problems == ["recording was broken off by a KeyboardInterrupt"]


def test_closed_is_closed(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "a", header())
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="a is closed"):
        writer.append(steps(1))
    with pytest.raises(ValueError, match="chunk_steps must be at least 1, got 0"):
        RecordingWriter(tmp_path / "b", header(), chunk_steps=0)


INT = np.array([1], np.int64)
BAD_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "row": ({"rows": np.array([8, 1], np.int32)}, "names row 8, but the header has R = 8"),
    "batch": ({"rows": np.array([1], np.int32)}, "has 2 requests in its batch, but 1 entries in rows"),
    "sampled": ({"sampled": [[1]]}, "but 1 entries in sampled"),
    "table": ({"diffs": [Diff("nobody", 0, 0, INT)]}, "table 'nobody' is not among the header's tables"),
    "dtype": ({"diffs": [Diff("total_len", 0, 0, INT)]}, "holds int32, but was given values of int64"),
    "diff": ({"diffs": [Diff("seeds", 0, 1, INT)]}, "past the end of its row"),
    "diff row": ({"diffs": [Diff("seeds", 8, 0, INT)]}, "outside its table"),
    "publish": ({"publishes": [Publish("seeds", INT * 8, INT)]}, "index lies outside its table"),
    "publish length": ({"publishes": [Publish("seeds", INT, INT[:0])]}, "different number of indices and values"),
    "keyframe": ({"keyframe": {"seeds": INT}}, r"has shape \(1,\), the header says \(8,\)"),
    "checksum": ({"checksums": {"nobody": 1}}, "table 'nobody'"),
    "top_k": ({"top_k": TopK(np.zeros((1, 2), np.int32), np.zeros((1, 1), np.float32))}, "different shapes"),
    "surrogate": ({"finished": ["\ud800"]}, "cannot be written as JSON"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_no_reader_would_take_is_refused(name: str, tmp_path: Path) -> None:
    changes, sentence = BAD_STEPS[name]
    bad = step(16)
    for attribute, value in changes.items():
        setattr(bad, attribute, value)
    with RecordingWriter(tmp_path / "a", header()) as writer:
        writer.append(steps(16))
        writer.append([bad])
        with pytest.raises(RecordingError, match=sentence):
            writer.flush()
        with pytest.raises(RecordingError, match=sentence):
            writer.append(steps(1))
    loaded = Recording.load(tmp_path / "a")
    assert numbers(loaded) == list(range(16)), "what came before is kept"
    assert loaded.problems[0].startswith("recording stopped: ")


def test_an_interrupt_within_a_chunk_costs_that_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*args: Any) -> None:
        raise KeyboardInterrupt

    writer = RecordingWriter(tmp_path / "a", header())
    writer.append(steps(16))
    written = writer._member
    monkeypatch.setattr(writer, "_member", lambda name, data: pressed() if "spans" in name else written(name, data))
    with pytest.raises(KeyboardInterrupt):
        writer.append(steps(16, 16))
    writer.close()
    found = Recording.load(tmp_path / "a")
    assert numbers(found) == list(range(16))
    assert found.problems[0].startswith("cut off after step 15: the file's directory is there, but not its end.json;")


def test_large_tables_can_be_written_and_are_asked_for(tmp_path: Path) -> None:
    Recording(header(tables={"t": ((1 << 20, 256), "int64")})).save(tmp_path / "a")
    with pytest.raises(
        RecordingError, match="take 2,147,483,648 bytes, the limit is 536,870,912; pass a greater max_by"
    ):
        Recording.load(tmp_path / "a")
    assert len(Recording.load(tmp_path / "a", max_bytes=3 << 30)) == 0


def test_a_full_disk_is_said_once_and_leaves_what_was_written(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "a", header())
    writer.append(steps(16))
    raw = writer._file._file

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    writer._file._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        writer.append(steps(16, 16))
    with pytest.raises(RecordingError, match="No space left"):
        writer.append(steps(1, 32))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert raw.closed
    assert numbers(Recording.load(tmp_path / "a")) == list(range(16))
