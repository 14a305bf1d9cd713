"""What every step did and why."""

from __future__ import annotations

import pytest

from mrv2lab.graphs import BatchDescriptor, CudaGraphManager, GraphStats
from mrv2lab.runtime.cpu import CpuRuntime
from tests.graphs.toy import Toy, captured, table


def _walk(manager: CudaGraphManager) -> GraphStats:
    for step, (reqs, tokens, longest) in enumerate([(3, 3, 1), (4, 4, 1), (3, 3, 1), (1, 6, 6), (1, 9, 9), (1, 9, 9)]):
        manager.stats.note(step, tokens, reqs, manager.dispatch(reqs, tokens, longest))
    return manager.stats


def test_counts_and_padding(cpu: CpuRuntime) -> None:
    stats = _walk(captured(Toy(cpu), table()))
    assert [(tally.decision.mode, tally.steps, tally.tokens, tally.padding) for tally in stats.tallies()] == [
        ("full", 2, 6, 2),
        ("eager", 2, 18, 0),
        ("full", 1, 4, 0),
        ("piecewise", 1, 6, 2),
    ]
    assert [step.padding for step in stats.recent] == [1, 0, 1, 2, 0, 0]


def test_why(cpu: CpuRuntime) -> None:
    stats = _walk(captured(Toy(cpu), table()))
    assert stats.why(0) == "full graph of 4 tokens, 4 requests: 3 tokens padded to 4; plain decodes in one graph"
    assert stats.why(5) == "eager: 9 tokens exceed the largest capture size 8"
    with pytest.raises(KeyError, match="step 6 is not among the last 6 steps kept"):
        stats.why(6)


def test_only_the_last_steps_are_kept_and_all_are_counted(cpu: CpuRuntime) -> None:
    manager = CudaGraphManager(cpu, table(), GraphStats(keep=2))
    manager.capture(Toy(cpu).prepare, progress=False)
    stats = _walk(manager)
    assert [step.step for step in stats.recent] == [4, 5]
    assert sum(tally.steps for tally in stats.tallies()) == 6
    stats.reset()
    assert not stats.recent and not stats.tallies()
    with pytest.raises(ValueError, match="keep=0"):
        GraphStats(keep=0)


def test_rows_of_the_manager_join_shapes_costs_and_hits(cpu: CpuRuntime) -> None:
    manager = captured(Toy(cpu), table())
    _walk(manager)
    rows = {str(row["graph"]): row for row in manager.rows()}
    row = rows["full graph of 4 tokens, 4 requests"]
    assert (row["steps"], row["step_tokens"], row["padding"]) == (3, 10, 2)
    assert row["graphs"] == 1
    assert row["nbytes"] == manager.captured[BatchDescriptor("full", 4, 4, 1)].nbytes
    assert rows["full graph of 2 tokens, 2 requests"]["steps"] == 0
