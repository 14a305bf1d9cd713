"""The grammar's bitmask on V1's raw logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.protocol import GrammarOutput
from mrv2lab.runner_v1.grammar import GrammarMask
from mrv2lab.runtime.cpu import CpuRuntime
from tests.sample import oracle

INF = float("inf")


def masked(values: torch.Tensor, rows: dict[str, int], ids: list[str], masks: Any) -> np.ndarray[Any, Any]:
    rt = CpuRuntime()
    wide = rt.empty((len(values), values.shape[1] + 2), values.dtype, name="logits")
    rt.raw(wide).fill_(5.0)
    logits = wide[:, : values.shape[1]]
    rt.raw(logits).copy_(values)
    GrammarMask(rt).apply(logits, rows, GrammarOutput(ids, np.asarray(masks, np.int32)))
    assert (rt.read(wide)[:, values.shape[1] :] == 5).all()
    return rt.read(logits).float().numpy()


def test_bit_0_forbids_and_order_is_the_batchs() -> None:
    values = torch.arange(12.0).view(3, 4)
    # {0, 2} for b, {3} for a; c is free; somebody is gone
    made = masked(values, {"a": 0, "c": 1, "b": 2}, ["b", "gone", "a"], [[[0b0101]], [[0]], [[0b1000]]])
    assert made.tolist() == [[-INF, -INF, -INF, 3], [4, 5, 6, 7], [8, -INF, 10, -INF]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 32, 33, 1000])
def test_masks_equal_the_oracles(vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    values = torch.tensor(rng.normal(size=(5, vocab))).to(dtype)
    mask = rng.integers(-(2**31), 2**31, (3, 2, -(-vocab // 32))).astype(np.int32)
    made = masked(values, {"p": 4, "q": 0, "r": 2}, ["p", "q", "r"], mask)
    want = values.float().numpy()
    for i, row in enumerate((4, 0, 2)):
        want[row] = oracle.grammar(want[row], mask[i, 0])
    np.testing.assert_array_equal(made, want)


def test_nobody_left_launches_nothing() -> None:
    assert masked(torch.zeros(1, 4), {"a": 0}, ["b"], [[[0]]]).tolist() == [[0.0] * 4]


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bitmask is \[1, 1, 2\], not \[1 requests, drafts \+ 1, 1 words"):
        masked(torch.zeros(1, 4), {"a": 0}, ["a"], [[[0, 0]]])
