"""Memory snapshots: what is read, that nothing in them is run, and the level by hand."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2lab.trace import memory_pickle
from mrv2lab.trace.memory_snapshot import MemorySnapshot, load_snapshot, memory_timeline
from mrv2lab.trace.trace import TraceError

FRAMES = [
    {"filename": "??", "line": 0, "name": "c10::cuda::alloc"},
    {"filename": "/app/model.py", "line": 12, "name": "forward"},
    {"filename": "/app/main.py", "line": 3, "name": "main"},
]


def event(action: str, size: int, time: int, **more: Any) -> dict[str, Any]:
    return {
        "action": action,
        "addr": 139_637_976_727_552,
        "size": size,
        "stream": 0,
        "time_us": time,
        "frames": [],
    } | more


def snapshot() -> dict[str, Any]:
    """2,000 bytes were in use before the first event, 1,000 of them since a 1 MiB segment that is still there."""
    segment = {
        "device": 0,
        "address": 139_637_976_727_552,
        "total_size": 1 << 20,
        "allocated_size": 1536,
        "active_size": 1536,
        "requested_size": 1300,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [
            {"address": 1, "size": 1024, "requested_size": 1000, "state": "active_allocated"},
            {"address": 2, "size": 512, "requested_size": 300, "state": "active_awaiting_free"},
            {"address": 3, "size": 512, "requested_size": 400, "state": "inactive"},
        ],
    }
    events = [
        event("free_requested", 1000, 10),
        event("free_completed", 1000, 11),
        event("segment_alloc", 2 << 20, 12),
        event("alloc", 500, 13, frames=FRAMES),
        event("alloc", 300, 14),
        event("free_completed", 500, 15),
        event("segment_free", 2 << 20, 16),
        event("snapshot", 0, 17),
    ]
    return {
        "segments": [segment],
        "device_traces": [events, []],
        "allocator_settings": {"max_split_size": -1, "expandable_segments": False, "roundup": {"1": 2}},
        "external_annotations": [],
    }


def saved(tmp_path: Path, value: Any, protocol: int = 4) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_a_snapshot_says(tmp_path: Path, protocol: int) -> None:
    found = load_snapshot(saved(tmp_path, snapshot(), protocol))
    assert repr(found) == "MemorySnapshot 'snapshot.pickle': 1 segments, 8 events"
    assert found.segments.to_dict("records") == [
        {
            "device": 0, "address": 139_637_976_727_552, "stream": 0, "type": "small", "total_size": 1 << 20,
            "allocated_size": 1536, "active_size": 1536, "requested_size": 1300, "active_requested": 1300, "blocks": 3,
            "expandable": False,
        }
    ]  # fmt: skip
    assert found.events.iloc[3].to_dict() == {
        "device": 0, "time_ns": 13_000, "action": "alloc", "address": 139_637_976_727_552, "size": 500, "stream": 0,
        "site": "/app/model.py:12 forward",
    }  # fmt: skip
    assert found.settings == {"max_split_size": -1, "expandable_segments": False, "roundup": {"1": 2}}
    assert found.extra == {"external_annotations": 0}
    assert found.problems == ()


def test_the_level_by_hand(tmp_path: Path) -> None:
    frame = memory_timeline(load_snapshot(saved(tmp_path, snapshot())))
    mebi = 1 << 20
    columns = ["time_ns", "action", "allocated_bytes", "reserved_bytes", "event"]
    assert frame[columns].values.tolist() == [
        [11_000, "free_completed", 1000, 1 * mebi, 1],
        [12_000, "segment_alloc", 1000, 3 * mebi, 2],
        [13_000, "alloc", 1500, 3 * mebi, 3],
        [14_000, "alloc", 1800, 3 * mebi, 4],
        [15_000, "free_completed", 1300, 3 * mebi, 5],
        [16_000, "segment_free", 1300, 1 * mebi, 6],
    ]
    assert frame.attrs == {"start": {0: (2000, mebi)}, "cannot_say": []}


def test_devices_have_levels_of_their_own(tmp_path: Path) -> None:
    value = {"segments": [], "device_traces": [[], [event("alloc", 5, 1), event("free_completed", 5, 2)]]}
    frame = memory_timeline(load_snapshot(saved(tmp_path, value)))
    assert frame[["device", "allocated_bytes"]].values.tolist() == [[1, 5], [1, 0]]


def test_what_a_timeline_cannot_say(tmp_path: Path) -> None:
    none = memory_timeline(load_snapshot(saved(tmp_path, snapshot() | {"device_traces": []})))
    assert len(none) == 0
    assert "_record_memory_history" in none.attrs["cannot_say"][0]
    value = {"segments": [], "device_traces": [[event("alloc", 5, 1), {"action": "alloc", "size": 2}]]}
    frame = memory_timeline(load_snapshot(saved(tmp_path, value)))
    assert frame["allocated_bytes"].tolist() == [5, 7]
    assert frame["time_ns"].tolist() == [1000, -1]
    assert [sentence[:40] for sentence in frame.attrs["cannot_say"]] == [
        "device 0: its segments at the end do not",
        "events without a time (torch before 2.1 ",
    ]


def test_a_level_never_falls_below_zero() -> None:
    rng = np.random.default_rng(0)
    import pandas as pd

    for _ in range(50):
        live: list[int] = []
        rows = []
        for _ in range(40):
            if live and rng.random() < 0.5:
                rows.append((0, 1, "free_completed", 0, live.pop(int(rng.integers(len(live)))), 0, ""))
            else:
                live.append(int(rng.integers(1, 100)))
                rows.append((0, 1, "alloc", 0, live[-1], 0, ""))
        cut = int(rng.integers(len(rows) - 1))  # a ring forgets what came first
        names = ["device", "time_ns", "action", "address", "size", "stream", "site"]
        segments = pd.DataFrame({"device": [0], "active_requested": [sum(live)], "total_size": [10**6]})
        whole = [sum(row[4] if row[2] == "alloc" else -row[4] for row in rows[: end + 1]) for end in range(len(rows))]
        frame = memory_timeline(MemorySnapshot("t", segments, pd.DataFrame(rows[cut:], columns=names), {}))
        assert frame["allocated_bytes"].tolist() == whole[cut:]


def test_odd_entries_are_counted(tmp_path: Path) -> None:
    value = {
        "segments": [7, {"device": "x", "blocks": 3, "segment_type": [1]}],
        "device_traces": [[{"action": 5, "time_us": -4, "addr": 1 << 70, "frames": 3}, None], 9],
    }
    found = load_snapshot(saved(tmp_path, value))
    assert found.segments.iloc[0][["device", "total_size", "type"]].tolist() == [-1, -1, ""]
    assert found.events.iloc[0][["time_ns", "action", "address"]].tolist() == [-1, "", -1]
    assert {problem.reason for problem in found.problems} == {
        "an entry of segments is no dict",
        "blocks hold something else than a list",
        "an event has no action",
        "an entry of device_traces is no dict",
        "device_traces hold something else than a list",
    }


# -- hostile and damaged files


def refuse(tmp_path: Path, data: bytes, **options: Any) -> str:
    path = tmp_path / "bad.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        load_snapshot(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


class Runs:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    return tmp_path / "touched"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_is_run(tmp_path: Path, touched: Path, protocol: int) -> None:
    value = snapshot() | {"allocator_settings": Runs(os.system, f"touch {touched}")}
    data = pickle.dumps(value, protocol)
    assert "which imports" in refuse(tmp_path, data)
    assert not touched.exists()
    pickle.loads(data)
    assert touched.exists()  # it would have been


def test_the_second_wall_holds_without_the_first(
    tmp_path: Path, touched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pickle, "_check", lambda path, data: len(data))
    message = refuse(tmp_path, pickle.dumps(Runs(os.system, f"touch {touched}"), 4))
    assert "asks for posix.system" in message
    assert "outside" in refuse(tmp_path, b"\x80\x02X\x01\x00\x00\x00aQ.")
    assert not touched.exists()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (b"cos\nsystem\n", "GLOBAL"),
        (b"\x8c\x02os\x8c\x06system\x93", "STACK_GLOBAL"),
        (b"(ios\nsystem\n", "INST"),
        (b"K\x01K\x01R", "REDUCE"),
        (b"K\x01K\x01b", "BUILD"),
        (b"(o", "OBJ"),
        (b")\x81", "NEWOBJ"),
        (b"})\x92", "NEWOBJ_EX"),
        (b"Pid\n", "PERSID"),
        (b"K\x01Q", "BINPERSID"),
        (b"\x82\x01", "EXT1"),
        (b"\x96" + bytes(8), "the instruction"),
        (b"\x97", "the instruction"),
        (b"\x8b\x01\x00\x00\x00\x01", "the instruction"),
        (b"]\x85", "a tuple of something else than numbers"),
        (b"K\x01\x85K\x01\x86", "a tuple of something else than numbers"),
        (b"(]t", "a tuple of something else than numbers"),
    ],
)
def test_every_instruction_that_is_not_needed_is_refused(tmp_path: Path, program: bytes, reason: str) -> None:
    message = refuse(tmp_path, b"\x80\x04}" + program + b".")
    assert reason in message
    assert "at byte " in message


def test_tuples_of_numbers_are_read_as_python_writes_them(tmp_path: Path) -> None:
    value = {"segments": [], "x": [(1,), (1, 2), (1, 2, 3), (1, -2.5, None, True), (1 << 40, 5), ()], (3, 4): (0, 0)}
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(value, protocol)
        assert memory_pickle.load_plain(tmp_path, data) == value


def test_a_huge_memo_is_refused(tmp_path: Path) -> None:
    program = b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFF0) + b"."
    assert "wants a memo of 4,294,967,280 entries" in refuse(tmp_path, program)


def test_a_nest_of_tuples_does_not_overflow_the_stack(tmp_path: Path) -> None:
    nest = b"N" + b"\x85" * 200_000
    refuse(tmp_path, b"\x80\x04}" + nest + b"K\x01s.")


def test_a_deep_nest_of_lists_is_no_snapshot(tmp_path: Path) -> None:
    deep = b"]" * 100_000 + b"a" * 99_999
    assert "holds a list" in refuse(tmp_path, b"\x80\x04" + deep + b".")
    inside = b"\x80\x04}\x8c\x08segments]\x8c\x12allocator_settings}\x8c\x01a" + deep + b"su."
    path = tmp_path / "deep.pickle"
    path.write_bytes(inside.replace(b"}\x8c\x08", b"}(\x8c\x08", 1))
    assert load_snapshot(path).settings == {}


def test_references_to_a_few_entries_do_not_become_millions(tmp_path: Path) -> None:
    trace = [event("alloc", 1, 1)] * 3000
    assert "over and over" in refuse(tmp_path, pickle.dumps({"segments": [], "device_traces": [trace] * 3000}))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([1, 2], "holds a list"),
        ({"state_dict": {}}, "holds a dict with the keys state_dict"),
        (7, "holds a int"),
        ({"segments": 3}, "holds a dict with the keys segments"),
    ],
)
def test_a_pickle_that_is_no_snapshot(tmp_path: Path, value: Any, what: str) -> None:
    assert what in refuse(tmp_path, pickle.dumps(value))


def test_what_is_no_pickle(tmp_path: Path) -> None:
    assert "it is empty" in refuse(tmp_path, b"")
    assert "begins with b'{\"a\": 1}'" in refuse(tmp_path, b'{"a": 1}')
    assert "protocol 2 to 5" in refuse(tmp_path, pickle.dumps([], 0))
    assert "protocol 2 to 5" in refuse(tmp_path, b"\x80\x06.")
    with pytest.raises(TraceError, match="No such file"):
        load_snapshot(tmp_path / "none.pickle")


def test_a_cap_on_the_size(tmp_path: Path) -> None:
    data = pickle.dumps(snapshot())
    assert f"pass max_bytes={len(data)}" in refuse(tmp_path, data, max_bytes=100)


@pytest.mark.parametrize("protocol", [2, 4])
def test_cut_off_anywhere(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps(snapshot(), protocol)
    for end in range(2, len(data), 4):
        assert "cut off at byte" in refuse(tmp_path, data[:end])


def test_damage_anywhere_never_ends_in_another_error(tmp_path: Path) -> None:
    whole = pickle.dumps(snapshot())
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.pickle"
    for _ in range(500):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(damaged), int(rng.integers(1, 4))):
            damaged[place] = int(rng.integers(256))
        path.write_bytes(damaged)
        with contextlib.suppress(TraceError):
            memory_timeline(load_snapshot(path))
