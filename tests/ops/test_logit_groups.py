"""One pass's maxima, sums and counts: values, padding, indirection, strides, odd rows, offsets, mutants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops._cut import num_blocks, num_groups
from mrv2lab.ops.logit_groups import logit_groups
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.cuts import INF, NAN
from tests.sample import oracle

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # inf - inf, unused


def groups(apply: Apply, logits, rows, mapping, tokens=None):
    """group_max, block_max, block_sum, block_count, each poisoned before."""
    n, vocab = len(rows), logits.shape[1]
    out = (
        poisoned(n, num_groups(vocab), dtype=torch.float32),
        poisoned(n, num_blocks(vocab), dtype=torch.float32),
        poisoned(n, num_blocks(vocab), dtype=torch.float32),
        poisoned(n, num_blocks(vocab)),
    )
    given = torch.zeros(len(logits), dtype=torch.int64) if tokens is None else torch.tensor(tokens)
    rows, mapping = torch.tensor(rows).int(), torch.tensor(mapping).int()
    apply(*out, logits, rows, mapping, given, tokens is not None, None)
    return out


def check_against_float64(apply: Apply, dtype=torch.float32, vocab=4500) -> None:
    logits = (torch.randn(3, vocab + 7, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[:, 4:-3]
    logits[0, 100] = NAN
    logits[0, :50] = -INF
    rows, tokens = [2, 0], [200 % vocab, 3, vocab - 1]
    group_max, block_max, block_sum, block_count = groups(apply, logits, rows, [0, 5], tokens)
    for i, row in enumerate(rows):
        x = oracle.clean(logits[row].float().numpy())
        assert group_max[i].tolist() == [x[at : at + 128].max() for at in range(0, vocab, 128)]
        blocks = [x[at : at + 2048] for at in range(0, vocab, 2048)]
        assert block_max[i].tolist() == [block.max() for block in blocks]
        want = [np.exp(block - block.max()).sum() for block in blocks]
        np.testing.assert_allclose(block_sum[i].numpy(), want, rtol=2e-6)
        assert block_count[i].tolist() == [(block >= x[tokens[row]]).sum() for block in blocks]


def check_odd(apply: Apply) -> None:
    """Padding rows keep what was there, without count nothing is counted, a token of -1 counts 0."""
    logits = torch.tensor([[NAN, -INF, -INF], [INF, 1.0, INF], [0.0, -0.0, -1.0]])
    group_max, block_max, block_sum, block_count = groups(apply, logits, [0, 1, -1, 2, 2], [0, 0, 0, -1, 7])
    assert group_max[[0, 1, 4], 0].tolist() == [-INF, INF, 0]
    assert block_max[[0, 1, 4], 0].tolist() == [-INF, INF, 0]
    assert block_sum[:2, 0].tolist() == [0, 2]
    assert block_sum[4, 0].item() == pytest.approx(2 + np.exp(-1))
    assert group_max[[2, 3], 0].isnan().all()
    assert block_sum[[2, 3], 0].isnan().all()
    assert block_count.tolist() == poisoned(5, 1).tolist()
    counts = groups(apply, logits, [0, 1, 2, 0, 2], [0, 0, 0, -1, 0], [0, -1, 1])[3]
    assert counts[:3, 0].tolist() == [3, 0, 2]  # NaN counts as -inf, which all three reach


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("vocab", [101, 4500])
def test_against_float64(backend, dtype, vocab):
    check_against_float64(implementation(logit_groups, backend), dtype, vocab)


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd(backend):
    check_odd(implementation(logit_groups, backend))


def check_far_row(apply: Apply) -> None:
    """mrv2.md #39: row 2 starts 2^31 + 16 elements behind the base, which lies in the middle of 4 GB that exist only
    where written: an offset that wraps reads zeros."""
    memory = torch.from_numpy(np.zeros(2**32 + 64, np.int8))
    logits = memory.as_strided((3, 3), (2**30 + 8, 1), storage_offset=2**31)
    logits[2, 1] = 5
    group_max, _, _, count = groups(apply, logits, [2], [0], [0, 0, 1])
    assert group_max.tolist() == [[5]]
    assert count.tolist() == [[1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_2_to_31(backend):
    check_far_row(implementation(logit_groups, backend))


MUTANTS = {
    "the entry's row": ("tl.load(logits_rows + i).to(tl.int64)", "i", check_against_float64),
    "the entry's token": ("tl.load(tokens + row)", "tl.load(tokens + i)", check_against_float64),
    "above, not at least": ("(x >= value)", "(x > value)", check_against_float64),
    "sum of nothing": ("tl.where(m == float(\"-inf\"), 0.0, total)", "total", check_odd),
    "padding read": ("(row < 0) | (index < 0)", "row < 0", check_odd),
    "the tail counts": ("(inside & (x >= value)", "((x >= value)", check_odd),
    "a token of -1 counts": ("(x >= value) & (chosen >= 0)", "(x >= value)", check_odd),
    "int32 offsets": ("logits + row * stride + token, mask", "logits + (row * stride).to(tl.int32) + token, mask",
                      check_far_row),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, tmp_path):
    old, new, check = MUTANTS[name]
    assert caught(check, implementation(mutant(logit_groups, old, new, tmp_path), "interpret"))
