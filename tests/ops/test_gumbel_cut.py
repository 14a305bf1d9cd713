"""Drawing behind a cut is drawing from masked logits: any cut, stale maxima of rows without one, temperatures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops._cut import OFF
from mrv2lab.ops.gumbel import gumbel_blocks
from mrv2lab.ops.gumbel_cut import gumbel_cut_blocks
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.slow import mostly_slow

INF, NAN = float("inf"), float("nan")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def both(apply: Apply, logits, temperature, values, ids=None, slices=2, mapping=None):
    """(local_max, local_arg) behind the cut, and of logits that were divided and masked."""
    n, vocab = logits.shape
    mapping = torch.arange(n).int() if mapping is None else torch.tensor(mapping).int()
    t, cut = torch.as_tensor(temperature).float(), torch.as_tensor(values).float()
    row = t, torch.arange(n) + 3, torch.arange(n) * 7, torch.arange(n)
    last = None if ids is None else torch.tensor(ids).int()
    padded = torch.full((n, -(-vocab // 128) * 128), -INF)
    padded[:, :vocab] = logits.float().nan_to_num(-INF, posinf=INF, neginf=-INF)
    group_max = padded.view(n, -1, 128).amax(2)
    group_max[cut == -INF] = NAN  # nobody wrote them
    got = poisoned(n, slices, dtype=torch.float32), poisoned(n, slices)
    apply(*got, logits, mapping, *row, cut, last, group_max)
    of = torch.where(t == 0, 1.0, t)[mapping.long()]
    x = logits.float() / of[:, None]
    token = torch.arange(vocab)
    kept = (x > cut[:, None]) | (
        (x == cut[:, None]) & (token <= (torch.tensor([OFF]) if ids is None else last)[:, None])
    )
    want = poisoned(n, slices, dtype=torch.float32), poisoned(n, slices)
    masked = torch.where(kept, x, -INF)
    implementation(gumbel_blocks, "spec")(*want, masked, mapping, *row, False)
    return [part.tolist() for part in got], [part.tolist() for part in want]


def check(apply: Apply, dtype=torch.float32, vocab: int = 3000) -> None:
    """Narrow cuts and wide ones, none, everything dropped, greedy rows, padding; ties at the cut by id."""
    made = torch.Generator().manual_seed(5)
    logits = (torch.randn(8, vocab + 3, generator=made) * 2).to(dtype)[:, 3:]
    logits[2] = (logits[2] * 2).round() / 2  # many ties
    logits[3, ::3] = NAN
    logits[6, 5:] = -INF
    t = [1.0, 0.7, 1.0, 1.3, 0.0, 0.9, 1.0, 2.0]
    x = logits.float() / torch.where(torch.tensor(t) == 0, 1.0, torch.tensor(t))[:, None]
    top = x.nan_to_num(-INF).sort(dim=1, descending=True).values
    at = [min(rank, vocab - 1) for rank in (20, 5, 300, 1, 1000)]
    values = [top[0, at[0]], top[1, at[1]], 2.0, top[3, at[2]], top[4, at[3]], -INF, -INF, top[7, at[4]]]
    got, want = both(apply, logits, t, [float(one) for one in values])
    assert got == want
    ids = [vocab // 2, 10, vocab // 3, OFF, vocab, OFF, OFF, 17]
    got, want = both(apply, logits, t, [float(one) for one in values], ids, slices=1)
    assert got == want
    got, want = both(apply, logits, t, [float(one) for one in values], slices=1, mapping=[0, 1, -1, 3, -1, 5, 6, 7])
    assert got == want
    got, want = both(apply, logits, t, [INF] * 8, slices=1)
    assert got == want


def check_ties(apply: Apply) -> None:
    """A cut among equal logits: those behind its id have the largest bounds, and no token more may win."""
    logits = torch.zeros(14, 900)
    got, want = both(apply, logits, [1.0] * 14, [0.0] * 14, list(range(0, 700, 50)), slices=1)
    assert got == want
    assert all(token[0] <= last for token, last in zip(got[1], range(0, 700, 50), strict=True))


def check_close_values(apply: Apply) -> None:
    """Quotients an ulp from the cut, on either side of it, negative and positive, tiny and huge."""
    rng, rows = np.random.default_rng(0), 12
    t = rng.uniform(0.3, 1.9, rows).astype(np.float32)
    middle = np.array([3.7, -2.2, 1e-40, -1e-40, 3e38, -3e38, 0.0, 1e-44, 11.1, -7.3, 5.5, 1e-3], np.float32)
    t[4:6] = 1.0, 1.1
    steps = rng.integers(-3, 4, (rows, 300)).astype(np.int32)
    logits = torch.from_numpy((middle[:, None].view(np.int32) + np.abs(steps)).view(np.float32))
    values = (logits[:, 0].numpy() / t).tolist()
    got, want = both(apply, logits, t, values, [150] * rows, slices=1)
    assert got == want


CHECKS = [check, check_ties, check_close_values]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of", mostly_slow(CHECKS, 1))
def test_a_cut_in_the_draw(backend, of):
    of(implementation(gumbel_cut_blocks, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", mostly_slow(["bf16", "f16"], 1))
@pytest.mark.parametrize("vocab", [7, 1000])
def test_types_and_shapes(backend, dtype, vocab):
    check(implementation(gumbel_cut_blocks, backend), DTYPES[dtype], vocab)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_at_full_size(dtype):
    logits = (torch.randn(24, 151_936, generator=torch.Generator().manual_seed(2)) * 2).to(DTYPES[dtype])
    t = np.linspace(0, 2, 24).astype(np.float32)
    x = logits.float() / torch.where(torch.from_numpy(t) == 0, 1.0, torch.from_numpy(t))[:, None]
    keep = [1, 20, 300, 5000, 100_000] * 5
    values = [float(row.topk(k).values[-1]) for row, k in zip(x, keep, strict=False)]
    got, want = both(implementation(gumbel_cut_blocks, "triton"), logits, t, values, slices=16)
    assert got == want


MUTANTS = {
    "ids ignored": ("last = tl.load(cut_id + row)", "last = tl.full([], OFF, tl.int32)", check_ties),
    "the cut undivided": ("raw = tl.where(noisy, value * t, value)", "raw = value", check),
    "least too high": ("raw * (1.0 - RELATIVE), raw * (1.0 + RELATIVE)",
                       "raw * (1.0 + RELATIVE), raw * (1.0 - RELATIVE)", check_close_values),
    "maxima of rows without a cut": ("tl.where(value == float(\"-inf\"), first // GROUP, live)", "live", check),
    "the next row's maxima": ("group_max + row * groups + group", "group_max + (row ^ 1) * groups + group", check),
    "padding read": ("if index < 0:\n        tl.store", "if index < -1:\n        tl.store", check),
    "a chunk too far": ("            first += CHUNK\n", "            first += CHUNK + GROUP\n", check),
}  # fmt: skip


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize("name", mostly_slow(MUTANTS, quick=2))
def test_mutants(name, tmp_path):
    old, new, of = MUTANTS[name]
    assert caught(of, implementation(mutant(gumbel_cut_blocks, old, new, tmp_path), "interpret"))
