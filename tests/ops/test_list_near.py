"""Tokens between two bounds, by block, in order; rows that have too many; rows that are not asked for; mutants."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops._cut import BOUNDS, DONE, NARROW, NEAR, NEAR_TOKENS, num_blocks, num_groups
from mrv2lab.ops.list_near import list_near
from tests.ops.backends import BACKENDS, POISON, Apply, caught, implementation, mutant, poisoned

VOCAB = 4300
INF = float("inf")


def listed(apply: Apply, logits, states, bounds, rows, mark=NEAR):
    n, blocks = len(states), num_blocks(VOCAB)
    near, count = poisoned(n, blocks, NEAR_TOKENS), poisoned(n, blocks)
    status, table = torch.tensor(states).int(), torch.full((n, BOUNDS), float("nan"))
    table[:, 5] = 1.0
    table[:, 2:4] = torch.tensor(bounds)
    padded = torch.full((len(logits), num_groups(VOCAB) * 128), -INF)
    padded[:, :VOCAB] = logits.float().nan_to_num(-INF)
    group_max = padded.view(len(logits), -1, 128).amax(2)[rows]
    apply(near, count, status, table, logits, torch.tensor(rows).int(), group_max, mark)
    return near, count, status.tolist()


def check(apply: Apply) -> None:
    logits = torch.randn(3, VOCAB + 5, generator=torch.Generator().manual_seed(0))[:, 5:]
    logits[1, ::9] = float("nan")
    logits[1, 1:3] = torch.tensor([0.5, 0.53])
    logits[2, 2048:2112] = 5.0  # as many as there is room for
    states, rows = [NEAR, DONE, NARROW, NEAR + 1, NEAR], [1, 0, 0, 1, 2]
    bounds = [[0.5, 0.53], [0.5, 0.53], [0.5, 0.53], [0.5, 0.53], [5.0, INF]]
    near, count, status = listed(apply, logits, states, bounds, rows)
    assert status == states
    assert (near[1:4] == POISON).all()
    assert (count[1:4] == POISON).all()
    for i in (0, 4):
        x, (lower, upper) = logits[rows[i]], bounds[i]
        for block in range(3):
            part = x[block * 2048 : (block + 1) * 2048]
            want = (torch.nonzero((part >= lower) & (part < upper))[:, 0] + block * 2048).tolist()
            assert count[i, block] == len(want)
            assert near[i, block, : len(want)].tolist() == want
            assert (near[i, block, len(want) :] == POISON).all()


def check_full(apply: Apply) -> None:
    """A block too full: the row goes back, and nothing is written beside the list."""
    logits = torch.zeros(2, VOCAB)
    logits[0, 2048 + 70 :] = -1.0
    logits[0, :2048] = -1.0
    near, _, status = listed(apply, logits, [NEAR + 1, NEAR], [[0.0, INF]] * 2, [0, 1], mark=NEAR + 1)
    assert status == [NARROW, NEAR]
    assert near[0, 1].tolist() == list(range(2048, 2048 + NEAR_TOKENS))
    assert (near[1] == POISON).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of", [check, check_full])
def test_lists(backend, of):
    of(implementation(list_near, backend))


SPEC, KERNEL = "np.flatnonzero((x >= lower) & (x < upper))", "hit = (x >= lower) & (x < upper)"
MUTANTS = {
    "the upper bound too": (KERNEL, KERNEL.replace("< upper", "<= upper"), SPEC, SPEC.replace("< upper", "<= upper")),
    "not the lower one": (KERNEL, KERNEL.replace(">=", ">"), SPEC, SPEC.replace(">=", ">")),
    "full ones unseen": ("if found > NEAR_TOKENS", "if found > 9999", "if len(found) > NEAR_TOKENS",
                         "if len(found) > 9999"),
    "full at 64": ("if found > NEAR_TOKENS", "if found >= NEAR_TOKENS", "if len(found) > NEAR_TOKENS",
                   "if len(found) >= NEAR_TOKENS"),
    "any status": ("!= mark", "== 0", "== mark", "!= 0"),
    "the entry's row": ("tl.load(logits_rows + i).to(tl.int64)", "i * 0", "logits[int(logits_rows[int(i)])]",
                        "logits[0]"),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, tmp_path):
    for backend, old, new in (("interpret", *MUTANTS[name][:2]), ("spec", *MUTANTS[name][2:])):
        apply = implementation(mutant(list_near, old, new, tmp_path), backend)
        assert caught(check, apply) or caught(check_full, apply), backend
