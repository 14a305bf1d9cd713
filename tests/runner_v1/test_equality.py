"""V1 against MRV2 in the exact class: the same schedule, batch order, tokens and logits, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest

from mrv2lab.check.workloads import draw
from tests.equality.compare import compare_exact
from tests.runner_v1.runs import MANY_ROWS, SAME_BATCHES, Idle, greedy_case, run
from tests.slow import mostly_slow

QUICK = 6


@cache
def draws() -> int:
    return len(draw(200, 11))


@pytest.mark.parametrize("index", [pytest.param(i, marks=[] if i < QUICK else [pytest.mark.slow]) for i in range(100)])
def test_v1_equals_mrv2(index: int) -> None:
    """Each on its own stream, lag and policy, over arrivals, aborts, preemption, chunks, prefix hits and early ends."""
    case = greedy_case(index)
    mrv2 = run(case)
    v1 = run(case, **SAME_BATCHES, **case.other_transport())
    compare_exact(mrv2, v1)
    assert mrv2.batches == v1.batches


@pytest.mark.parametrize("index", mostly_slow(range(4), 1))
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_requests_that_sit_out_steps(loop: str, index: int) -> None:
    """MRV2's rows stay untouched; V1's are evicted and come back, with tokens that the host knows by then."""
    case = greedy_case(index, loop=loop, aborts="no", pool="roomy")
    idle = Idle(index), Idle(index)
    mrv2 = run(case, idle[0], **MANY_ROWS)
    v1 = run(case, idle[1], **SAME_BATCHES, **MANY_ROWS, **case.other_transport())
    compare_exact(mrv2, v1)
    assert mrv2.batches == v1.batches
    assert idle[0].returns == idle[1].returns > 20
