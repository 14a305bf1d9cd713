from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.trace.nesting import parents
from mrv2lab.trace.trace import Trace
from tests.trace.small_trace import SmallTrace

EVENTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(0, 1), st.sampled_from(["python", "op", "runtime"])),
    max_size=14,
)


def built(events: list[tuple[int, int, int, str]]) -> Trace:
    small = SmallTrace()
    for number, (start, length, thread, kind) in enumerate(events):
        small.host(start, start + length, f"e{number}", kind, thread=str(thread))
    return small.build()


def by_hand(trace: Trace, inner: np.ndarray, outer: np.ndarray) -> list[int]:
    found = []
    for one in range(len(trace)):
        around = [
            other
            for other in range(one)
            if outer[other]
            and trace.lane[other] == trace.lane[one]
            and trace.start[other] <= trace.start[one]
            and trace.end[other] >= trace.end[one]
        ]
        found.append(max(around, default=-1) if inner[one] else -1)
    return found


@given(EVENTS)
def test_parents(events: list[tuple[int, int, int, str]]) -> None:
    trace = built(events)
    everything = np.ones(len(trace), bool)
    assert parents(trace, everything).tolist() == by_hand(trace, everything, everything)
    inner, outer = trace.mask("runtime", "op"), trace.mask("python")
    assert parents(trace, inner, outer).tolist() == by_hand(trace, inner, outer)


def test_crossing_ranges_have_no_parent_but_what_they_hide_has() -> None:
    #  a |--------|            b crosses a; c lies in b and outlasts a; d lies in both, b began later
    #  b     |--------|
    #  c           |--|  d  |-|
    trace = built([(0, 9, 0, "python"), (4, 9, 0, "python"), (10, 3, 0, "op"), (6, 2, 0, "op")])
    names = [trace.names[name] for name in trace.name]
    found = {
        names[event]: names[above] if above >= 0 else ""
        for event, above in enumerate(parents(trace, trace.mask("python", "op")))
    }
    assert found == {"e0": "", "e1": "", "e2": "e1", "e3": "e1"}


def test_a_moment_at_the_end_is_inside_whatever_else_starts_there() -> None:
    trace = built([(0, 5, 0, "python"), (5, 3, 0, "runtime"), (5, 0, 0, "op")])
    assert trace.mask("op").tolist() == [False, False, True]
    assert parents(trace, trace.mask("op", "runtime"), trace.mask("python")).tolist() == [-1, -1, 0]


def test_many_ranges_that_cross() -> None:
    # Each range ends while the next one runs, so ended ones lie below running ones.
    events = [(0, 3000, 0, "python")]
    events += [(5 * number, 8, 0, "python") for number in range(300)]
    events += [(5 * number + 6, 1, 0, "op") for number in range(0, 300, 7)]
    trace = built(events)
    everything = np.ones(len(trace), bool)
    assert parents(trace, everything).tolist() == by_hand(trace, everything, everything)
