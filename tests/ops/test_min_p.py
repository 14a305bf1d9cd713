"""min-p: A10 by hand, against the oracle, ties at the threshold, rows without it, -inf, +inf and NaN rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mrv2lab.ops.argmax import num_blocks
from mrv2lab.ops.min_p import apply_min_p, min_p_blocks, min_p_cut, min_p_mask, min_p_threshold, num_groups
from tests.ops.backends import BACKENDS, CPU_BACKENDS, caught, mutant, poisoned
from tests.ops.floats import randn
from tests.ops.test_argmax import Now
from tests.sample import oracle

INF, NAN = float("inf"), float("nan")


class Swapped(Now):
    """Runs a mutant in place of the op of the same name."""

    def __init__(self, backend, buggy):
        super().__init__(backend)
        self.buggy = buggy

    def kernel(self, op, *args):
        super().kernel(self.buggy if op.name == self.buggy.name else op, *args)


def logs(*min_p: float) -> torch.Tensor:
    return torch.tensor([math.log(p) if p else -INF for p in min_p])


def masked(rt, logits, min_p, mapping=None, block=4096):
    """The mask in place, and by the cut; they must agree."""
    mapping = torch.arange(len(logits), dtype=torch.int32) if mapping is None else torch.tensor(mapping).int()
    blocks = num_blocks(logits.shape[1], block)
    local_max = poisoned(len(logits), blocks, dtype=torch.float32)
    group_max = poisoned(len(logits), num_groups(logits.shape[1], blocks), dtype=torch.float32)
    cut = poisoned(len(logits), dtype=torch.float32)
    min_p_cut(rt, cut, local_max, group_max, logits, mapping, logs(*min_p))
    by_cut = torch.where(logits >= cut[:, None], logits, -INF)
    local_max, group_max = (poisoned(*part.shape, dtype=torch.float32) for part in (local_max, group_max))
    apply_min_p(rt, logits, local_max, group_max, mapping, logs(*min_p))
    off = [i for i, index in enumerate(mapping.tolist()) if index < 0 or not min_p[index]]
    assert cut[off].tolist() == [-INF] * len(off)
    by_cut[off] = logits[off]
    assert torch.equal(by_cut.nan_to_num(7), logits.nan_to_num(7))
    return logits


def check_temperatures(rt) -> None:
    """The cut of quotients, from logits that nobody divided; greedy rows are not divided."""
    x = randn(3, 1000, seed=3) * 3
    t = torch.tensor([0.7, 0.0, 1.9])
    scratch = poisoned(3, 1, dtype=torch.float32), poisoned(3, 8, dtype=torch.float32)
    cut, mapping = poisoned(3, dtype=torch.float32), torch.arange(3).int()
    min_p_cut(rt, cut, *scratch, x, mapping, logs(0.1, 0.2, 0.3), t)
    assert torch.equal(scratch[1][:, 7], x[:, 896:].amax(1))
    quotients = x / torch.tensor([0.7, 1.0, 1.9])[:, None]
    assert torch.equal(cut, quotients.amax(1) + logs(0.1, 0.2, 0.3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperatures(backend):
    check_temperatures(Now(backend))


def check_by_hand(rt) -> None:
    """A10, twice: threshold -0.3026; then rows that never use it."""
    row = [2.0, 1.0, 0.0, -3.0]
    logits = masked(rt, torch.tensor([row, row, row]), [0.0, 0.1], mapping=[1, 0, -1])
    assert logits.tolist() == [[2, 1, 0, -INF], row, row]


def check_edges(rt) -> None:
    rows = torch.tensor(
        [
            [1.0, 1.0, 0.5, -INF, NAN],  # p = 1: all that tie with the best
            [-INF, -INF, -INF, -INF, -INF],
            [NAN, 3.0, 2.9, -INF, 0.0],
            [NAN, NAN, NAN, NAN, -INF],
            [INF, 1.0, INF, 0.0, 1.0],
        ]
    )
    got = masked(rt, rows, [1.0, 0.5, 0.5, 0.5, 0.5], block=2)
    assert got.tolist() == [
        [1, 1, -INF, -INF, -INF],
        [-INF] * 5,
        [-INF, 3, float(rows[2, 2]), -INF, -INF],
        [-INF] * 5,
        [INF, -INF, INF, -INF, -INF],
    ]


def check(rt, rows: int = 3, vocab: int = 1000, scale: float = 3.0) -> None:
    whole = randn(rows, vocab + 3, seed=vocab) * scale
    whole[0, 1 : 1 + vocab // 2] = -INF
    before = whole.clone()
    min_p = [0.03, 0.0, 0.5][:rows]
    masked(rt, whole[:, 1 : vocab + 1], min_p, block=512)
    for row, p in enumerate(min_p):
        x = before[row, 1 : vocab + 1].double().numpy()
        want = oracle.min_p(x, p)
        got = whole[row, 1 : vocab + 1].double().numpy()
        differ = (got > -INF) != (want > -INF)
        assert not (differ & ~oracle.excused(x, min_p_value=p)).any()
        kept = (got > -INF) & (want > -INF)
        assert np.array_equal(got[kept], want[kept])
        before[row, 1 : vocab + 1] = whole[row, 1 : vocab + 1]
    assert torch.equal(whole, before)  # nothing around the view


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    check_by_hand(Now(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_edges(backend):
    check_edges(Now(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.3, 20.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 7), (3, 1000)])
def test_min_p(backend, rows, vocab, scale):
    check(Now(backend), rows, vocab, scale)


@pytest.mark.gpu
def test_gpu_equals_the_spec():
    logits = randn(64, 151_936) * 3
    min_p = np.random.default_rng(0).choice([0, 0.01, 0.1, 0.5, 1], 64).tolist()
    assert torch.equal(masked(Now("spec"), logits.clone(), min_p), masked(Now("triton"), logits.clone(), min_p))


MUTANTS = {
    ("spec", min_p_mask): [("~(logits[row].float() >= threshold)", "logits[row].float() > threshold"),
                           ("local_max[row].max() + log_min_p[index]\n            logits",
                            "local_max[row, 0] + log_min_p[index]\n            logits"),
                           ("~(logits[row].float() >= threshold)", "logits[row].float() < threshold")],
    ("interpret", min_p_mask): [("x >= threshold, raw", "x > threshold, raw"),
                                ("threshold = tl.max(best, axis=0) + log_p\n    group",
                                 "threshold = tl.load(local_max + row * blocks) + log_p\n    group"),
                                ("x >= threshold, raw, nothing", "x < threshold, nothing, raw")],
    ("spec", min_p_blocks): [("np.where(np.isnan(x), np.float32(\"-inf\"), x)", "x")],
    ("interpret", min_p_blocks): [("tl.max(tl.where(x == x, x, float(\"-inf\")), axis=1)",
                                   "tl.sum(tl.where(x == x, x, float(\"-inf\")), axis=1)")],
    ("spec", min_p_threshold): [("        if used:\n", "        if True:\n"),
                                ("/ divisor_spec(temperature, index)", "")],
    ("interpret", min_p_threshold): [("scaled(tl.max(best, axis=0), divisor(temperature, index))",
                                      "tl.max(best, axis=0)")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "op", "old", "new"), [(*key, *bug) for key, bugs in MUTANTS.items() for bug in bugs]
)
def test_mutants(backend, op, old, new, tmp_path):
    rt = Swapped(backend, mutant(op, old, new, tmp_path))

    def all_checks(_):
        check_by_hand(rt)
        check_edges(rt)
        check_temperatures(rt)
        check(rt)

    assert caught(all_checks, None)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_no_rows(backend):
    assert masked(Now(backend), torch.empty(0, 10), []).shape == (0, 10)
