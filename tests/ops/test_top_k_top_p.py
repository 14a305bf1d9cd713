"""Top-k and top-p as a whole against the oracle: random and odd rows, strides, tie rules, cuts applied; on a GPU at
full size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops._cut import DONE, OFF
from mrv2lab.ops.top_k_top_p import apply_cut
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant
from tests.ops.cuts import INF, NAN, Now, assert_cuts, find, odd_rows
from tests.slow import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # inf - inf, unused
V = 10**9
"""Top-k off."""


def masked(backend, logits, ks, ps, **options):
    """The logits after the whole stage."""
    rt = Now(backend)
    made = logits.clone().to(rt.device)
    found = find(rt, made, ks, ps, **options)
    rows = torch.arange(len(ks), dtype=torch.int32, device=rt.device)
    apply_cut(rt, made, rows, found.group_max, found.cut_value, found.cut_id)
    assert found.status.tolist() == [DONE] * len(ks)
    return made.cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", mostly_slow([7, 1, 2, 1000], 1))
def test_odd_rows(backend, vocab):
    logits = odd_rows(max(vocab, 2))[:, :vocab]
    for k, p in ((1, 1.0), (V, 0.9), (20, 0.95), (2, 0.3), (V, 1e-6), (V, 0.9999), (600, 0.5)):
        found = find(Now(backend), logits, [k] * 8, [p] * 8)
        assert_cuts(logits, [k] * 8, [p] * 8, found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("small", mostly_slow([{}, {"listed": 4, "candidates": 8}], 1), ids=["", "small scratch"])
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.bfloat16, torch.float32, torch.float16], 1), ids=["bf16", "f32", "f16"]
)
def test_mixed_rows_strided(backend, dtype, small):
    """mrv2.md #41: a strided view; rows of one batch with every mix of on and off, behind a mapping."""
    whole = (torch.randn(3, 2403, generator=torch.Generator().manual_seed(1)) * 1.5).to(dtype)
    logits = whole[:, 3:]
    ks, ps = [V, 12, V, 3], [0.8, 1.0, 1.0, 0.5]
    for mapping in ([0, 1, 2], [3, 0, 3]):
        found = find(Now(backend), logits, ks, ps, mapping=mapping, **small)
        assert_cuts(logits, [ks[i] for i in mapping], [ps[i] for i in mapping], found)
        alone = find(Now(backend), logits.clone(), ks, ps, mapping=mapping, **small)
        assert torch.equal(found.cut_value, alone.cut_value)
        assert torch.equal(found.cut_id, alone.cut_id)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("small", mostly_slow([{}, {"listed": 1, "candidates": 1}], 1), ids=["", "small scratch"])
def test_literal(backend, small):
    """The tie rules by hand; mrv2.md #42 is the first row."""
    logits = torch.tensor(
        [
            [1.0, 1.0, 1.0, 0.0],
            [-INF, 2.0, -INF, 2.0],
            [NAN, 3.0, 3.0, 1.0],
            [0.0, -0.0, 0.0, -0.0],
            [4.0, 9.0, 4.0, 4.0],
        ]
    )
    got = masked(backend, logits, [2, 3, 1, 4, 3], [1.0, 1.0, 1.0, 0.5, 0.99], **small)
    assert got.tolist() == [
        [1, 1, -INF, -INF],
        [-INF, 2, -INF, 2],  # no more than k finite: left alone
        [-INF, 3, -INF, -INF],
        [0, 0, -INF, -INF],  # -0.0 ties with 0.0
        [4, 9, -INF, -INF],  # 9.0 has 0.987 of the three survivors, so one 4.0 joins
    ]
    flat = masked(backend, torch.zeros(4, 10), [V] * 4, [0.1, 0.3, 0.31, 1e-9], **small)
    assert (flat == 0).sum(dim=1).tolist() == [1, 3, 4, 1]
    assert flat[2, :4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_rows_that_are_off_stay_as_they_are(backend):
    logits = torch.tensor([[1.0, NAN, 3.0]] * 3)
    rt = Now(backend)
    found = find(rt, logits, [1, 3], [1.0, 1.0], mapping=[-1, 1, 0])
    assert found.cut_id.tolist() == [OFF, OFF, 2]
    made = logits.clone().to(rt.device)
    rows = torch.arange(3, dtype=torch.int32, device=rt.device)
    apply_cut(rt, made, rows, found.group_max, found.cut_value, found.cut_id)
    assert made.isnan().tolist() == [[False, True, False]] * 2 + [[False] * 3]
    assert made[2].tolist() == [-INF, -INF, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sets_do_not_depend_on_the_batch(backend):
    logits = torch.randn(3, 2500, generator=torch.Generator().manual_seed(3))
    together = find(Now(backend), logits, [V, 5, V], [0.9, 1.0, 0.2])
    alone = [find(Now(backend), logits[i : i + 1], [k], [p]) for i, (k, p) in enumerate([(V, 0.9), (5, 1.0), (V, 0.2)])]
    assert together.cut_value.tolist() == [one.cut_value.item() for one in alone]
    assert together.cut_id.tolist() == [one.cut_id.item() for one in alone]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_narrowing_it_is_only_slower(backend):
    logits = torch.randn(2, 2500, generator=torch.Generator().manual_seed(6))
    found = find(Now(backend), logits, [V, V], [0.9, 0.4], narrow=False, listed=4, candidates=16)
    assert_cuts(logits, [V, V], [0.9, 0.4], found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("small", mostly_slow([{}, {"listed": 4, "candidates": 8}], 1), ids=["", "small scratch"])
@pytest.mark.parametrize("dtype", mostly_slow([torch.bfloat16, torch.float32], 0), ids=["bf16", "f32"])
def test_temperatures_inside_cut_as_quotients_do(backend, dtype, small):
    """The cuts of logits that are yet to be divided are those of float32 quotients, bit for bit."""
    logits = (torch.randn(4, 2400, generator=torch.Generator().manual_seed(8)) * 2).to(dtype)
    logits[3] = (torch.arange(2400) % 5) * -1e-45
    ks, ps, ts = [V, 12, V, V], [0.8, 1.0, 0.95, 0.5], [0.7, 0.3, 0.0, 1.7]
    divided = logits.float() / torch.tensor([t or 1.0 for t in ts])[:, None]
    inside = find(Now(backend), logits, ks, ps, temperature=ts, **small)
    before = find(Now(backend), divided, ks, ps, **small)
    assert inside.cut_value.tolist() == before.cut_value.tolist()
    assert inside.cut_id.tolist() == before.cut_id.tolist()


@pytest.mark.parametrize(("rows", "vocab"), [(3, 151_936), (1, 49_152), (256, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_spec_at_full_size(rows, vocab, dtype):
    logits = (torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(rows)) * 2).to(dtype)[:, 3:]
    ks, ps = ([20, V, 400] * rows)[:rows], ([0.95, 0.9, 1.0] * rows)[:rows]
    assert_cuts(logits, ks, ps, find(Now("spec"), logits, ks, ps))


def test_launches():
    """Narrowing is launched only for rows of top-p alone."""
    rt, logits = Now("spec"), torch.randn(1, 50)
    find(rt, logits, [5], [0.5], narrow=False)
    assert rt.launched == ["logit_groups", "cut_from_groups", "search_cut"]
    find(rt, logits, [V], [0.5])
    narrow = ["narrow_sums", "narrow_choose"]
    assert rt.launched[3:] == ["logit_groups", "cut_from_groups", *narrow, *[*narrow, "list_near"] * 2, "search_cut"]


# -- applying a cut ----------------------------------------------------------------------------------------------------
def check_apply(apply: Apply) -> None:
    logits = torch.tensor([[5.0, 1.0, 3.0, 3.0, NAN, -INF, 3.0]]).repeat(3, 1)
    group_max = torch.full((3, 1), 5.0)
    cut = torch.tensor([3.0, -INF, 4.0]), torch.tensor([3, OFF, 0]).int()
    before = logits.clone()
    apply(logits, torch.tensor([2, 1, 0]).int(), group_max, *cut)
    assert logits[2].tolist() == [5, -INF, 3, 3, -INF, -INF, -INF]
    assert logits[0].tolist() == [5] + [-INF] * 6
    assert torch.equal(logits[1].nan_to_num(7.0), before[1].nan_to_num(7.0))
    wide = torch.arange(300.0)[None].repeat(1, 1)
    apply(
        wide,
        torch.tensor([0]).int(),
        torch.tensor([[127.0, 255.0, 299.0]]),
        torch.tensor([250.0]),
        torch.tensor([9]).int(),
    )
    assert wide[0].tolist() == [-INF] * 251 + [float(i) for i in range(251, 300)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_apply(backend):
    check_apply(implementation(apply_cut, backend))


def check_far_row(apply: Apply) -> None:
    """mrv2.md #39: the row starts 2^31 + 16 elements behind the base, in memory that exists only where written."""
    memory = torch.from_numpy(np.zeros(2**31 + 80, np.float16))
    logits = memory.as_strided((3, 3), (2**30 + 8, 1))
    logits[2] = torch.tensor([5.0, 1.0, 5.0])
    apply(logits, torch.tensor([2]).int(), torch.tensor([[5.0]]), torch.tensor([5.0]), torch.tensor([0]).int())
    assert logits[2].tolist() == [5, -INF, -INF]


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_2_to_31(backend):
    check_far_row(implementation(apply_cut, backend))


MUTANTS = {
    "ties to the highest id": ("(x == value) & (token <= last)", "(x == value) & (token >= last)"),
    "the cut token too few": ("(x == value) & (token <= last)", "(x == value) & (token < last)"),
    "all ties": ("(x == value) & (token <= last)", "(x == value)"),
    "row of the entry": ("tl.load(logits_rows + i).to(tl.int64)", "i"),
    "off rows cleaned": ("    if last == OFF:\n        return\n", ""),
}


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_apply(name, tmp_path):
    old, new = MUTANTS[name]
    assert caught(check_apply, implementation(mutant(apply_cut, old, new, tmp_path), "interpret"))


# -- a GPU, at full size -----------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize(("k", "p"), [(20, 0.95), (V, 0.9), (V, 0.5), (1, 1.0), (5000, 0.9), (V, 1.0)])
def test_gpu(dtype, vocab, k, p):
    rows = odd_rows(vocab)
    spread = torch.randn(24, vocab, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.2, 6, 24)[:, None]
    logits = torch.cat([rows, spread]).to(dtype)
    ks, ps = [k] * 32, [p] * 32
    ks[9], ps[9], ks[10], ps[10] = V, 1.0, 7, 0.7
    found = find(Now("triton"), logits, ks, ps)
    assert_cuts(logits, ks, ps, found)
    again = find(Now("triton"), logits[:, :], ks, ps)
    assert torch.equal(found.cut_id, again.cut_id)
    got = masked("triton", logits, ks, ps)
    for row, value, last, out in zip(logits, found.cut_value.tolist(), found.cut_id.tolist(), got, strict=True):
        if last != OFF:
            x = row.float()
            stays = (x > value) | ((x == value) & (torch.arange(vocab) <= last))
            assert torch.equal(out, row.masked_fill(~stays, -INF))
