"""Whether two traces did the same work is told of every step, and in a sentence."""

from __future__ import annotations

import pandas as pd
import pytest

from mrv2lab.trace import compare_verdict
from mrv2lab.trace.compare import compare
from mrv2lab.trace.compare_workload import workload
from tests.trace.step_runs import BATCH, COUNT, noisy, run_of_steps


@pytest.mark.parametrize(
    ("of_b", "answers", "sentence"),
    [
        (BATCH, ["same"] * COUNT, f"The workloads agree in requests and tokens of all {COUNT} common steps."),
        ([*BATCH[:-1], (5, 4)], [*["same"] * (COUNT - 1), "different"], f"The workloads differ in 1 of {COUNT} common"),
        (None, ["not known"] * COUNT, f"Requests and tokens are not in both files for {COUNT} of {COUNT} common steps"),
    ],
    ids=["same", "different", "not known"],
)
def test_the_workload_is_told_step_by_step(
    of_b: list[tuple[int, int]] | None, answers: list[str], sentence: str
) -> None:
    found = compare(run_of_steps(noisy(1), batches=BATCH, title="a"), run_of_steps(noisy(2), batches=of_b, title="b"))
    assert found.steps["workload"].tolist() == answers
    assert found.workload.startswith(sentence)
    assert found.to_dict()["workload"] == found.workload


def test_mutant_a_workload_of_the_first_step_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_verdict, "workload", lambda left, right: workload(left.head(1), right.head(1)))
    answers = [*["same"] * (COUNT - 1), "different"]
    with pytest.raises(AssertionError):
        test_the_workload_is_told_step_by_step([*BATCH[:-1], (5, 4)], answers, "The workloads differ in 1 of")


def frame(*rows: tuple[str, int | None, int | None, int | None, int | None, int | None, int | None]) -> pd.DataFrame:
    columns = "kind context_requests context_tokens generation_requests generation_tokens requests tokens".split()
    made = pd.DataFrame(list(rows), columns=columns).astype(dict.fromkeys(columns[1:], "Int64"))
    return made.assign(step=[f"step {row}" for row in range(len(rows))])


def test_one_side_that_says_the_sums_alone() -> None:
    halves, sums = ("mixed", 1, 5, 2, 2, 3, 7), ("unknown", None, None, None, None, 3, 7)
    found = workload(frame(halves), frame(sums))
    assert (found.by_step, found.sentence) == (
        ["same"],
        "the workloads agree in requests and tokens of all 1 common steps",
    )
    other = workload(frame(halves), frame(("unknown", None, None, None, None, 3, 8)))
    assert other.differs and other.sentence.endswith("3 requests, 7 tokens against 3 requests, 8 tokens")


def test_equal_sums_of_other_halves_differ() -> None:
    found = workload(frame(("mixed", 1, 1, 2, 2, 3, 3)), frame(("decode", 0, 0, 3, 3, 3, 3)))
    assert found.by_step == ["different"]
    assert "1 context requests" in found.sentence


def test_kinds_are_counted() -> None:
    rows = ("prefill", 1, 9, 0, 0, 1, 9), ("decode", 0, 0, 1, 1, 1, 1), ("decode", 0, 0, 1, 1, 1, 1)
    assert workload(frame(*rows), frame(*rows)).sentence.endswith("of all 3 common steps (1 prefill, 2 decode)")


def test_no_common_step() -> None:
    found = workload(frame(), frame())
    assert (found.by_step, found.known, found.differs) == ([], False, False)
