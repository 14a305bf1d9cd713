"""Reading by columns gives what reading event by event gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mrv2lab.trace.kineto import KinetoEvents
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import COLUMNS, Trace
from tests.trace.shared_files import shared_file
from tests.trace.synthetic import synthetic_kineto


def one_by_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    with monkeypatch.context() as patch:
        patch.setattr(KinetoEvents, "_plain", lambda self, events: None)
        return load(path, cache=False)


def assert_equal(a: Trace, b: Trace) -> None:
    assert (a.info, a.problems) == (b.info, b.problems)
    names = [np.array(one.names, object)[one.name].tolist() for one in (a, b)]
    lanes = [[str(one.lanes[lane]) for lane in one.lane] for one in (a, b)]
    assert names[0] == names[1]
    assert lanes[0] == lanes[1]
    for column in set(COLUMNS) - {"name", "lane", "arg"}:
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column), column)
    assert [a.args(i) for i in range(len(a))] == [b.args(i) for i in range(len(b))]


def test_a_synthetic_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(synthetic_kineto(3000, seed=1))
    assert_equal(load(path, cache=False), one_by_one(path, monkeypatch))


@pytest.mark.parametrize("name", ["01", "02", "03", "04", "06", "09a"])
def test_real_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared_file(name)
    assert_equal(load(path, cache=False), one_by_one(path, monkeypatch))


PLAIN: dict[str, Any] = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 1}
ODD: list[Any] = [
    {**PLAIN, "ts": 2, "args": {"device": 0, "stream": 9, "correlation": "12"}},
    {**PLAIN, "cat": "gpu_memcpy", "ts": 3, "args": {"bytes": 64, "correlation": 13, "stream": 7}},
    {**PLAIN, "cat": "user_annotation", "name": "mrv2lab.phase.forward", "ts": 4, "args": {}},
    {**PLAIN, "ph": "i", "ts": 1.5, "name": "same moment"},
    {**PLAIN, "ph": "B", "cat": "cpu_op", "ts": 5},
    {**PLAIN, "ph": "E", "cat": "cpu_op", "ts": 6},
    {key: value for key, value in PLAIN.items() if key != "cat"},
    {**PLAIN, "name": None},
    {**PLAIN, "args": [1, 2]},
    {**PLAIN, "pid": [1]},
    {**PLAIN, "dur": None},
    {**PLAIN, "ts": None},
    "no event",
    {**PLAIN, "args": {"correlation": 1.0}},
]


@pytest.mark.parametrize("place", range(len(ODD)))
def test_whatever_is_odd_among_plain_events(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(orjson.dumps({"traceEvents": [PLAIN, ODD[place], {**PLAIN, "ts": 1.5, "name": "behind"}]}))
    assert_equal(load(path, cache=False), one_by_one(path, monkeypatch))


def test_events_of_one_moment_stay_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    moment = {**PLAIN, "ph": "i", "dur": 0, "name": "moment"}
    still = {**PLAIN, "dur": 0}
    path.write_bytes(orjson.dumps({"traceEvents": [still, moment, {**still, "name": "last"}]}))
    trace = load(path, cache=False)
    assert [trace.name_of(i) for i in range(3)] == ["k", "moment", "last"]
