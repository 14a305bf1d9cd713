"""The k most likely tokens in order, behind the chosen one: ties, few finite logits, padding, offsets; mutants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.topk_ids import topk_ids
from tests.ops.backends import BACKENDS, caught, mutant, poisoned
from tests.ops.cuts import INF, NAN, Now, find, odd_rows
from tests.sample import oracle
from tests.slow import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # inf - inf, unused


def top_ids(rt: Now, logits, tops, tokens, columns, rows=None, candidates=64):
    """int32[n, columns]: find the cuts, then the ids."""
    n, device = len(tops), rt.device
    found = find(rt, logits, tops, [1.0] * n, rows=rows, listed=columns + 1, candidates=candidates, narrow=False)
    at = torch.tensor(range(n) if rows is None else rows, dtype=torch.int32, device=device)
    ids = poisoned(n, columns).to(device)
    given = torch.tensor(tokens, device=device), torch.tensor(tops, dtype=torch.int32, device=device)
    scratch = found.listed, found.candidates
    rt.kernel(topk_ids, ids, *scratch, logits.to(device), at, *given, found.group_max, found.cut_value, found.cut_id)
    return ids.tolist()


def want(row, k, token, columns):
    x = oracle.clean(row.float().numpy())
    best = [int(t) for t in oracle.best_first(x)[:k] if x[t] > -INF]
    return [token, *best, *[-1] * (columns - 1 - len(best))]


def check_rows(rt: Now, vocab=1500, dtype=torch.float32) -> None:
    logits = odd_rows(vocab).to(dtype)
    for k in (1, 5, 20):
        got = top_ids(rt, logits, [k] * 8, list(range(8)), 21)
        assert got == [want(row, k, token, 21) for token, row in enumerate(logits)]


def check_literal(rt: Now) -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 9.0, 4.0], [NAN, -INF, 7.0, -INF, -INF], [0.0, -0.0, 0.0, 1.0, 1.0]])
    got = top_ids(rt, logits, [3, 4, 0, 2, 4], [2, 0, 1], 5, rows=[0, 1, 0, -1, 2])
    assert got == [
        [2, 3, 1, 2, -1],  # 4.0 three times: the lowest ids
        [0, 2, -1, -1, -1],  # one finite logit
        [2, -1, -1, -1, -1],  # nothing but the token itself
        [-1, -1, -1, -1, -1],  # padding
        [1, 3, 4, 0, 1],
    ]


def check_ties_in_many_groups(rt: Now) -> None:
    """Flat rows: every group's maximum ties with the cut, and only k + 1 of them may be listed."""
    logits = torch.full((2, 4000), 2.5)
    logits[1, 3000] = 3.0
    got = top_ids(rt, logits, [6, 6], [9, 9], 7, candidates=8)
    assert got == [[9, 0, 1, 2, 3, 4, 5], [9, 3000, 0, 1, 2, 3, 4]]
    apart = torch.arange(4000).float()[None] * 0 - 1.0
    apart[0, ::128] = 1.0
    assert top_ids(rt, apart, [5], [0], 6, candidates=8) == [[0, 0, 128, 256, 384, 512]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", [check_rows, check_literal, check_ties_in_many_groups])
def test_ids(backend, check):
    check(Now(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", mostly_slow([7, 300], 1))
def test_small_vocabularies(backend, vocab):
    check_rows(Now(backend), vocab, torch.float16)


MUTANTS = {
    "ties to the later": ("d[None, :] < c[:, None]", "d[None, :] > c[:, None]", check_literal),
    "least first": ("theirs[None, :] > key[:, None]", "theirs[None, :] < key[:, None]", check_literal),
    "all groups of the cut's value": ("((largest == value) & (group * GROUP <= last))", "(largest == value)",
                                      check_ties_in_many_groups),
    "a group that starts at the cut": ("group * GROUP <= last", "group * GROUP < last", check_ties_in_many_groups),
    "all ties": ("(x == value) & (token_of_lane <= last)", "(x == value)", check_literal),
    "-inf listed": ("hit = (x > float(\"-inf\")) & (", "hit = real & (", check_literal),
    "the rest unwritten": ("(column > found) & (column < columns)", "(column > found) & (column < found)",
                           check_literal),
    "the entry's token": ("tl.store(out, tl.load(tokens + row)", "tl.store(out, tl.load(tokens + i)", check_literal),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", mostly_slow(MUTANTS, 3))
def test_mutants(name, tmp_path):
    old, new, check = MUTANTS[name]
    rt = Now("interpret", (mutant(topk_ids, old, new, tmp_path),))
    assert caught(lambda _: check(rt), lambda *args: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_gpu(dtype):
    vocab = 151_936
    logits = torch.cat([odd_rows(vocab), torch.randn(24, vocab, generator=torch.Generator().manual_seed(8))]).to(dtype)
    tops = [20] * 30 + [64, 1]
    got = np.array(top_ids(Now("triton"), logits, tops, [5] * 32, 65, candidates=256))
    assert got.tolist() == [want(row, k, 5, 65) for row, k in zip(logits, tops, strict=True)]
