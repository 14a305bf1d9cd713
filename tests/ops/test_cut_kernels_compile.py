"""The kernels of top-k, top-p and log-probabilities compile for an H200 on a machine without a GPU, at full size."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from mrv2lab.ops.cut_from_groups import cut_from_groups
from mrv2lab.ops.gumbel import gumbel_blocks
from mrv2lab.ops.gumbel_cut import gumbel_cut_blocks
from mrv2lab.ops.list_near import list_near
from mrv2lab.ops.logit_groups import logit_groups
from mrv2lab.ops.logprobs import row_logprobs, token_logprobs
from mrv2lab.ops.narrow_cut import narrow_choose, narrow_sums
from mrv2lab.ops.search_cut import search_cut
from mrv2lab.ops.top_k_top_p import apply_cut
from mrv2lab.ops.topk_ids import topk_ids
from mrv2lab.sample.cut_buffers import CutBuffers
from tests.ops.backends import compile_for_gpu
from tests.ops.cuts import Now
from tests.slow import mostly_slow

OPS = [
    logit_groups, cut_from_groups, narrow_sums, narrow_choose, list_near, search_cut, apply_cut, topk_ids,
    gumbel_blocks, gumbel_cut_blocks, token_logprobs, row_logprobs,
]  # fmt: skip


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


def compiled(op, dtype, cache, vocab=151_936):
    """PTX."""
    n = 2
    b = CutBuffers.make(Now("spec"), "", n, vocab, listed=512, candidates=1024, narrow=True)  # type: ignore[arg-type]
    logits, at, tokens = torch.empty(n, vocab, dtype=dtype), torch.zeros(n).int(), torch.zeros(n, dtype=torch.int64)
    ids, values, out, p = torch.empty(n, 21).int(), torch.empty(n, 21), torch.empty(n, vocab), torch.ones(n)
    rows = (logits, at, at)
    args = {
        "logit_groups": (b.group_max, b.block_max, b.block_sum, b.block_count, *rows, tokens, True, p),
        "cut_from_groups": (b.cut_value, b.cut_id, b.status, b.bounds, b.listed, b.candidates, *rows, b.group_max,
                            b.block_max, b.block_sum, at, p, p),
        "narrow_sums": (b.sums, b.status, b.bounds, logits, at, b.group_max),
        "narrow_choose": (b.bounds, b.status, b.sums, 3),
        "list_near": (b.near, b.near_count, b.status, b.bounds, logits, at, b.group_max, 3),
        "search_cut": (b.cut_value, b.cut_id, b.status, b.bounds, b.candidates, b.near, b.near_count, *rows,
                       b.group_max, at, p),
        "gumbel_blocks": (values, ids, logits, at, p, tokens, tokens, tokens, True),
        "gumbel_cut_blocks": (values, ids, logits, at, p, tokens, tokens, tokens, b.cut_value, b.cut_id, b.group_max),
        "apply_cut": (logits, at, b.group_max, b.cut_value, b.cut_id),
        "topk_ids": (ids, b.listed, b.candidates, logits, at, tokens, at, b.group_max, b.cut_value, b.cut_id),
        "token_logprobs": (values, at, ids, logits, at, b.block_max, b.block_sum, b.block_count, False),
        "row_logprobs": (out, logits, at, at, b.block_max, b.block_sum, False),
    }  # fmt: skip
    return compile_for_gpu(op, args[op.name], cache)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_compiles_for_sm_90(op, dtype, tmp_path):
    assert "ld.global" in compiled(op, dtype, tmp_path)


@pytest.mark.parametrize("op", mostly_slow([row_logprobs, *(op for op in OPS if op is not row_logprobs)], 1))
def test_every_lane_has_the_same_sum(op, tmp_path):
    """A product fused into the exchange between lanes is rounded for one lane of a pair and not for the other. Their
    sums differ by an ulp then, and equal logits get different log-probabilities, or a branch parts a warp."""
    ptx = compiled(op, torch.bfloat16, tmp_path, 49_152)  # 24 blocks: one a lane
    received = set(re.findall(r"shfl\.sync\.\w+\.b32\s+(%\w+)", ptx))
    fused = {c for *_, c in re.findall(r"fma\.rn(?:\.ftz)?\.f32\s+%\w+, (\S+), (\S+), (%\w+);", ptx)}
    assert not fused & received
