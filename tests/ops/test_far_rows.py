"""mrv2.md 39 for the ops that edit logits: a row 2^31 + 16 elements behind the base is found; one that an int32 offset
would reach instead, in memory that exists only where it is touched, stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.ops._op import Op
from mrv2lab.ops.bad_words import bad_words
from mrv2lab.ops.cast_logits import cast_logits
from mrv2lab.ops.grammar_mask import grammar_mask
from mrv2lab.ops.logit_bias import logit_bias
from mrv2lab.ops.min_p import min_p_blocks, min_p_mask
from mrv2lab.ops.nan_count import nan_count
from mrv2lab.ops.penalties import apply_penalties
from tests.ops.backends import BACKENDS, INTERPRET, caught, implementation, mutant
from tests.ops.test_count_tokens import int32

INF, NAN = float("inf"), float("nan")
FAR = int32([-1, -1, 0])
ZERO, ZEROS = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)


def far_logits(dtype: torch.dtype) -> torch.Tensor:
    """[3, 3] with a row stride of 2^30 + 8; the wrapped offset of row 2 lies inside the same memory."""
    try:
        memory = torch.from_numpy(np.zeros((2**32 + 64) * dtype.itemsize, np.int8)).view(dtype)
    except MemoryError:
        pytest.skip("17 GB cannot be reserved here, not even unwritten")
    return memory.as_strided((3, 3), (2**30 + 8, 1), storage_offset=2**31)


def in_place(
    op: Op, dtype: torch.dtype, args: Callable[[torch.Tensor], tuple[Any, ...]], want: list[float]
) -> tuple[Op, Callable[[Any], None]]:
    """The far row is 1, 2, 3 before and ``want`` after."""

    def check(apply: Any) -> None:
        logits = far_logits(dtype)
        logits[2] = torch.tensor([1.0, 2.0, 3.0])
        apply(*args(logits))
        assert logits[2].tolist() == want

    return op, check


def check_cast(apply: Any) -> None:
    logits, out = far_logits(torch.float16), torch.full((3, 3), 7.0)
    logits[2, 1] = 5
    apply(out, logits, FAR)
    assert out.tolist() == [[7] * 3, [7] * 3, [0, 5, 0]]


def check_nan(apply: Any) -> None:
    logits, out = far_logits(torch.float16), int32([7] * 3)
    logits[2, 1] = NAN
    apply(out, logits, FAR)
    assert out.tolist() == [0, 0, 1]


def check_blocks(apply: Any) -> None:
    logits, out, groups = far_logits(torch.float16), torch.full((3, 1), 7.0), torch.full((3, 1), 7.0)
    logits[2, 1] = 5
    apply(out, groups, logits, FAR, torch.zeros(1))
    assert out.tolist() == groups.tolist() == [[7], [7], [5]]


HALF, FULL = torch.float16, torch.float32
none, one = int32([[2]]), int32([1])
CASES: dict[str, tuple[Op, Callable[[Any], None]]] = {
    "cast": (cast_logits, check_cast),
    "nan": (nan_count, check_nan),
    "min_p_blocks": (min_p_blocks, check_blocks),
    "min_p_mask": in_place(
        min_p_mask, HALF, lambda x: (x, *[torch.full((3, 1), 3.0)] * 2, FAR, torch.tensor([-1.0])), [-INF, 2, 3]
    ),
    "grammar": in_place(grammar_mask, HALF, lambda x: (x, int32([[0b101]]), int32([2])), [1, -INF, 3]),
    "bias": in_place(
        logit_bias,
        FULL,
        lambda x: (x, FAR, ZERO, ZEROS, int32([[0, 1, 0, 0, 0]]), none, none, torch.ones(1, 1), none),
        [1, 2, 4],
    ),
    "penalties": in_place(
        apply_penalties,
        FULL,
        lambda x: (
            x, FAR, ZEROS.int(), ZEROS, int32([0]), torch.ones(1), torch.ones(1), torch.zeros(1), int32([[0]]),
            int32([[0, 0, 1]]),
        ),
        [1, 2, 2],
    ),
    "bad_words": in_place(
        bad_words,
        HALF,
        lambda x: (
            x, FAR, ZEROS.int(), ZEROS, int32([0]), int32([[0]]), one, one, int32([[2]]), int32([[0, 1]]), one, 1
        ),
        [1, 2, -INF],
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("case", CASES)
def test_far_row(backend, case):
    op, check = CASES[case]
    check(implementation(op, backend))


@pytest.mark.parametrize("backend", [INTERPRET])
@pytest.mark.parametrize("case", CASES)
def test_int32_offsets_are_caught(backend, case, tmp_path):
    op, check = CASES[case]
    right, wrapped = "logits + row * stride + token", "logits + (row * stride).to(tl.int32) + token"
    if case == "bias":
        right, wrapped = "logits += row * stride", "logits += (row * stride).to(tl.int32)"
    before = {"min_p_blocks": "x = tl.load(", "min_p_mask": "raw = tl.load("}.get(case, "")
    source = before + right, before + wrapped
    assert caught(check, implementation(mutant(op, *source, tmp_path), backend))
