"""The last resort finds every cut: whatever the row, the state and the scratch; mutants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops._cut import (
    BOUNDS,
    DONE,
    NARROW,
    NEAR,
    NEAR_TOKENS,
    OFF,
    SEARCH,
    clean_spec,
    cut_spec,
    num_blocks,
    num_groups,
)
from mrv2lab.ops.search_cut import search_cut
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.cuts import INF, odd_rows
from tests.slow import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # inf - inf, unused
V = 10**9


def search(apply: Apply, logits, ks, ps, states, rows=None, bounds=None, candidates=8):
    """(cut_value, cut_id) of each entry; those that are DONE keep the poison."""
    n, vocab = len(ks), logits.shape[1]
    rows = list(range(n)) if rows is None else rows
    cut = poisoned(n, dtype=torch.float32), poisoned(n)
    status = torch.tensor(states).int()
    padded = torch.full((len(logits), num_groups(vocab) * 128), -INF)
    padded[:, :vocab] = torch.from_numpy(np.stack([clean_spec(row) for row in logits]))
    group_max = padded.view(len(logits), -1, 128).amax(2)[rows]
    if bounds is None:
        bounds = torch.full((n, BOUNDS), float("nan"))
        bounds[:, 0] = group_max.amax(1)
        bounds[:, 2], bounds[:, 5] = -INF, 1.0
    scratch = poisoned(n, candidates)
    tables = torch.tensor(ks).int(), torch.tensor(ps).float()
    near = poisoned(n, num_blocks(vocab), NEAR_TOKENS), poisoned(n, num_blocks(vocab))
    for i in np.flatnonzero(status.numpy() >= NEAR):
        x = clean_spec(logits[rows[i]])
        ids = np.flatnonzero((x >= bounds[i, 2].item()) & (x < bounds[i, 3].item()))
        for block in range(num_blocks(vocab)):
            found = ids[ids // 2048 == block]
            near[0][i, block, : len(found)] = torch.from_numpy(found)
            near[1][i, block] = len(found)
    apply(
        *cut,
        status,
        bounds,
        scratch,
        *near,
        logits,
        torch.tensor(rows).int(),
        torch.arange(n).int(),
        group_max,
        *tables,
    )
    assert status.tolist() == [DONE] * n
    return cut[0].tolist(), cut[1].tolist()


def check_whole_rows(apply: Apply) -> None:
    """Every row from scratch: k, p, both. The kernel writes only where something is cut."""
    logits = odd_rows(300)[[0, 1, 2, 3, 4, 6, 7]]
    n = len(logits)
    for k, p in ((20, 0.9), (V, 0.5), (150, 1.0)):
        values, ids = search(apply, logits, [k] * n, [p] * n, [SEARCH] * n)
        for row, value, last in zip(logits, values, ids, strict=True):
            want = cut_spec(clean_spec(row), k, p)
            if want[1] != OFF:
                assert (value, last) == want, (k, p)
            else:
                assert last in (OFF, -7777)


def check_between_bounds(apply: Apply) -> None:
    """A row of top-p that was narrowed: few or many logits between the bounds; ties at the cut."""
    logits = torch.randn(1, 2100, generator=torch.Generator().manual_seed(4))
    logits[0, ::7] = 0.25
    x = logits[0].double().numpy()
    w = np.exp(x - x.max())
    within_ties = (w[x > 0.25].sum() + w[x == 0.25].sum() / 2) / w.sum()
    listed = 0
    for p in (0.5, float(within_ties), 0.9):
        want = cut_spec(clean_spec(logits[0]), V, p)
        for margin, room in ((0.01, 512), (0.01, 4), (0.5, 8)):
            lower, upper = float(want[0]) - margin, float(want[0]) + margin
            m, target, above = x.max(), p * w.sum(), w[x >= np.float32(upper)].sum()
            bounds = torch.tensor([[m, target, lower, upper, above, 1.0]], dtype=torch.float32)
            values, ids = search(apply, logits, [V], [p], [NARROW], bounds=bounds, candidates=room)
            assert (values[0], ids[0]) == want, (p, margin, room)
            if ((x >= lower) & (x < np.float32(upper)))[:2048].sum() <= NEAR_TOKENS:
                for state in (NEAR, NEAR + 1):
                    values, ids = search(apply, logits, [V], [p], [state], bounds=bounds, candidates=1)
                    assert (values[0], ids[0]) == want, (p, margin, state)
                    listed += 1
    assert listed


def check_unbounded_above(apply: Apply) -> None:
    bounds = torch.tensor([[2.0, 30.5, 1.0, INF, 0.0, 1.0]])
    assert search(apply, torch.full((1, 100), 2.0), [V], [0.305], [NARROW], bounds=bounds) == ([2.0], [30])


def check_bounded_below(apply: Apply) -> None:
    """What is known of a top-k row: here that its cut is no lower than 2.0, which is all of them."""
    bounds = torch.tensor([[2.0, 0.0, 2.0, INF, 0.0, 1.0]])
    logits = torch.full((1, 100), 2.0)
    logits[0, 50:] = 1.0
    assert search(apply, logits, [7], [0.5], [SEARCH], bounds=bounds) == ([2.0], [3])


def check_entries(apply: Apply) -> None:
    """Done entries are left alone; each entry reads its own row."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    values, ids = search(apply, logits, [1, 1, 2], [1.0] * 3, [SEARCH, DONE, SEARCH], rows=[1, 0, 0])
    assert [values[0], values[2]] == [3, 2]
    assert ids == [0, -7777, 1]


CHECKS = [check_between_bounds, check_unbounded_above, check_bounded_below, check_entries, check_whole_rows]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", mostly_slow(CHECKS, 4))
def test_search(backend, check):
    check(implementation(search_cut, backend))


MUTANTS = {
    "survivors forgotten": ("((key > last_key) | ((key == last_key) & (token <= last_id)))", "(key > 0)",
                            check_whole_rows),
    "ties to the last": ("tl.where(tie & (order <= need), token, -1)", "tl.where(tie, token, -1)", check_whole_rows),
    "rows of few finite logits cut": ("by_k = finite > k", "by_k = finite > 0", check_whole_rows),
    "-inf counts": ("0x00800000, tl.int64", "0x007FFFFF, tl.int64", check_whole_rows),
    "the first edge above": ("way == j + 1, sums", "way == j, sums", check_whole_rows),
    "the wrong share": ("target = p * tl.sum(total, axis=0)", "target = tl.sum(total, axis=0)", check_whole_rows),
    "weight above forgotten": ("over = above + tl.sum(tl.where(keys", "over = tl.sum(tl.where(keys",
                               check_between_bounds),
    "overflow unseen": ("decided = found <= CANDIDATES", "decided = found >= 0", check_between_bounds),
    "above the bound": ("(logit >= lower) & (logit < upper)", "(logit >= lower)", check_between_bounds),
    "of each block its first": ("slot[None, :] < count[:, None]", "slot[None, :] < tl.minimum(count, 1)[:, None]",
                                check_between_bounds),
    "what is listed forgotten": ("if state >= NEAR:", "if state > NEAR + 1:", check_between_bounds),
    "done rows too": ("    if state == DONE:\n        return\n", "", check_entries),
    "the entry's row": ("tl.load(logits_rows + i).to(tl.int64) * stride", "i * 0", check_entries),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", mostly_slow(MUTANTS, 1))
def test_mutants(name, tmp_path):
    old, new, check = MUTANTS[name]
    assert caught(check, implementation(mutant(search_cut, old, new, tmp_path), "interpret"))


def test_the_definition_against_sorting():
    """cut_spec, by which every spec decides, is a sort and a sum for whoever can afford them."""
    made = np.random.default_rng(0)
    for _ in range(300):
        x = made.integers(-4, 4, 12).astype(np.float32)
        k, p = int(made.integers(0, 14)), float(made.uniform(0.01, 1.2))
        order = sorted(range(12), key=lambda t: (-x[t], t))[: k if 0 < k < 12 else 12]
        weights = np.exp([float(x[t]) for t in order])
        before = np.concatenate([[0], np.cumsum(weights)[:-1]]) / weights.sum()
        kept = [t for t, mass in zip(order, before, strict=True) if p >= 1 or mass < p]
        value, last = cut_spec(x, k, p)
        assert {t for t in range(12) if x[t] > value or (x[t] == value and t <= last)} == set(kept)
