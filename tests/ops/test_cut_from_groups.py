"""What the groups suffice for and what they do not, by the status they leave; mutants."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops._cut import DONE, NARROW, SEARCH
from mrv2lab.ops.cut_from_groups import cut_from_groups
from mrv2lab.ops.narrow_cut import narrow_choose
from mrv2lab.ops.search_cut import search_cut
from tests.ops.backends import BACKENDS, caught, mutant
from tests.ops.cuts import INF, Now, assert_cuts, find, odd_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # inf - inf, unused
KERNELS = BACKENDS[1:]
V = 10**9


class First(Now):
    """Runs the pass and the op under test, nothing behind it."""

    def kernel(self, op, *args):
        if op.name in ("logit_groups", "cut_from_groups"):
            super().kernel(op, *args)


def randn(rows, vocab, scale=1.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def check_decided(rt: Now) -> None:
    """Top-k up to the listed groups, and nuclei that lie in them, are decided here; ties, few and no finite logits."""
    logits = torch.cat([randn(3, 2000), odd_rows(2000)[[1, 2, 3, 4, 5, 6]]])
    logits[1] *= 30
    ks, ps = [3, V, 4, V, 2, V, 5, 3, 3], [0.9, 0.9, 1.0, 1.0, 0.5, 0.01, 0.9, 1.0, 0.5]
    found = find(rt, logits, ks, ps, listed=16, candidates=1024)
    assert found.status.tolist() == [DONE] * 9
    assert_cuts(logits, ks, ps, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decided(backend):
    check_decided(First(backend))


@pytest.mark.parametrize("backend", KERNELS)
def test_left_to_others(backend):
    """A nucleus outside the groups is bracketed; k beyond the list, and masses of ties, are searched."""
    logits = randn(4, 3000)
    logits[2:] = 1.0
    found = find(First(backend), logits, [V, 9, 4, V], [0.9, 0.9, 1.0, 0.5], listed=8, candidates=32)
    assert found.status.tolist() == [NARROW, SEARCH, SEARCH, NARROW]
    m, target, lower, upper, above, t = found.bounds[0].tolist()
    x = logits[0].double()
    w = (x - x.max()).exp()
    assert m == x.max().item()
    assert t == 1
    assert target == pytest.approx(0.9 * w.sum().item(), rel=1e-6)
    assert above == pytest.approx(w[x >= upper].sum().item(), rel=1e-6)
    assert above < target <= w[x >= lower].sum().item()
    assert lower < upper < m
    assert found.bounds[3, 3:].tolist() == [INF, 0, 1]  # nothing is known above


@pytest.mark.parametrize("backend", KERNELS)
def test_every_k_up_to_the_list_is_decided(backend):
    for vocab, listed in ((1500, 12), (300, 3)):
        logits = randn(1, vocab, seed=vocab)
        for k in range(1, listed + 1, 2 if listed > 5 else 1):
            found = find(First(backend), logits, [k], [1.0], listed=listed, candidates=512)
            assert found.status.tolist() == [DONE]
            assert_cuts(logits, [k], [1.0], found)


def check_whole(rt: Now) -> None:
    """Exactly k candidates of a row that has more finite logits: a cut all the same."""
    logits = torch.full((1, 1000), -5.0)
    logits[0, [130, 700, 900]] = torch.tensor([3.0, 2.0, 1.0])
    assert_cuts(logits, [3], [1.0], find(rt, logits, [3], [1.0], listed=4, candidates=8))


def check_renormalised(rt: Now) -> None:
    """Top-p is a share of what top-k kept: of 3 and 2 with k = 2, 3 alone has 0.73."""
    logits = torch.tensor([[3.0, 2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4]])
    found = find(rt, logits, [2], [0.7])
    assert found.cut_id.tolist() == [0]
    assert find(rt, logits, [V], [0.7]).cut_id.item() == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", [check_whole, check_renormalised])
def test_rules(backend, check):
    check(Now(backend))


MUTANTS = {
    "no cut of exactly k": ("(found > k) | (whole == 0)", "(found > k)", check_whole),
    "k of all V": ("by_k | whole, sum_of_kept, total", "whole, sum_of_kept, total", check_decided),
    "a group too few": ("want = tl.where(by_k, k, nucleus)", "want = tl.where(by_k, k - 1, nucleus)", check_whole),
    "-inf is a candidate": ("0x00800000, tl.uint32", "0x007FFFFF, tl.uint32", check_decided),
    "all ties at k": ("(tl.cumsum(tie.to(tl.int32), axis=0) <= need))\n        if", "(tie == tie))\n        if",
                      check_decided),
    "p of the sum of all": ("target = p * total", "target = p * (total + 1.0)", check_renormalised),
    "top-p ignores top-k": ("tl.where(kept, weight(x, m)", "tl.where(c < found, weight(x, m)", check_renormalised),
    "the first of the cut's ties": ("tl.max(tl.where(kept & (x == least), token, -1)",
                                    "tl.min(tl.where(kept & (x == least), token, 9999)", check_decided),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, tmp_path):
    old, new, check = MUTANTS[name]
    rt = First("interpret", (mutant(cut_from_groups, old, new, tmp_path),))
    assert caught(lambda _: check(rt), lambda *args: None)


def test_the_spec_decides_everything():
    logits, rt = randn(2, 3000), Now("spec")
    found = find(rt, logits, [V, 9], [0.9, 0.9], listed=8, candidates=32)
    assert found.status.tolist() == [DONE] * 2
    assert {op.name for op in (narrow_choose, search_cut)} <= set(rt.launched)
