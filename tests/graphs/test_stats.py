"""What every step did and why."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mrv2lab.graphs import BatchDescriptor, CudaGraphManager, Decision, GraphStats
from mrv2lab.graphs.stats import StepGraph, find_step
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
    assert stats.why(np.int64(5)) == stats.why(5)
    with pytest.raises(KeyError, match=r"step 6 has run no forward; known: 0\.\.5"):
        stats.why(6)
    with pytest.raises(TypeError, match="a step is an integer, got '3'"):
        stats.why("3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kept", "steps", "step", "words"),
    [
        ([], 0, 0, "step 0 has run no forward; no step has yet"),
        ([0, 1, 3, 4, 5], 5, 2, "step 2 has run no forward; known: 0..1, 3..5"),
        ([7], 1, 2, "step 2 has run no forward; known: 7"),
        ([7], 4000, 2, "step 2 is not among the last 1 of 4,000 that are kept; known: 7"),
        ([7], 4000, -1, "step -1 has run no forward; known: 7"),
        ([0, 2, 4, 6, 8, 10], 6, 3, "step 3 has run no forward; known: ..., 4, 6, 8, 10"),
    ],
)
def test_a_step_without_a_forward_is_told_from_one_that_is_not_kept(
    kept: list[int], steps: int, step: int, words: str
) -> None:
    recent = [StepGraph(number, 1, 1, Decision(None, "none")) for number in kept]
    with pytest.raises(KeyError, match=re.escape(words)):
        find_step(recent, steps, step)


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
