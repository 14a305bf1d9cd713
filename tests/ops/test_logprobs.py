"""Log-probabilities of chosen tokens and of whole rows against float64; ranks; odd rows; mutants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops._cut import num_blocks, num_groups
from mrv2lab.ops.logit_groups import logit_groups
from mrv2lab.ops.logprobs import row_logprobs, token_logprobs
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.cuts import INF, NAN
from tests.sample import oracle

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # inf - inf, unused


def passed(logits, rows, tokens):
    """block_max, block_sum, block_count of the entries, by the spec."""
    n, vocab = len(rows), logits.shape[1]
    blocks = [torch.zeros(n, num_blocks(vocab)) for _ in range(2)] + [torch.full((n, num_blocks(vocab)), 5).int()]
    group_max, at = torch.zeros(n, num_groups(vocab)), torch.tensor(rows).int()
    logit_groups.execute("spec", (group_max, *blocks, logits, at, at, torch.tensor(tokens), True, None))
    return blocks


def chosen(apply: Apply, logits, rows, ids, as_logits=False):
    """values and ranks of ids [n][1 + K]; column 0 is each row's token."""
    tokens = [0] * len(logits)
    for row, (token, *_) in zip(rows, ids, strict=True):
        if row >= 0:
            tokens[row] = token
    ids = torch.tensor(ids).int()
    values, ranks = poisoned(*ids.shape, dtype=torch.float32), poisoned(len(rows))
    apply(values, ranks, ids, logits, torch.tensor(rows).int(), *passed(logits, rows, tokens), as_logits)
    return values, ranks


def check_values(apply: Apply, dtype=torch.float32) -> None:
    logits = (torch.randn(3, 2505, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)[:, 5:]
    logits[2, :100], logits[2, 200] = -INF, NAN
    rows = [2, 0]
    ids = [[7, 2300, 200, 900], [2499, 3, -1, -1]]
    for as_logits in (False, True):
        values, ranks = chosen(apply, logits, rows, ids, as_logits)
        for i, row in enumerate(rows):
            x = oracle.clean(logits[row].float().numpy())
            want = x if as_logits else oracle.log_softmax(x)
            given = [token for token in ids[i] if token >= 0]
            np.testing.assert_allclose(values[i, : len(given)].numpy(), want[given], rtol=1e-5)
            assert values[i, len(given) :].tolist() == [-INF] * (4 - len(given))
            assert ranks[i] == oracle.rank(x, ids[i][0])


def check_odd(apply: Apply) -> None:
    """Ties count against a token; rows of -inf and +inf; padding; a token of -1."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [-INF] * 4, [INF, 1.0, INF, 1.0], [0.0, 0.0, 0.0, 0.0]])
    values, ranks = chosen(apply, logits, [0, 1, 2, -1, 3], [[2, 1], [0, -1], [2, 1], [-1, -1], [-1, 3]])
    assert ranks.tolist() == [3, 4, 2, 0, 0]
    np.testing.assert_allclose(values[0], np.log(1 / (3 + np.exp(-2))), rtol=1e-6)
    assert values[1].tolist() == [-INF, -INF]
    assert values[2].tolist() == [pytest.approx(np.log(0.5)), -INF]
    assert values[3].tolist() == [-INF, -INF]
    assert values[4].tolist() == [-INF, pytest.approx(np.log(0.25))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_values(backend, dtype):
    check_values(implementation(token_logprobs, backend), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd(backend):
    check_odd(implementation(token_logprobs, backend))


def whole(apply: Apply, logits, rows, which, as_logits=False):
    """float32[w, V + 2], of which the op was given [w, V]."""
    out = poisoned(len(which), logits.shape[1] + 2, dtype=torch.float32)
    block_max, block_sum, _ = passed(logits, rows, [0] * len(logits))
    at = torch.tensor(rows).int(), torch.tensor(which).int()
    apply(out[:, :-2], logits, *at, block_max, block_sum, as_logits)
    return out


def check_whole_rows(apply: Apply) -> None:
    """mrv2.md #40: every token's value, in the order of ids, within the buffer that was given."""
    logits = torch.randn(3, 2500, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, 4], logits[1, 5] = -INF, NAN
    for as_logits in (False, True):
        out = whole(apply, logits, [2, -1, 1], [2, -1, 0], as_logits)
        for j, row in ((0, 1), (2, 2)):
            x = oracle.clean(logits[row].numpy())
            want = x if as_logits else oracle.log_softmax(x)
            np.testing.assert_allclose(out[j, :-2].numpy(), want, rtol=1e-5)
        assert out[1].isnan().all()
        assert out[:, -2:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_rows(backend):
    check_whole_rows(implementation(row_logprobs, backend))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_whole_row_into_pinned_memory():
    vocab = 151_936
    logits = torch.randn(2, vocab, device="cuda") * 3
    out = torch.empty(1, vocab, pin_memory=True)
    block_max, block_sum, _ = passed(logits.cpu(), [1], [0, 0])
    at = torch.tensor([1]).int().cuda(), torch.tensor([0]).int().cuda()
    row_logprobs.execute("triton", (out, logits, *at, block_max.cuda(), block_sum.cuda(), False))
    torch.cuda.synchronize()
    np.testing.assert_allclose(out[0].numpy(), oracle.log_softmax(logits[1].cpu().double().numpy()), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_equal_logits_have_equal_logprobs_on_a_gpu():
    """Whichever lane computes them: the host orders by them, ties to the lowest ids."""
    n, vocab = 64, 49_152
    logits = (torch.randn(n, vocab, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    block_max, block_sum, _ = passed(logits, list(range(n)), [0] * n)
    out, at = torch.empty(n, vocab, device="cuda"), torch.arange(n).int().cuda()
    row_logprobs.execute("triton", (out, logits.cuda(), at, at, block_max.cuda(), block_sum.cuda(), False))
    for x, got in zip(logits.float().numpy(), out.cpu().numpy(), strict=True):
        _, first, group = np.unique(x, return_index=True, return_inverse=True)
        assert (got == got[first][group]).all()


TOKEN_MUTANTS = {
    "the entry's row": ("    row = tl.load(logits_rows + i).to(tl.int64)\n    column", "    row = i\n    column",
                        check_values),
    "the rank of padding": ("tl.where(chosen >= 0, rank, 0)", "rank", check_odd),
    "inf - inf": ("tl.where(x == m, 0.0, x - m)", "(x - m)", check_odd),
    "-inf - -inf": ("tl.where(x == float(\"-inf\"), x, tl.where(x == m, 0.0, x - m) - tl.log(total))",
                    "tl.where(x == m, 0.0, x - m) - tl.log(total)", check_odd),
    "no maximum": ("weight(maxima, m), axis=0)", "1.0, axis=0)", check_values),
    "absent ids": ("mask=token >= 0, other", "mask=token >= -1, other", check_values),
}  # fmt: skip
ROW_MUTANTS = {
    "the place's row": ("tl.load(which + j).to(tl.int64)", "j", check_whole_rows),
    "a column too far": ("tl.store(out + j * out_stride + token, x, mask=token < vocab)",
                         "tl.store(out + j * out_stride + token, x, mask=token <= vocab)", check_whole_rows),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", [*TOKEN_MUTANTS, *ROW_MUTANTS])
def test_mutants(name, tmp_path):
    old, new, check = (TOKEN_MUTANTS | ROW_MUTANTS)[name]
    op = token_logprobs if name in TOKEN_MUTANTS else row_logprobs
    assert caught(check, implementation(mutant(op, old, new, tmp_path), "interpret"))
