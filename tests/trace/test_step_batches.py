"""Where a step's batch is taken from, and what is said of it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import orjson
import pandas as pd
import pytest

from mrv2lab.recorder.run import write_sidecar
from mrv2lab.trace import sidecar as sidecar_module
from mrv2lab.trace.annotations import Batch, batch_range
from mrv2lab.trace.compare import compare
from mrv2lab.trace.read import load
from mrv2lab.trace.steps import steps
from mrv2lab.trace.trace import Trace
from mrv2lab.trace.write import write_perfetto
from tests.trace.small_trace import SmallTrace

TRACES = Path(__file__).parents[2] / "traces"
COLUMNS = [
    "kind",
    "context_requests",
    "context_tokens",
    "generation_requests",
    "generation_tokens",
    "requests",
    "tokens",
]
FACTS: dict[str, Any] = {
    "config": {"spec": {"num_speculative_tokens": 0}},
    "steps": [4, 5, -1, 6],
    "requests": [2, 1, 0, 3],
    "tokens": [2, 7, 0, 9],
}
GUESSED = "one token a request is taken for decode"
LISTS = "it is taken from the lists that the capture keeps of itself"


def trace_of(
    facts: Any = None, *, ranges: tuple[tuple[int, int, Batch], ...] = (), numbers: tuple[int, ...] = (4, 5, 6)
) -> Trace:
    """Steps of 100 ns; ``ranges``: (start, step, batch)."""
    small = SmallTrace()
    for row, number in enumerate(numbers):
        small.step(100 * row, 100 * row + 90, f"mrv2lab.step#{number}")
    for start, number, batch in ranges:
        small.host(start, start + 50, batch_range(number, batch), "annotation")
    trace = small.build()
    extra = {"mrv2lab": facts} if facts is not None else {}
    return dataclasses.replace(trace, info=dataclasses.replace(trace.info, extra=extra))


def found(trace: Trace) -> tuple[list[list[Any]], list[str]]:
    frame = steps(trace)
    said = [one for one in frame.attrs["cannot_say"] if LISTS in one or GUESSED in one]
    return frame[COLUMNS].astype(object).where(frame[COLUMNS].notna(), None).to_numpy().tolist(), said


NOTHING = ["unknown", None, None, None, None, None, None]


def test_the_range_within_the_step_goes_before_everything() -> None:
    rows, said = found(
        trace_of(FACTS, ranges=((10, 4, Batch(1, 8, 2, 2)), (110, 5, Batch(0, 0, 3, 3)), (205, 6, Batch(1, 1, 0, 0))))
    )
    assert rows == [
        ["mixed", 1, 8, 2, 2, 3, 10],
        ["decode", 0, 0, 3, 3, 3, 3],
        ["prefill", 1, 1, 0, 0, 1, 1],
    ]
    assert not said


def test_a_range_outside_of_its_step_is_another_ones() -> None:
    """The engine was reset, and numbers came again."""
    batches = (10, 4, Batch(1, 8, 0, 0)), (110, 4, Batch(0, 0, 1, 1))
    rows, _ = found(trace_of(numbers=(4, 4, 4), ranges=batches))
    assert [row[0] for row in rows] == ["prefill", "decode", "unknown"]


def test_the_captures_totals_and_what_they_do_not_say() -> None:
    rows, said = found(trace_of(FACTS))
    assert rows == [
        ["decode", 0, 0, 2, 2, 2, 2],
        ["prefill", 1, 7, 0, 0, 1, 7],
        ["unknown", None, None, None, None, 3, 9],
    ]
    assert said[0].startswith("the ranges of 3 steps do not say their batch") and said[1].startswith("of 1 of them")


def test_with_drafts_the_totals_are_no_kind() -> None:
    rows, said = found(trace_of(FACTS | {"config": {"spec": {"num_speculative_tokens": 2}}}))
    assert [row[0] for row in rows] == ["unknown"] * 3 and rows[0][5:] == [2, 2]
    assert len(said) == 1


def test_the_captures_batches_go_before_its_totals() -> None:
    parts = {"context_requests": [1, 0, 0, 1], "context_tokens": [1, 0, 0, 7]}
    parts |= {"generation_requests": [1, 1, 0, 2], "generation_tokens": [1, 7, 0, 2]}
    rows, said = found(trace_of(FACTS | parts))
    assert [row[0] for row in rows] == ["mixed", "decode", "mixed"]
    assert len(said) == 1 and LISTS in said[0]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        [],
        "text",
        {"steps": 4},
        {"steps": [[4], {}, None, "4"], "requests": [1] * 4, "tokens": [1] * 4},
        FACTS | {"requests": [2]},
        FACTS | {"tokens": ["2", -1, 0, 1 << 70]},
        FACTS | {"steps": [4, 4, 5, 5]},
        FACTS | {"requests": [True, False, None, 1.5]},
    ],
    ids=str,
)
def test_facts_that_are_none(facts: Any) -> None:
    assert found(trace_of(facts)) == ([NOTHING] * 3, [])


# -- the sidecar


def kept(folder: Path, facts: Any) -> Path:
    """A file without the capture's facts, and a sidecar with them."""
    path = folder / "run.json"
    write_perfetto(trace_of(), path)
    write_sidecar(path, trace_of(facts))
    return path


def kinds(trace: Trace) -> list[str]:
    return list(steps(trace)["kind"])


def test_the_sidecar_says_what_the_file_does_not(tmp_path: Path) -> None:
    path = kept(tmp_path, FACTS)
    assert kinds(load(path, progress=False)) == ["decode", "prefill", "unknown"]
    moved = path.rename(tmp_path / "alone.json")
    assert kinds(load(moved, progress=False)) == ["unknown"] * 3


def check_other_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")
    trace = load(path, progress=False)
    assert kinds(trace) == ["unknown"] * 3
    assert "run.json.meta.json is about another version of this file" in str(trace.problems[-1])


def test_a_sidecar_of_other_bytes_is_not_believed(tmp_path: Path) -> None:
    check_other_bytes(kept(tmp_path, FACTS))


def test_mutant_a_sidecar_that_is_believed_unseen_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept(tmp_path, FACTS)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(sidecar_module, "_sha256", lambda path: before)
    with pytest.raises(AssertionError):
        check_other_bytes(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"sha256": 5, "settings": {}}', b'{"settings": {"steps": [4]}}'])
def test_a_file_of_that_name_that_is_no_sidecar(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "run.json"
    write_perfetto(trace_of(), path)
    path.with_name("run.json.meta.json").write_bytes(text)
    trace = load(path, progress=False)
    assert kinds(trace) == ["unknown"] * 3 and trace.problems == ()


def test_the_files_own_word_goes_before_the_sidecars(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_perfetto(trace_of(FACTS), path)
    path.with_name("run.json.meta.json").write_bytes(orjson.dumps({"sha256": "0", "settings": {"steps": []}}))
    trace = load(path, progress=False)
    assert kinds(trace) == ["decode", "prefill", "unknown"] and trace.problems == ()


# -- what ships


@pytest.mark.parametrize("kind", ["", "_graphs"])
def test_the_shipped_captures_are_of_one_workload(kind: str) -> None:
    a, b = (
        load(TRACES / f"h200_{name}{kind}.json.gz", cache=False, progress=False)
        for name in ("v1_barrier", "mrv2_uva_pool")
    )
    both = compare(a, b)
    assert both.workload == "The workloads agree in requests and tokens of all 8 common steps (8 decode)."
    assert set(both.steps["workload"]) == {"same"} and set(both.steps["kind"]) == {"decode"}
    assert not any("cannot be told" in reason for reason in both.reasons)
    assert isinstance(steps(a)["requests"].dtype, pd.Int64Dtype) and set(steps(a)["requests"]) == {64}


def test_a_sidecar_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    path = kept(tmp_path, FACTS)
    sidecar = tmp_path / "run.json.meta.json"
    sidecar.unlink()
    os.mkfifo(sidecar)  # nobody writes to it, so that a reader would never be back
    assert kinds(load(path, progress=False)) == ["unknown"] * 3
