"""The kernels that edit logits compile for sm_90, where no GPU is: half-precision raw logits and float32 ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrv2lab.ops._op import Op
from mrv2lab.ops.bad_words import bad_words
from mrv2lab.ops.cast_logits import cast_logits
from mrv2lab.ops.count_tokens import count_history, count_sampled, zero_counts
from mrv2lab.ops.grammar_mask import grammar_mask
from mrv2lab.ops.logit_bias import logit_bias
from mrv2lab.ops.min_p import min_p_blocks, min_p_mask, min_p_threshold
from mrv2lab.ops.nan_count import nan_count
from mrv2lab.ops.output_tokens import output_tokens
from mrv2lab.ops.penalties import apply_penalties
from tests.ops.backends import compile_for_gpu

N, R, V, L = 3, 2, 151_936, 64
FULL, HALF = torch.empty(N, V), torch.empty(N, V, dtype=torch.bfloat16)
PER_ROW, POSITIONS, TABLE = torch.empty(N).int(), torch.empty(N).long(), torch.empty(R).int()
IDS, TOKENS, SCALE = torch.empty(N).int(), torch.empty(R, L).int(), torch.empty(R)
MASK, COUNTS = torch.empty(R, V // 32).int(), torch.empty(R, V).int()
WIDE, FLOATS, STOPS = torch.empty(R, 1024).int(), torch.empty(R, 1024), torch.empty(R, 128).int()
BLOCKS, GROUPS = torch.empty(N, 38), torch.empty(N, 1187)

CASES: dict[str, tuple[Op, tuple[Any, ...]]] = {
    "cast": (cast_logits, (FULL, HALF, PER_ROW)),
    "nan": (nan_count, (PER_ROW, HALF, PER_ROW)),
    "grammar": (grammar_mask, (HALF, torch.empty(N, V // 32).int(), PER_ROW)),
    "bias": (logit_bias, (FULL, PER_ROW, POSITIONS, POSITIONS, torch.empty(R, 5).int(), WIDE, WIDE, FLOATS, STOPS)),
    "zero": (zero_counts, (TABLE, MASK, COUNTS)),
    "history": (count_history, (TABLE, TOKENS, TABLE, TABLE, MASK, COUNTS, 50)),
    "sampled": (count_sampled, (TABLE, torch.empty(R, 5).long(), TABLE, SCALE, SCALE, SCALE, COUNTS)),
    "penalties": (apply_penalties, (FULL, PER_ROW, PER_ROW, POSITIONS, IDS, SCALE, SCALE, SCALE, MASK, COUNTS)),
    "bad_words": (
        bad_words,
        (FULL, PER_ROW, PER_ROW, POSITIONS, IDS, TOKENS, TABLE, TABLE, WIDE, torch.empty(R, 129).int(), TABLE, 9),
    ),
    "min_p_blocks": (min_p_blocks, (BLOCKS, GROUPS, FULL, PER_ROW, SCALE)),
    "min_p_mask": (min_p_mask, (FULL, BLOCKS, GROUPS, PER_ROW, SCALE)),
    "min_p_threshold": (min_p_threshold, (torch.empty(N), BLOCKS, PER_ROW, SCALE, SCALE)),
    "output_tokens": (
        output_tokens,
        (IDS, PER_ROW, PER_ROW, PER_ROW, PER_ROW, POSITIONS, IDS, TOKENS, TABLE, 50),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles(case, tmp_path):
    pytest.importorskip("triton")
    op, args = CASES[case]
    assert ".target sm_90" in compile_for_gpu(op, args, tmp_path)
