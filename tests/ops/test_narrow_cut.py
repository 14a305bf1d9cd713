"""Narrowing keeps the cut between the bounds and moves them together; mutants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops._cut import BOUNDS, DONE, NARROW, NEAR, PIVOTS, SEARCH, num_blocks, num_groups
from mrv2lab.ops.narrow_cut import narrow_choose, narrow_sums
from tests.ops.backends import BACKENDS, Apply, Op, caught, implementation, mutant, poisoned, run
from tests.ops.cuts import INF

VOCAB = 4500


def start(p: float, upper: float = INF):
    """One normal row at place 1 of 2 logits rows, entries (done, narrow, search), and the oracle's weights."""
    logits = torch.randn(2, VOCAB + 3, generator=torch.Generator().manual_seed(2))[:, 3:]
    logits[1, :10] = -INF
    x = logits[1].double().numpy()
    w = np.exp(x - x.max())
    bounds = torch.full((3, BOUNDS), float("nan"))
    above = w[x >= upper].sum()
    bounds[1] = torch.tensor([x.max(), p * w.sum(), np.float32(-3.5), upper, above, 1.0])
    group_max = torch.full((3, num_groups(VOCAB)), float("nan"))
    padded = torch.full((num_groups(VOCAB) * 128,), -INF)
    padded[:VOCAB] = logits[1]
    group_max[1] = padded.view(-1, 128).amax(1)
    return logits, bounds, group_max, x, w


def narrowed(sums_op: Op, choose_op: Op, backend, p: float, upper: float = INF, rounds: int = 3) -> None:
    logits, bounds, group_max, x, w = start(p, upper)
    status, rows = torch.tensor([DONE, NARROW, SEARCH]).int(), torch.tensor([0, 1, 0]).int()
    sums = poisoned(3, num_blocks(VOCAB), PIVOTS, dtype=torch.float32)
    width = min(upper, x.max()) + 3.5
    for _ in range(rounds):
        run(sums_op, (sums, status, bounds, logits, rows, group_max), backend)
        run(choose_op, (bounds, status, sums, NARROW), backend)
        _, target, lower, top, above, _ = bounds[1].tolist()
        width /= PIVOTS + 1
        assert min(top, x.max()) - lower == pytest.approx(width, rel=1e-3)
        assert w[x >= top].sum() < target * (1 + 1e-6)
        assert w[x >= lower].sum() >= target * (1 - 1e-6)
        assert above == pytest.approx(w[x >= top].sum(), rel=1e-5)
    assert bounds[[0, 2]].isnan().all()
    assert sums[[0, 2]].isnan().all()
    assert status.tolist() == [DONE, NARROW, SEARCH]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("p", "upper"), [(0.9, INF), (0.5, 2.0), (0.999, 1.0), (0.02, INF)])
def test_narrows(backend, p, upper):
    narrowed(narrow_sums, narrow_choose, backend, p, upper)


def check_equal_logits(apply: Apply) -> None:
    """Nothing to separate: the bounds close in on the one value, and hold it."""
    bounds = torch.tensor([[1.0, 50.0, -2.0, INF, 0.0, 1.0]])
    sums = torch.tensor([[[100.0] * PIVOTS]])
    apply(bounds, torch.tensor([NARROW]).int(), sums, NARROW)
    assert bounds[0].tolist() == [1, 50, pytest.approx(1 - 3 / 9), INF, 0, 1]
    sums = torch.tensor([[[40.0] * PIVOTS]])
    status = torch.tensor([NARROW, DONE]).int()
    apply(bounds, status[:1], sums, NEAR)
    assert status.tolist() == [NEAR, DONE]
    assert bounds[0, 2:].tolist() == [pytest.approx(2 / 3), pytest.approx(2 / 3 + 1 / 27), 40, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits(backend):
    check_equal_logits(implementation(narrow_choose, backend))


SUMS_MUTANTS = {
    "above the upper bound": ("tl.where(x < upper, tl.exp(x - m), 0.0)", "tl.exp(x - m)"),
    "the entry's row": ("tl.load(logits_rows + i).to(tl.int64)", "i * 0"),
    "groups at the bound": ("group_max + i * groups, chunk, lower", "group_max + i * groups, chunk, m"),
    "the first chunk only": ("block * (BLOCK // CHUNK), (block + 1) * (BLOCK // CHUNK))", "block * 4, block * 4 + 1)"),
    "other rows": ("!= NARROW:\n        return\n    m = tl.load(bounds + i * BOUNDS)\n    low",
                   "== 99:\n        return\n    m = tl.load(bounds + i * BOUNDS)\n    low"),
}  # fmt: skip
CHOOSE_MUTANTS = {
    "one too low": ("tl.where(way == reached - 1, pivots, 0.0)", "tl.where(way == reached, pivots, 0.0)"),
    "above of the lower": ("tl.where(way == reached, totals, 0.0)", "tl.where(way == reached - 1, totals, 0.0)"),
    "the status left": ("    tl.store(status + i, mark)\n", ""),
    "above forgotten": ("totals = above + tl.sum(", "totals = tl.sum("),
}


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", [*SUMS_MUTANTS, *CHOOSE_MUTANTS])
def test_mutants(name, tmp_path):
    pair = {"narrow_sums": narrow_sums, "narrow_choose": narrow_choose}
    old, new = (SUMS_MUTANTS | CHOOSE_MUTANTS)[name]
    made = mutant(narrow_sums if name in SUMS_MUTANTS else narrow_choose, old, new, tmp_path)
    pair[made.name] = made
    assert caught(lambda _: narrowed(*pair.values(), "interpret", 0.5, 2.0), lambda *args: None) or caught(
        check_equal_logits, implementation(pair["narrow_choose"], "interpret")
    )
