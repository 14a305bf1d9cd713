"""Log-probabilities as values."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.engine.logprobs import LogprobRows
from mrv2lab.protocol import Logprobs

INF = float("inf")


def frame_of(*rows: tuple[list[int], list[float], int]) -> Logprobs:
    ids, values, ranks = zip(*rows, strict=True)
    return Logprobs(np.array(ids, np.int32), np.array(values, np.float32), np.array(ranks, np.int32))


STEP = frame_of(
    ([5, 9, 5], [-1.0, -0.5, -1.0], 2),  # the token itself is the second best
    ([3, -1, -1], [-2.0, -INF, -INF], 7),  # a request that asked for none beside the token
    ([8, 1, 2], [-9.0, -0.25, -INF], 40),  # everything but one token is masked
)


def test_the_chosen_comes_first_and_once() -> None:
    rows = LogprobRows()
    rows.extend(STEP)
    assert list(rows) == [
        {5: (-1.0, 2), 9: (-0.5, 1)},
        {3: (-2.0, 7)},
        {8: (-9.0, 40), 1: (-0.25, 1), 2: (-INF, 2)},
    ]
    assert [next(iter(row or {})) for row in rows] == [5, 3, 8]
    assert rows[-1] == rows[2] and rows[0:3:2] == [rows[0], rows[2]]
    assert rows.chosen.tolist() == [-1.0, -2.0, -9.0]
    with pytest.raises(IndexError):
        rows[3]


def test_a_prompts_first_token_has_none() -> None:
    rows = LogprobRows(prompt=True)
    assert list(rows) == [None]
    rows.extend(STEP, 1, 1)
    assert list(rows) == [None, {3: (-2.0, 7)}]
    assert rows.to_frame()["position"].tolist() == [1]


def test_rows_are_copied_and_bounds_checked() -> None:
    source = frame_of(([5, 9], [-1.0, -0.5], 2))
    rows = LogprobRows()
    rows.extend(source)
    source.token_ids[:], source.values[:] = 0, 0
    assert rows[0] == {5: (-1.0, 2), 9: (-0.5, 1)}
    with pytest.raises(ValueError, match="rows 1 to 3 were asked of 1"):
        rows.extend(source, 1, 2)


def test_frame() -> None:
    rows = LogprobRows()
    rows.extend(STEP, 0, 2)
    frame = rows.to_frame(lambda ids: f"<{ids[0]}>")
    assert frame.to_dict("list") == {
        "position": [0, 0, 1],
        "token_id": [5, 9, 3],
        "logprob": [-1.0, -0.5, -2.0],
        "rank": [2, 1, 7],
        "chosen": [True, False, True],
        "text": ["<5>", "<9>", "<3>"],
    }
    assert LogprobRows().to_frame().empty
    assert repr(rows) == "LogprobRows(2 tokens)"
