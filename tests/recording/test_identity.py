"""What is saved is what is loaded: every field of every record, of any recording that can be."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import Diff, Header, MarkRecord, NewRequest, Publish, SpanRecord, StepRecord, TopK
from tests.recording.equal import difference
from tests.recording.made_up import Run, header, step

ROWS = 8
TABLES: dict[str, tuple[tuple[int, ...], str]] = {
    "flat": ((ROWS,), "int64"),
    "wide": ((ROWS, 5), "int32"),
    "float": ((ROWS, 2), "float32"),
    "deep": ((2, ROWS, 3), "uint8"),
    "flags": ((ROWS,), "bool"),
    "big": ((3,), "uint64"),
}
INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**31 - 1)
ROW = st.integers(0, ROWS - 1)
# Surrogates are no UTF-8. Everything else may stand in a request's id, markup and NUL included.
TEXT = st.one_of(
    st.sampled_from(['<img src=x onerror="alert(1)">', "a'b\"c\\", "nul\0l", "é→漢字🙂", ""]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
FLOAT = st.floats(width=64)
WORDS = st.lists(TEXT, max_size=2)


def array(dtype: str, shape: int | tuple[int, ...]) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.dtype(dtype), shape)


def blocks() -> st.SearchStrategy[Any]:
    return st.lists(st.lists(COUNT, max_size=2), max_size=2)


@st.composite
def diffs(draw: st.DrawFn) -> Diff:
    name = draw(st.sampled_from(list(TABLES)))
    shape, dtype = TABLES[name]
    row_len = int(np.prod(shape[1:], dtype=int))
    start = draw(st.integers(0, row_len))
    length = draw(st.integers(0, row_len - start))
    return Diff(name, draw(st.integers(0, shape[0] - 1)), start, draw(array(dtype, length)))


@st.composite
def publishes(draw: st.DrawFn) -> Publish:
    name = draw(st.sampled_from(list(TABLES)))
    shape, dtype = TABLES[name]
    index = draw(st.lists(st.integers(0, int(np.prod(shape)) - 1), max_size=4, unique=True))
    return Publish(name, np.array(index, np.int64), draw(array(dtype, len(index))))


@st.composite
def keyframes(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(list(TABLES)), unique=True, max_size=3))
    return {name: draw(array(TABLES[name][1], TABLES[name][0])) for name in names}


@st.composite
def top_ks(draw: st.DrawFn) -> TopK:
    shape = draw(st.tuples(st.integers(0, 2), st.integers(0, 3)))
    ids = draw(hnp.arrays(np.int32, shape, elements=COUNT))
    return TopK(ids, draw(array("float32", shape)))


NEW = st.builds(NewRequest, TEXT, ROW, COUNT, COUNT, COUNT, blocks(), FLOAT, INT64, st.booleans(), COUNT, st.booleans())
SPAN = st.builds(SpanRecord, TEXT, INT64, INT64, COUNT, INT64, st.booleans())
NAMES = WORDS.map(tuple)
MARK = st.builds(
    MarkRecord,
    TEXT, TEXT, TEXT, NAMES, NAMES, st.none() | TEXT, INT64, INT64, INT64, TEXT, INT64, INT64, st.booleans(),
)  # fmt: skip


@st.composite
def steps(draw: st.DrawFn) -> StepRecord:
    r = draw(st.integers(0, 3))
    tokens = st.lists(st.lists(INT64, max_size=2), min_size=r, max_size=r)
    counts = hnp.arrays(np.int32, r, elements=COUNT)
    return StepRecord(
        step=draw(INT64),
        new=draw(st.lists(NEW, max_size=2)),
        removed=draw(st.lists(st.tuples(TEXT, ROW), max_size=2)),
        finished=draw(WORDS),
        preempted=draw(WORDS),
        unscheduled=draw(WORDS),
        decisions=draw(st.lists(st.tuples(TEXT, TEXT, INT64, INT64), max_size=2)),
        gauges=draw(st.dictionaries(TEXT, FLOAT | COUNT, max_size=2)),
        new_blocks=draw(st.dictionaries(TEXT, blocks(), max_size=2)),
        req_ids=draw(st.lists(TEXT, min_size=r, max_size=r)),
        rows=draw(hnp.arrays(np.int32, r, elements=ROW)),
        num_scheduled=draw(counts),
        has_prefill=draw(st.booleans()),
        diffs=draw(st.lists(diffs(), max_size=3)),
        publishes=draw(st.lists(publishes(), max_size=2)),
        sampled=draw(st.none() | tokens),
        finish_reasons=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
        top_k=draw(st.none() | top_ks()),
        spans=draw(st.lists(SPAN, max_size=3)),
        marks=draw(st.lists(MARK, max_size=3)),
        paused=draw(st.booleans()),
        checksums=draw(st.dictionaries(st.sampled_from(list(TABLES)), st.integers(0, 2**64 - 1), max_size=2)),
        keyframe=draw(st.none() | keyframes()),
        owners=draw(st.dictionaries(TEXT, ROW, max_size=2)),
    )


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    plain = st.none() | st.booleans() | INT64 | TEXT
    changes = {
        "tables": TABLES,
        "mode": draw(st.sampled_from(["record", "step"])),
        "device": draw(TEXT),
        "modelled": draw(st.booleans()),
        "epoch_host_ns": draw(INT64),
        "epoch_unix_ns": draw(INT64),
        "versions": draw(st.dictionaries(TEXT, TEXT, max_size=2)),
        "machine": draw(st.dictionaries(TEXT, plain | st.lists(plain, max_size=2), max_size=2)),
        "call_sites": draw(st.booleans()),
        "top_k": draw(COUNT),
        "check_every": draw(COUNT),
    }
    return Recording(
        header(ROWS, **changes),
        draw(st.lists(steps(), max_size=3)),
        draw(st.dictionaries(INT64, TEXT, max_size=3)),
        clock=draw(
            st.just({})
            | st.fixed_dictionaries({"uncertainty_ns": FLOAT, "drift_ppm": FLOAT, "method": TEXT.filter(bool)})
        ),
        problems=draw(WORDS),
    )


def unlike(one: Recording, other: Recording) -> str | None:
    """Where two recordings differ; the title is the file's name and may."""
    return next(
        (
            found
            for name in ("header", "steps", "texts", "clock", "problems", "complete")
            if (found := difference(getattr(one, name), getattr(other, name), name))
        ),
        None,
    )


@settings(max_examples=60)
@given(recordings())
def test_any_recording_comes_back(recording: Recording) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mrv2rec"
        recording.save(path)
        assert unlike(recording, Recording.load(path)) is None


def test_the_strategies_leave_no_field_out() -> None:
    """A field that is always at its default would be compared with itself."""
    given_names = {"new", "removed", "keyframe", "owners", "checksums", "top_k", "diffs", "publishes", "spans", "marks"}
    assert given_names < {field.name for field in fields(StepRecord)}
    assert len(fields(StepRecord)) == 24, "a new field needs a place in steps() above, and in the file"
    assert len(fields(Header)) == 14, "a new field needs a place in recordings() above, and in layout._SHAPES"


def test_a_long_one_over_several_chunks(tmp_path: Path) -> None:
    run = Run(requests=8, rows=16, max_model_len=1024)
    recording = Recording(run.header, run.steps(40), {5: "<b>", 151_935: "\0"})
    recording.save(tmp_path / "a.mrv2rec")
    assert unlike(recording, Recording.load(tmp_path / "a.mrv2rec")) is None


FIELDS = [field.name for field in fields(StepRecord) if field.name != "step"]


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_lost_is_seen(name: str, tmp_path: Path) -> None:
    """The comparison can fail: a reader that drops any one field does not pass."""
    full = step()
    full.keyframe = {"seeds": np.arange(8)}
    full.owners = {"q": 3}
    recording = Recording(header(), [full])
    recording.save(tmp_path / "a.mrv2rec")
    loaded = Recording.load(tmp_path / "a.mrv2rec")
    assert unlike(recording, loaded) is None
    setattr(loaded.steps[0], name, getattr(StepRecord(0), name))
    assert f"steps[0].{name}" in str(unlike(recording, loaded))


def test_minus_zero_and_nan_of_a_float_table(tmp_path: Path) -> None:
    values = np.array([0.0, -0.0, np.nan, 1e-45, 0, 0, 0, 0], np.float32)
    recording = Recording(header(), [StepRecord(0, keyframe={"temperature": values})])
    recording.save(tmp_path / "a.mrv2rec")
    keyframe = Recording.load(tmp_path / "a.mrv2rec")[0].keyframe
    assert keyframe is not None
    assert keyframe["temperature"].tobytes() == values.tobytes()


def test_tuples_in_the_config_become_lists(tmp_path: Path) -> None:
    """The one thing that JSON changes, and so what a recorder should not rely on."""
    config = header().config | {"extra": {"ids": (1, 2)}}
    Recording(header(config=config)).save(tmp_path / "a.mrv2rec")
    assert Recording.load(tmp_path / "a.mrv2rec").header.config["extra"] == {"ids": [1, 2]}
