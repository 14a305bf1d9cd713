"""The scheduler's decisions as plain sentences."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from mrv2lab.engine import scheduler
from mrv2lab.recording.schema import NewRequest, StepRecord
from mrv2lab.recording.words import DECISIONS, Share, count, decision_words, step_words


@pytest.mark.parametrize(
    ("decision", "sentence"),
    [
        (("preempt", "B", 2, 1), "B preempted: 2 blocks needed, 1 free"),
        (("preempt", "B", 1, 0), "B preempted: 1 block needed, 0 free"),
        (("no_blocks", "r3", 3, 1), "r3 waits: 3 blocks needed, 1 free"),
        (("full_sequence", "r3", 5, 4), "r3 waits until its whole sequence fits: 5 blocks needed, 4 free"),
        (("rows", "r3", 1, 0), "r3 waits: every row is taken"),
        (("draining", "r3", 1, 0), "r3 waits until 1 token from before its preemption came back"),
        (("after_preemption", "r3", 0, 7), "r3 waits: nobody is admitted in a step that preempted"),
        (("budget", "r3", 6, 5), "r3 gets 5 of the 6 tokens it could compute: a step's tokens are limited"),
        (("last_token", "r3", 0, 0), "r3 sits out: the step in flight gives its last token"),
        (("prefix_hit", "r3", 1040, 1024), "r3: 1,024 of 1,040 tokens found in the prefix cache"),
        (("something_new", "r3", 4, 2), "r3: something_new (needed 4, free 2)"),
    ],
)
def test_decisions(decision: tuple[str, str, int, int], sentence: str) -> None:
    assert decision_words(*decision) == sentence


def test_every_kind_that_the_scheduler_decides_has_a_sentence() -> None:
    source = inspect.getsource(scheduler)
    decided = set(re.findall(r'_decide\("(\w+)"', source)) | set(re.findall(r'kind(?:, needed)? = "(\w+)"', source))
    assert len(decided) == 9
    assert decided == set(DECISIONS)


def test_braces_in_a_request_id_are_only_text() -> None:
    assert decision_words("rows", "{blocks}", 1, 0) == "{blocks} waits: every row is taken"


def new(req_id: str, row: int, prefill: int, cached: int, resumed: bool = False) -> NewRequest:
    return NewRequest(req_id, row, 14, prefill, cached, [[1]], 0.0, 0, False, 8, resumed)


def test_a_step() -> None:
    record = StepRecord(
        12,
        new=[new("r1", 1023, 14, 0), new("r2", 1022, 20, 16, resumed=True)],
        removed=[("r8", 1022), ("r9", 1021)],
        finished=["r8"],
        preempted=["r9", "r7"],
        unscheduled=["r5"],
        decisions=[("preempt", "r9", 2, 1)],
        gauges={"in_flight": 1.0},
        req_ids=["r1", "r2", "r3"],
        rows=np.array([1023, 1022, 1020], np.int32),
        finish_reasons={"r3": "length", "r6": "abort"},
    )
    batch = [Share("r3", "decode", 1, 30, 4), Share("r1", "prefill", 14, 0, 14), Share("r2", "chunk", 3, 16, 20)]
    assert step_words(record, batch, {"r3": 1020}) == [
        "step 12 was scheduled before step 11's tokens were known",
        "row 1022 is free again: r8 ended",
        "row 1021 is free again: r9 was preempted",
        "r9 preempted: 2 blocks needed, 1 free",
        "r7 preempted: its blocks were taken away",
        "r1 enters row 1023: 14 prompt tokens, of which 0 cached",
        "r2 comes back into row 1022: 20 tokens of prompt and output, of which 16 cached",
        "r1 prefills 14 tokens",
        "r2 prefills a chunk: 3 of the 4 tokens left",
        "r3 decodes one token",
        "r5 runs but gets no token in this step",
        "r3 ended (length); its row 1020 is freed at the next step",
        "r6 ended (abort)",
    ]


def test_many_decodes_are_one_sentence() -> None:
    record = StepRecord(3, rows=np.zeros(6, np.int32), gauges={"in_flight": 0.0})
    batch = [Share(f"r{i}", "decode", 1, 9, 4) for i in range(6)]
    assert step_words(record, batch, {}) == ["6 requests decode one token each"]
    assert step_words(record, [*batch[:5], Share("r5", "decode", 3, 9, 4)], {}) == [
        "6 requests decode up to 3 tokens each"
    ]
    assert step_words(record, [Share("r5", "decode", 3, 9, 4)], {}) == ["r5 decodes 3 tokens"]


def test_nothing_is_claimed_that_no_gauge_says() -> None:
    record = StepRecord(3, rows=np.zeros(1, np.int32))
    assert step_words(record, [Share("a", "decode", 1, 9, 4)], {}) == ["a decodes one token"]


def test_a_step_without_tokens() -> None:
    record = StepRecord(3, sampled=[])
    assert step_words(record, [], {}) == ["nobody computes anything: the runner only hears who is gone"]
    record.sampled = None  # it is still being put together
    assert step_words(record, [], {}) == []


def test_count() -> None:
    assert [count(0, "row"), count(1, "row"), count(2000, "row")] == ["0 rows", "1 row", "2,000 rows"]
