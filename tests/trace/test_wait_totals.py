"""Waits by length and by kind."""

from __future__ import annotations

import numpy as np

from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.trace import Trace
from mrv2lab.trace.wait_totals import longest_first, wait_totals
from tests.trace.hand_made import US, HandMade


def several() -> Trace:
    made = HandMade().call(10, 5, "cudaEventSynchronize", 1).call(20, 90, "cudaStreamWaitEvent", 2)
    made.call(120, 30, "cudaStreamSynchronize", 3).call(160, 40, "cudaEventSynchronize", 4)
    made.frame(300, 20, "<built-in method synchronize of torch.Event object at 0x1>")
    return made.build()


def test_waits_of_the_host_come_first_and_the_longest_of_them() -> None:
    table = longest_first(syncs(several()))
    assert table["host_waits"].tolist() == [True] * 4 + [False]
    longest = table[["api_ns", "caller_ns"]].max(axis=1) // US
    assert longest.tolist() == [40, 30, 20, 5, 90]
    assert table.attrs["cannot_say"] == syncs(several()).attrs["cannot_say"]


def test_totals_of_each_kind() -> None:
    table = wait_totals(several())
    assert table[["kind", "host_waits", "count", "api_known", "caller_known"]].to_numpy().tolist() == [
        ["event", True, 2, 2, 0],
        ["stream", True, 1, 1, 0],
        ["python frame only", True, 1, 0, 1],
        ["device-side wait", False, 1, 1, 0],
    ]
    assert table["api_ns"].fillna(-1).tolist() == [45 * US, 30 * US, -1, 90 * US]
    assert table["caller_ns"].fillna(-1).tolist() == [-1, -1, 20 * US, -1]


def test_a_trace_without_waits() -> None:
    empty = HandMade().build().select(np.empty(0, np.int64))
    assert len(wait_totals(empty)) == len(longest_first(syncs(empty))) == 0
    assert "cannot_say" in wait_totals(empty).attrs
