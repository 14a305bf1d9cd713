"""Top-k and top-p by a sort: which tokens stay, to the letter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.runner_v1 import logits_stages
from mrv2lab.runner_v1.top_k_top_p import apply_top_k_top_p
from tests.runner_v1.sampling import INF, SamplingBench
from tests.sample import oracle


def kept(logits: list[float], top_k: int | None = None, top_p: float | None = None) -> list[int]:
    x = torch.tensor([logits], dtype=torch.float32)
    before = x.clone()
    k = None if top_k is None else torch.tensor([top_k], dtype=torch.int32)
    p = None if top_p is None else torch.tensor([top_p], dtype=torch.float32)
    apply_top_k_top_p(x, k, p)
    stay = ~torch.isneginf(x)
    assert torch.equal(x[stay], before[stay])
    return stay[0].nonzero()[:, 0].tolist()


def logs(*probabilities: float) -> list[float]:
    return torch.tensor(probabilities).log().tolist()


@pytest.mark.parametrize(
    ("logits", "k", "expected"),
    [
        ([1.0, 1, 1, 0], 2, [0, 1]),  # mrv2.md 4.4, 42: exactly k
        ([0.0, 1, 1, 1], 2, [1, 2]),
        ([0.0, -0.0, 0.0, -0.0], 3, [0, 1, 2]),
        ([3.0, 1, 2], 1, [0]),
        ([3.0, 1, 2], 3, [0, 1, 2]),
        ([3.0, 1, 2], 99, [0, 1, 2]),
        ([-INF, 1.0, -INF, 2.0], 3, [1, 3]),
        ([-INF] * 3, 2, []),
    ],
)
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_ids(logits: list[float], k: int, expected: list[int]) -> None:
    assert kept(logits, k) == expected


@pytest.mark.parametrize(
    ("logits", "p", "expected"),
    [
        (logs(0.5, 0.25, 0.125, 0.125), 0.6, [0, 1]),
        (logs(0.5, 0.25, 0.125, 0.125), 0.8, [0, 1, 2]),
        (logs(0.125, 0.125, 0.25, 0.5), 0.8, [0, 2, 3]),  # the tie at the cut: the lowest id
        (logs(0.5, 0.25, 0.125, 0.125), 1e-9, [0]),
        (logs(0.5, 0.5), 0.5, [0]),
        (logs(0.5, 0.25, 0.25), 1.0, [0, 1, 2]),
        ([-INF, 0.0, -INF], 0.3, [1]),
        ([-INF] * 3, 0.3, []),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(logits: list[float], p: float, expected: list[int]) -> None:
    assert kept(logits, None, p) == expected


def test_top_p_works_on_the_survivors_of_top_k() -> None:
    """0.4 and 0.3 are 0.57 and 0.43 of what top-k left."""
    assert kept(logs(0.4, 0.3, 0.2, 0.1), None, 0.6) == [0, 1]
    assert kept(logs(0.4, 0.3, 0.2, 0.1), 2, 0.55) == [0]


def test_p_of_1_is_off_whatever_a_sum_rounds_to() -> None:
    assert len(kept([0.0] * 151_936, None, 1.0)) == 151_936
    assert len(kept([0.0] * 151_936, 1000, 0.5)) == 500


@pytest.mark.parametrize("vocab", [7, 1000, 49_152])
@pytest.mark.parametrize("seed", range(4))
def test_kept_sets_equal_the_oracles(vocab: int, seed: int) -> None:
    check_kept_sets(vocab, [seed])


def check_kept_sets(vocab: int, seeds: Iterable[int]) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        bench = SamplingBench(vocab, rows=16)
        for i in range(16):
            bench.add(temperature=1.0, top_k=int(rng.integers(0, 60)), top_p=[1.0, float(rng.uniform(0.01, 1))][i % 2])
        bench.check(torch.tensor(np.round(rng.normal(size=(16, vocab)) * 3, 2), dtype=torch.float32))


def highest_ids(logits: Any, top_k: Any, top_p: Any) -> None:
    mirrored = logits.flip(-1)
    apply_top_k_top_p(mirrored, top_k, top_p)
    logits.copy_(mirrored.flip(-1))


def one_more(logits: Any, top_k: Any, top_p: Any) -> None:
    apply_top_k_top_p(logits, None if top_k is None else top_k + 1, top_p)


def greater_p(logits: Any, top_k: Any, top_p: Any) -> None:
    apply_top_k_top_p(logits, top_k, None if top_p is None else top_p + 1e-3)


def p_first(logits: Any, top_k: Any, top_p: Any) -> None:
    apply_top_k_top_p(logits, None, top_p)
    apply_top_k_top_p(logits, top_k, None)


@pytest.mark.parametrize("mutant", [highest_ids, one_more, greater_p, p_first])
def test_a_wrong_cut_is_found(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits_stages._SEGMENTS, "top_k_top_p", mutant)
    with pytest.raises(AssertionError):
        check_kept_sets(1000, range(4))


def test_excuses_are_few() -> None:
    """What the oracle lets pass is not the test."""
    x = np.random.default_rng(0).normal(size=1000) * 3
    assert oracle.excused(x, 0.9).sum() <= 2
