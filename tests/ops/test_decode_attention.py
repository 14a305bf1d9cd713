"""decode_attention against dense float64 attention: runs and their combination, windows, neighbours left alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mrv2lab.ops import decode_attention as module
from mrv2lab.ops._decode_cut import Cut, cut, scratch_shapes
from mrv2lab.ops.decode_attention import decode_attention
from tests.ops.attention import SCALE, Batch, inputs
from tests.ops.backends import BACKENDS, INTERPRET, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, skip_if_unfaithful
from tests.ops.test_early_start import ptx_of, touched_before_the_wait
from tests.slow import mostly_slow

TRITON = [INTERPRET, BACKENDS[2]]


def check_batch(apply: Apply, batch: Batch, launches: int = 1) -> None:
    """Requests of one query against float64; rows of others stay as they are, and counters are zeros again."""
    b = inputs(batch)
    out = poisoned(*b.q.shape, dtype=batch.dtype)
    partial, lse, counters = scratch_shapes(*batch.heads, batch.head_dim)
    scratch = (
        poisoned(*partial, dtype=torch.float32),
        poisoned(*lse, dtype=torch.float32),
        torch.zeros(counters).int(),
    )
    for _ in range(launches):
        out.fill_(float("nan"))
        meta = (b.block_table, b.seq_lens, b.query_start_loc)
        apply(out, b.q, *b.caches, *meta, SCALE, batch.window, *scratch)
        starts = b.query_start_loc.tolist()
        mine = [i for i, j in itertools.pairwise(starts) if j - i == 1 and not b.want[i].isnan().any()]
        assert out[mine].isfinite().all()
        assert_near(out[mine], b.want[mine], times=4)
        others = torch.ones(len(out), dtype=torch.bool)
        others[mine] = False
        assert out[others].isnan().all()
        assert not scratch[2].any()


def with_cut(apply: Apply, how: Cut, monkeypatch: pytest.MonkeyPatch) -> Apply:
    monkeypatch.setattr(module, "cut", lambda *shape: how)
    return apply


CUTS = [
    Cut(16, 1, 1, 2),
    Cut(16, 1, 8, 1),
    Cut(16, 1, 4, 1, least=3),
    Cut(16, 2, 3, 0),
    Cut(16, 1, 2, 1, maxnreg=128),
    Cut(64, 4, 2, 1),
]
MIXED = [(1, 9), (3, 20), (1, 70), (1, 1), (2, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("head_dim", "block_size"), mostly_slow([(48, 16), (128, 32), (64, 8), (16, 16), (80, 32)], 2))
def test_sizes(backend, head_dim, block_size):
    batch = Batch(MIXED[:3], head_dim=head_dim, block_size=block_size)
    check_batch(implementation(decode_attention, backend), batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("hq", "hk"), mostly_slow([(6, 2), (3, 1), (1, 1), (20, 1)], 1))
def test_head_groups(backend, hq, hk):
    check_batch(implementation(decode_attention, backend), Batch([(1, 9), (1, 40)], (hq, hk)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", mostly_slow([17, 1, 8, 40, 0], 2))
def test_windows(backend, window):
    check_batch(implementation(decode_attention, backend), Batch([(1, 70), (1, 3), (1, 33)], (2, 1), window=window))


@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize(("how", "window"), mostly_slow([(how, window) for window in (21, 0) for how in CUTS], 6))
def test_cuts(backend, how, window, monkeypatch):
    """Twice on one scratch: the last to arrive leaves the counters as it found them."""
    apply = with_cut(implementation(decode_attention, backend), how, monkeypatch)
    batch = Batch([(1, 100), (2, 9)], (8, 2), 32, 16, window=window, dtype=torch.float16)
    check_batch(apply, batch, launches=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_neighbours(backend):
    check_batch(implementation(decode_attention, backend), Batch([*MIXED, (1, 0)], (2, 1), padding=2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(backend, dtype):
    skip_if_unfaithful(backend, dtype)
    check_batch(implementation(decode_attention, backend), Batch(MIXED, (4, 2), 64, 16, dtype=dtype))


@pytest.mark.parametrize("backend", [BACKENDS[2]])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_long_batches(backend, head_dim, group, block_size, window, monkeypatch):
    lengths = [1, 3000, 16, 17, 152, 1088, 2049, 31, 500]
    batch = Batch([(1, n) for n in lengths], (2 * group, 2), head_dim, block_size, torch.bfloat16, 3, window)
    apply = implementation(decode_attention, backend)
    check_batch(apply, batch)
    for how in (*CUTS, Cut(16, 1, 32, 2), Cut(16, 4, 8, 1)):
        check_batch(with_cut(apply, how, monkeypatch), batch, launches=3)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_waits_for_the_kernel_in_front_before_it_touches_anything(tmp_path):
    pytest.importorskip("triton")
    half = {"dtype": torch.bfloat16}
    q, cache, ints = torch.empty(3, 6, 48, **half), torch.empty(4, 16, 2, 48, **half), torch.zeros(3, 16).int()
    args = (q, q, cache, cache, ints, ints[:, 0], ints[:, 0], 0.1, 0, torch.empty(8192, 48), torch.empty(8192), ints)
    assert touched_before_the_wait(decode_attention, ptx_of(decode_attention, args)) == set()
    wait, first = "    wait_for_previous(PDL)\n", "    end = tl.load(seq_lens + request)\n"
    late = mutant(mutant(decode_attention, wait, "", tmp_path), first, first + wait, tmp_path)
    assert "seq_lens" in touched_before_the_wait(late, ptx_of(late, args))


def test_splits_fill_the_gpu_and_fit_the_scratch():
    assert [cut(r, 8, 2048, 2).splits for r in (1, 16, 64, 256, 1000)] == [32, 8, 2, 1, 1]
    assert cut(1, 8, 128, 2).splits == 2
    assert cut(1, 8, 16, 2).splits == 1
    assert cut(256, 8, 32768, 2) == Cut(16, 1, 4, 1, maxnreg=128, least=128)
    for requests in range(1, 600, 7):
        for kv_heads in (1, 3, 8):
            how = cut(requests, kv_heads, 100_000, 2)
            (rows, _), _, (counters,) = scratch_shapes(2 * kv_heads, kv_heads, 64)
            assert how.splits == 1 or requests * kv_heads * how.splits * 2 <= rows
            assert how.splits == 1 or requests * kv_heads <= counters


def test_scratch_too_small_is_refused(monkeypatch):
    monkeypatch.setattr(module, "cut", lambda *shape: Cut(16, 1, 8, 1))
    b = inputs(Batch([(1, 40)]))
    scratch = (torch.empty(4, 16), torch.empty(4), torch.zeros(2).int())
    meta = (b.block_table, b.seq_lens, b.query_start_loc)
    with pytest.raises(ValueError, match=r"8 splits x 2 query heads need .* it has 4"):
        module.decode_attention.launch(None, b.q, b.q, *b.caches, *meta, SCALE, 0, *scratch)


def check_all(apply: Apply) -> None:
    half = Batch([(1, 9), (1, 70), (2, 20)], (4, 2), 16, 16, torch.float16)
    check_batch(apply, half)
    check_batch(apply, replace(half, requests=[(1, 700)], heads=(3, 1)), launches=2)
    check_batch(apply, replace(half, requests=[(1, 70), (1, 40)], heads=(2, 1), block_size=8, window=13))
    check_batch(apply, replace(half, requests=[(1, 140)], heads=(2, 1), block_size=32, dtype=torch.float32, padding=1))


@pytest.mark.parametrize(
    ("old", "new"), [("counts == 1", "counts >= 1"), ("out[rows] = mixed", "out[rows - 1] = mixed")]
)
def test_mutants_of_the_spec(old, new, tmp_path):
    assert caught(check_all, implementation(mutant(decode_attention, old, new, tmp_path), "spec"))


@pytest.mark.parametrize(
    ("old", "new"),
    mostly_slow(
        [
            ("behind - start == 1", "behind - start >= 1"),
            ("tl.maximum(end - window, 0)", "tl.maximum(end - window + 1, 0)"),
            ("inside = inside & (n >= low)", "inside = inside & (n >= low - TILE)"),
            ("counters + pair, 0)", "counters + pair, 1)"),
            ("arrived == runs - 1", "arrived == 1"),
            ("best + tl.log2(total)", "best"),
            ('tl.where(seen[:, None], scores, float("-inf"))', "scores"),
            ("acc * shrink[None, :], input", "acc, input"),
            ("range(0, runs, RUNS)", "range(0, RUNS, RUNS)"),
            ("first_head + g[:, None] * out_stride_h", "first_head + (g[:, None] ^ 1) * out_stride_h"),
            ("tile * TILE % BLOCK_SIZE * stride_s", "0"),
        ],
        4,
    ),
    ids=[
        "chunks too",
        "window one too short",
        "NaN read before the window",
        "counter left",
        "combined too early",
        "sum forgotten",
        "keys past the end",
        "no rescaling",
        "runs left out",
        "head mapping",
        "second half of a block",
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_mutants_of_the_kernel(old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check_all, implementation(mutant(decode_attention, old, new, tmp_path), "interpret"))
