"""Row JP7 and what recording costs its host: size of 200 steps at 64 requests, time to encode them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mrv2lab.recording.encode import ChunkEncoder
from mrv2lab.recording.layout import Layout
from mrv2lab.recording.npy import to_npy
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.write import RecordingWriter
from tests.recording.made_up import Run


@pytest.fixture(scope="module")
def recording() -> Recording:
    """R = 1,024, V = 151,936, 64 requests with prompts of 512, 28 layers: 110 marks and 13 spans a step."""
    run = Run()
    texts = {token: f" token{token}" for token in range(0, 151_936, 4)}
    return Recording(run.header, run.steps(200), texts)


def test_200_steps_at_64_requests_are_small(recording: Recording, tmp_path: Path) -> None:
    assert {len(record.marks) for record in recording} == {110}
    assert {len(record.spans) for record in recording} == {13}
    assert all(mark.device_end_ns > 0 for record in recording for mark in record.marks)
    recording.save(tmp_path / "with texts")
    recording.texts = {}
    recording.save(tmp_path / "without")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    # Measured: 0.43 MB, and 0.18 MB more with the texts of 37,984 tokens. Random tokens and times do not shrink.
    assert 300_000 < sizes["without"] < 600_000
    assert sizes["with texts"] < 1_000_000


def test_a_keyframe_of_large_tables_costs_little(tmp_path: Path) -> None:
    run = Run(requests=4)
    tables = {name: np.zeros(shape, dtype) for name, (shape, dtype) in run.header.tables.items()}
    assert sum(table.nbytes for table in tables.values()) > 16 << 20
    tables["all_token_ids"][1000:1010, :512] = 7
    first, second = run.steps(2)
    first.keyframe, second.keyframe = None, None
    for name, keyframe in (("without", None), ("with", tables)):
        first.keyframe = keyframe
        Recording(run.header, [first, second]).save(tmp_path / name)
    assert (tmp_path / "with").stat().st_size - (tmp_path / "without").stat().st_size < 2_000


def test_columns_are_as_narrow_as_their_values(recording: Recording) -> None:
    """What a chunk of 1,760 marks takes before deflate: 8 bytes a number would be four times as much."""
    chunk = ChunkEncoder(Layout(recording.header)).encode(recording.steps[16:32], [])
    sizes = {name: column.dtype.itemsize for name, column in chunk.columns.items() if name.startswith("marks.")}
    assert sizes == {"marks.descriptor": 1, "marks.nbytes": 4, "marks.wait_ns": 4, "marks.time_ns": 4}
    assert sum(len(to_npy(column)) for column in chunk.columns.values()) < 50_000


@pytest.mark.slow
def test_time_to_write_a_chunk(recording: Recording, tmp_path: Path) -> None:
    """16 steps; the recorder's thread holds the interpreter's lock for most of it. Measured: 2 ms on one core."""
    took = []
    with RecordingWriter(tmp_path / "a", recording.header) as writer:
        for first in range(0, 192, 16):
            start = time.thread_time()
            writer.append(recording.steps[first : first + 16])
            took.append(time.thread_time() - start)
    assert np.median(took) < 0.010
