"""Typed reading gives what reading event by event gives, and refuses what it cannot give."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.trace.json_chunks import EventStream, Piece
from mrv2lab.trace.kineto import KinetoEvents
from mrv2lab.trace.read import load
from mrv2lab.trace.trace import COLUMNS, Trace, TraceError, TraceInfo
from tests.trace.shared_files import shared_file
from tests.trace.synthetic import synthetic_kineto


def one_by_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    with monkeypatch.context() as patch:
        patch.setattr(KinetoEvents, "quick", lambda self, text: False)
        return load(path, cache=False)


def assert_equal(a: Trace, b: Trace) -> None:
    assert (a.info, a.problems, a.names, a.lanes) == (b.info, b.problems, b.names, b.lanes)
    for column in set(COLUMNS) - {"arg"}:
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


GPU = {"ph": "X", "pid": 0, "tid": 7, "dur": 1}
PECULIAR: list[Any] = [
    {**PLAIN, "cat": "user_annotation", "name": "mrv2lab.phase.forward"},
    {**PLAIN, "cat": "user_annotation", "name": "of the user's"},
    *(
        {**GPU, "cat": "kernel", "name": "k", "ts": 3, "args": {"device": 0, "stream": stream}}
        for stream in (1, 2, "3")
    ),
    *({**GPU, "cat": "kernel", "name": "k", "ts": 4, "args": {"device": device, "stream": 1}} for device in (0, 1)),
    {**GPU, "cat": "gpu_memcpy", "name": "c", "ts": 5, "args": {"nbytes": 8, "Bytes": 16, "bytes": 32}},
    {**GPU, "cat": "gpu_memcpy", "name": "c", "ts": 6, "args": {"nbytes": 8, "Bytes": 16}},
    {**GPU, "cat": "gpu_memset", "name": "s", "ts": 7, "args": {"nbytes": 8}},
    {**GPU, "cat": "gpu_memset", "name": "s", "ts": 8, "args": {"bytes": 2**63}},
    {**GPU, "cat": "kernel", "name": "k", "ts": 9, "args": {"bytes": 5}},
]


@pytest.mark.parametrize("place", range(len(PECULIAR)))
def test_what_is_peculiar_but_clean(place: int) -> None:
    text = orjson.dumps([PECULIAR[0], PECULIAR[place], PLAIN])
    quick, plain = KinetoEvents(), KinetoEvents()
    assert quick.quick(text)
    plain.add(Piece(orjson.loads(text), text[1:-1], 0))
    assert_equal(*(events.build(TraceInfo("chrome", "test")) for events in (quick, plain)))


# -- any events ------------------------------------------------------------------------------------------------------


def read(text: bytes, block_bytes: int, *, quick: bool) -> tuple[Trace, Counter[str]]:
    """The trace in a text that comes in blocks, and what its events became besides rows."""
    events = KinetoEvents()
    blocks = [text[place : place + block_bytes] for place in range(0, len(text), block_bytes)]
    for piece in EventStream(blocks, events.builder.problem, "test", events.quick if quick else None):
        events.add(piece)
    events.finish()
    return events.build(TraceInfo("chrome", "test")), events.counts


def number(*texts: str) -> st.SearchStrategy[Any]:
    """Numbers as a file spells them."""
    return st.sampled_from([orjson.Fragment(text) for text in texts])


TIMES = number("1.500", "2", "0.25", "2199023255551.999", "-0.004", "-7.5", "0")
LATE_TIMES = number(
    "1661203462598738.123", "1661203462598738.124", "2199023255552.001", "4503599627370495.75", "5", "6.5"
)
ODD_TIMES = number("1.00051", "1661203462598738.00051", "3e2", "9999999999999999.999", "1e30", "null", '"1.5"', "-3e18")
LENGTHS = number("0.000", "3.25", "1e2", "7")
ODD_LENGTHS = number("-1", "null", "9e12", "1e-4", '"2"')
IDS = st.sampled_from([0, 7, -1, 42, "", "stream 7", "Spans", 2**63 - 1])
ODD_IDS = st.sampled_from([None, 2.0, True, 2**63, orjson.Fragment(str(2**64)), [1], {"a": 1}])
ARGS = st.fixed_dictionaries(
    {},
    optional={
        "correlation": st.sampled_from([-1, 0, 1, 2, 2**32 - 1, 2**62]),
        "device": st.sampled_from([0, 1, "0"]),
        "stream": st.sampled_from([0, 7, "7", 2**32 - 1]),
        "bytes": st.sampled_from([0, 64, "64", None, 2**63, 1.5]),
        "nbytes": st.just(8),
        "Concrete Inputs": st.sampled_from([[], ["", "\u00e9 }, {", "\\n"], [[1, 2.5], {"a": None}]]),
    },
)
ODD_ARGS = st.sampled_from(
    [
        None,
        [],
        [1],
        "x",
        5,
        {"correlation": "12"},
        {"correlation": 1.0},
        {"correlation": orjson.Fragment(str(2**70))},
        {"stream": None},
    ]
)
CATEGORIES = st.sampled_from(
    ["cpu_op", "user_annotation", "python_function", "cuda_runtime", "kernel", "gpu_memcpy", "overhead", "Trace", "?"]
)
NAMES = st.sampled_from(["aten::mm", "mrv2lab.phase.forward", "k<a, b>", "\u00e9\u4e2d", 'a "b" \\', "\U0001f600", ""])


def _events(times: st.SearchStrategy[Any], odd: bool) -> st.SearchStrategy[Any]:
    ids, lengths, args = (IDS | ODD_IDS, LENGTHS | ODD_LENGTHS, ARGS | ODD_ARGS) if odd else (IDS, LENGTHS, ARGS)
    owner = {"name": NAMES | st.none() if odd else NAMES, "pid": ids, "tid": ids, "ts": times}
    whole = {"ph": st.just("X"), "cat": CATEGORIES, **owner, "dur": lengths}
    moment = {"ph": st.just("i"), **owner}
    more = {"args": args, "dur": lengths, "s": st.just("t")}
    metadata = {"ph": st.just("M"), "name": st.sampled_from(["process_name", "thread_sort_index", 5]), "pid": ids}
    named = {"tid": ids, "args": st.sampled_from([{"name": "main"}, {"sort_index": 3}, {}, 5])}
    arrow = {"ph": st.sampled_from("stf"), "id": ids}
    kinds = st.fixed_dictionaries(whole, optional={"args": args, "more": st.just({"a": ["}", {"b": 1}]})})
    kinds |= st.fixed_dictionaries(moment, optional=more)
    kinds |= st.fixed_dictionaries(metadata, optional=named) | st.fixed_dictionaries(arrow)
    halves = st.fixed_dictionaries({"ph": st.sampled_from("BECbenRP"), **owner}, optional={"args": args})
    return kinds | halves | st.sampled_from(["x", None, {}]) if odd else kinds


CLEAN = st.lists(_events(TIMES, False), max_size=6) | st.lists(_events(LATE_TIMES, False), max_size=6)
ANY = st.lists(_events(TIMES | LATE_TIMES | ODD_TIMES, True), max_size=6)


@settings(max_examples=120, deadline=None)
@given(groups=st.lists(CLEAN | CLEAN | ANY, max_size=4), block_bytes=st.integers(40, 900), indent=st.booleans())
def test_any_events(groups: list[list[Any]], block_bytes: int, indent: bool) -> None:
    """The mutants: a moment that keeps its length or correlation, lanes numbered in another order, arguments that are
    empty but kept, ids beyond int64 taken as they are, times trusted as doubles."""
    text = orjson.dumps(list(itertools.chain(*groups)), option=orjson.OPT_INDENT_2 if indent else None)
    taken, plain = (read(text, block_bytes, quick=quick) for quick in (True, False))
    assert_equal(taken[0], plain[0])
    assert taken[1] == plain[1]


def event(**more: Any) -> dict[str, Any]:
    return {**PLAIN, **more}


def lengths_added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of events of each piece that is read event by event."""
    lengths: list[int] = []
    add = KinetoEvents.add

    def counted(self: KinetoEvents, piece: Piece) -> None:
        lengths.append(len(piece.events))
        add(self, piece)

    monkeypatch.setattr(KinetoEvents, "add", counted)
    return lengths


def test_clean_pieces_never_become_dictionaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last one, behind which the array ends."""
    path = tmp_path / "t.json"
    path.write_bytes(synthetic_kineto(3000, seed=2))
    added = lengths_added(monkeypatch)
    assert len(load(path, cache=False)) == 3000
    assert added == [1]


@pytest.mark.parametrize("name", ["01", "02", "03", "04", "07"])
def test_real_files_are_clean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added = lengths_added(monkeypatch)
    load(shared_file(name), cache=False)
    assert added == [1]


@pytest.mark.parametrize(
    "odd",
    [
        event(name=None),
        event(ts=None),
        event(ts="5"),
        event(ts=-13 * 10**14),
        event(dur=-1),
        event(dur=1e13),
        event(pid=1.0),
        event(pid=2**63),
        event(tid=None),
        event(args=[1]),
        event(args={"correlation": "12"}),
        event(args={"stream": None}),
        event(ph="B"),
        event(ph="C"),
        {key: value for key, value in PLAIN.items() if key != "cat"},
        "no event",
    ],
)
def test_what_is_out_of_the_ordinary_is_refused_whole(odd: Any) -> None:
    events = KinetoEvents()
    assert not events.quick(json.dumps([PLAIN, odd]).encode())
    assert len(events) == 0
    assert events.quick(json.dumps([PLAIN, PLAIN]).encode())
    assert len(events) == 2


@pytest.mark.parametrize("field", [b"name", b"what", b"args"])
def test_bytes_that_are_not_utf8_are_refused_wherever_they_stand(field: bytes) -> None:
    """The decoder skips what it need not know. The mutant asks it alone."""
    value = b'{"a":"\xff"}' if field == b"args" else b'"\xff"'
    text = b'[{"ph":"X","cat":"c","name":"n","pid":1,"tid":2,"ts":1,"dur":1,"%b":%b}]' % (field, value)
    assert not KinetoEvents().quick(text)
    assert KinetoEvents().quick(text.replace(b"\xff", "\u00e9".encode()))


def test_arguments_nested_too_deeply_are_refused() -> None:
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    text = b'[{"ph":"X","cat":"c","name":"n","pid":1,"tid":2,"ts":1,"dur":1,"args":%b}]' % deep
    assert not KinetoEvents().quick(text)


def test_arguments_are_kept_without_blanks() -> None:
    events = KinetoEvents()
    assert events.quick(json.dumps([event(args={"a b": [1, " "]}), event(args={})], indent=9).encode())
    trace = events.build(TraceInfo("chrome", "test"))
    assert bytes(trace.store.blob) == b'{"a b":[1," "]}'
    assert [trace.args(row) for row in trace.arg.argsort()[::-1]] == [{"a b": [1, " "]}, {}]


def test_a_number_beyond_all_doubles_in_arguments() -> None:
    events = KinetoEvents()
    assert events.quick(b'[{"ph":"X","cat":"c","name":"n","pid":1,"tid":2,"ts":1,"dur":1,"args":{"a":-1e400}}]')
    assert events.build(TraceInfo("chrome", "test")).args(0) == {"a": float("-inf")}


def test_nothing_but_metadata_is_still_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(
        b'[{"ph":"M","name":"process_name","pid":1},{"ph":"s","id":1},{"ph":"s","id":2},{"ph":"M","pid":1}]'
    )
    with pytest.raises(TraceError, match="2 metadata events, 2 flow arrows"):
        load(path)


ALIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pid": 1}, {"pid": 1.0}, "1 7, 1.0 7"),
    ({"pid": 1}, {"pid": True}, "1 7, True 7"),
    ({"tid": 7}, {"tid": 7.0}, "0 7, 0 7.0"),
    ({"cat": "kernel", "args": {"stream": 1}}, {"cat": "kernel", "args": {"stream": True}}, "GPU 0/1, GPU 0/-1"),
    ({"cat": "kernel", "args": {"device": 0}}, {"cat": "kernel", "args": {"device": False}}, "GPU 0/7, GPU -1/7"),
    ({"cat": "kernel", "args": {"a": 1}}, {"cat": "kernel", "args": {"device": None}}, "GPU 0/7, GPU -1/7"),
]


@pytest.mark.parametrize(("one", "other", "lanes"), ALIKE)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize("quick", [True, False])
def test_ids_that_are_equal_to_python_are_not_one_row(
    one: dict[str, Any], other: dict[str, Any], lanes: str, block_bytes: int, quick: bool
) -> None:
    host = {**PLAIN, "cat": "cpu_op"}
    trace, _ = read(orjson.dumps([{**host, **one}, {**host, **other, "ts": 2}]), block_bytes, quick=quick)
    found = [trace.lane_of(event) for event in range(2)]
    assert lanes == ", ".join(
        f"GPU {lane.device}/{lane.stream}" if lane.role == "stream" else f"{lane.process} {lane.thread}"
        for lane in found
    )


@pytest.mark.parametrize(("told", "kept"), [((1 << 62) - 1, (1 << 62) - 1), (1 << 62, -1), (1 << 64, -1), ("9", 9)])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_bytes_whose_sums_would_leave_int64_are_not_told(told: object, kept: int, block_bytes: int) -> None:
    copy = {**PLAIN, "cat": "gpu_memcpy"}
    text = b"[%b,%b]" % (orjson.dumps(copy), json.dumps({**copy, "ts": 2, "args": {"bytes": told}}).encode())
    for quick in (True, False):
        trace, _ = read(text, block_bytes, quick=quick)
        assert trace.nbytes.tolist() == [-1, kept]
