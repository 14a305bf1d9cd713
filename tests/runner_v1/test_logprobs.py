"""V1's logprobs against the oracle, with ties, whole vocabularies and rows that asked for none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.runner_v1.logprobs import NONE, LogprobsBuffers, count_nans, cut, gather_logprobs, top_ids
from mrv2lab.runtime.cpu import CpuRuntime
from tests.sample import oracle

INF = float("inf")


def gather(logits: torch.Tensor, tokens: list[int], k: int, logarithms: bool = True) -> Any:
    n = len(logits)
    ids = torch.full((n, 1 + k), -7, dtype=torch.int32)
    values = torch.full((n, 1 + k), float("nan"))
    ranks = torch.full((n,), -7, dtype=torch.int32)
    gather_logprobs(ids, values, ranks, logits, torch.tensor(tokens), logarithms)
    return ids.numpy(), values.numpy(), ranks.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "k"), [(7, 0), (7, 3), (7, 7), (1000, 20), (49_152, 5)])
def test_logprobs_equal_the_oracles(vocab: int, k: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab + k)
    values = torch.tensor(np.round(rng.normal(size=(4, vocab)) * 3, 2)).to(dtype)
    values[1, vocab // 2] = -INF
    values[2, 0] = float("nan")
    tokens = rng.integers(1, vocab // 2, 4).tolist()
    ids, made, ranks = gather(values, tokens, k)
    for row, token in enumerate(tokens):
        x = oracle.clean(values[row].float().numpy())
        want_ids, want = oracle.top_logprobs(x, token, k)
        assert ids[row].tolist() == want_ids
        np.testing.assert_allclose(made[row], want, rtol=1e-5, atol=1e-6)
        assert ranks[row] == oracle.rank(x, token)


def test_ties_go_to_the_lowest_ids_and_count_against_the_rank() -> None:
    ids, _, ranks = gather(torch.tensor([[1.0, 2, 2, 2, -0.0, 0.0]]), [3], 4)
    assert ids.tolist() == [[3, 1, 2, 3, 0]] and ranks.tolist() == [3]
    ids, _, ranks = gather(torch.tensor([[-0.0, 0.0, -0.0]]), [2], 3)
    assert ids.tolist() == [[2, 0, 1, 2]] and ranks.tolist() == [3]


def test_keys_count_upwards_with_the_logit() -> None:
    x = torch.tensor([[-INF, -3.4e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3.4e38, INF]]).flip(-1)
    assert top_ids(x, 9).tolist() == [list(range(9))]


def test_logits_as_they_are() -> None:
    ids, values, _ = gather(torch.tensor([[1.0, 3, 2]]), [0], 2, logarithms=False)
    assert ids.tolist() == [[0, 1, 2]] and values.tolist() == [[1, 3, 2]]


def test_a_row_without_a_finite_logit_is_minus_infinity_throughout() -> None:
    _, values, ranks = gather(torch.full((1, 4), -INF), [0], 2)
    assert np.isneginf(values).all() and ranks.tolist() == [4]


def test_rows_are_cut_to_what_they_asked_for() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    made = cut(ids, ids.astype(np.float32), np.array([5, 6, 7], np.int32), np.array([3, 1, NONE]))
    assert made.token_ids.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [-1] * 4]
    assert made.values.tolist() == [[0, 1, 2, 3], [4, 5, -INF, -INF], [-INF] * 4]
    assert made.ranks.tolist() == [5, 6, 0]
    assert (made.token_ids.dtype, made.values.dtype, made.ranks.dtype) == (np.int32, np.float32, np.int32)


def test_buffers_grow_and_give_views_that_are_whole_copies() -> None:
    rt = CpuRuntime()
    buffers = LogprobsBuffers(rt, "logprobs.0")
    rt.register("fill", lambda ids, values, ranks, v: (ids.fill_(v), values.fill_(v + 0.5), ranks.fill_(-v)))
    for rows, width, value in ((2, 3, 1), (5, 1, 2), (1, 9, 3), (2, 2, 4)):
        made = buffers.reserve(rows, width)
        rt.run("fill", *made, value, writes=made)
        buffers.copy_to_host()
        rt.synchronize()
        taken = buffers.take([width - 1] * rows, [0] if rows > 1 else [])
        kept = max(1, rows - 1)
        assert taken.token_ids.tolist() == [[value] * width] * kept
        assert taken.values.tolist() == [[value + 0.5] * width] * kept
        assert taken.ranks.tolist() == [-value] * kept
    assert buffers._size == 9 and buffers._rows == 5


def test_nan_counts() -> None:
    counts = torch.empty(2, dtype=torch.int32)
    nan = float("nan")
    count_nans(counts, torch.tensor([[1.0, nan, nan], [0.0, INF, -INF]]))
    assert counts.tolist() == [2, 0]
