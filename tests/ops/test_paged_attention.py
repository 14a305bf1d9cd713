"""paged_attention against dense float64 attention: mixed batches, GQA, poisoned blocks, odd sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrv2lab.ops._decode_cut import scratch_shapes
from mrv2lab.ops.decode_attention import decode_attention
from mrv2lab.ops.paged_attention import Tiling, paged_attention
from tests.ops.attention import SCALE, SPARE, Batch, Inputs, inputs
from tests.ops.backends import BACKENDS, INTERPRET, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, randn, skip_if_unfaithful


def check_batch(apply: Apply, batch: Batch, *skip_single: bool) -> None:
    """Against float64; rows of no request stay as they are, and rows that are to be skipped."""
    b = inputs(batch)
    out = poisoned(*b.q.shape, dtype=batch.dtype)
    meta = (b.block_table, b.seq_lens, b.query_start_loc, b.max_query_len)
    apply(out, b.q, *b.caches, *meta, SCALE, batch.window, *skip_single)
    t = len(b.want)
    assert len(out) == t + SPARE
    live = ~b.want[:, 0, 0].isnan()
    if any(skip_single):
        live[singles_of(b)] = False
    assert out[:t][live].isfinite().all()
    assert_near(out[:t][live], b.want[live], times=4)
    assert out[:t][~live].isnan().all()
    assert out[t:].isnan().all()


def singles_of(b: Inputs) -> torch.Tensor:
    """[t] rows of the requests with exactly one query, as indices."""
    starts = b.query_start_loc.long()
    return starts[:-1][starts.diff() == 1]


MIXED = [(1, 9), (11, 11), (1, 1), (3, 20), (17, 21), (1, 16), (2, 2)]


def check_mixed(apply: Apply) -> None:
    check_batch(apply, Batch(MIXED[:4]))
    check_batch(apply, Batch([(1, 9), (1, 3)]))


def check_skips(apply: Apply) -> None:
    check_batch(apply, Batch([(1, 9), (2, 2), (1, 30), (11, 11)]), True)


def check_windows(apply: Apply) -> None:
    for window in (1, 5, 8, 40):
        check_batch(apply, Batch([(1, 70), (20, 40), (1, 1)], window=window))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [32, 48, 64, 128])
@pytest.mark.parametrize("block_size", [8, 16])
def test_sizes(backend, head_dim, block_size):
    check_batch(implementation(paged_attention, backend), Batch(MIXED[:3], head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (2, 2), (20, 1)], ids=str)
def test_head_groups(backend, heads):
    check_batch(implementation(paged_attention, backend), Batch([(1, 9), (7, 12)], heads))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "requests",
    [
        [(5, 5)],
        [(1, 40), (1, 1), (1, 8)],
        [(1, 33), (1, 3), (1, 64), (1, 7), (1, 8), (1, 9), (1, 17)],
        MIXED,
        [(70, 70)],
        [(40, 100), (1, 70)],
        [(3, 20), (4, 4), (2, 9)],
    ],
    ids=["one prompt", "three decodes", "seven decodes", "mixed", "long prompt", "chunk and decode", "drafts"],
)
def test_batches(backend, requests):
    check_batch(implementation(paged_attention, backend), Batch(requests, heads=(2, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", [[(1, 9), (1, 3), (1, 0)], [(4, 9), (1, 0), (1, 3)]], ids=["decodes", "mixed"])
def test_padding_requests(backend, requests):
    """A graph's batch ends in requests without queries or keys (#29: their tables may hold anything)."""
    check_batch(implementation(paged_attention, backend), Batch(requests, padding=3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(backend, dtype):
    skip_if_unfaithful(backend, dtype)
    check_batch(implementation(paged_attention, backend), Batch(MIXED[:4], dtype=dtype, head_dim=64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 7, 8, 9, 16, 33, 64, 1000])
@pytest.mark.parametrize("requests", [[(1, 70), (1, 3), (1, 33)], [(40, 70), (1, 9), (5, 5)]], ids=["decodes", "mixed"])
def test_windows(backend, requests, window):
    check_batch(implementation(paged_attention, backend), Batch(requests, heads=(2, 1), window=window))


@pytest.mark.parametrize("backend", [BACKENDS[2]])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_long_batches(backend, head_dim, group, block_size, window):
    requests = [(1, 1), (1024, 1024), (1, 3000), (100, 1100), (16, 16), (5, 2049), (1, 17)]
    batch = Batch(requests, (2 * group, 2), head_dim, block_size, torch.bfloat16, padding=2, window=window)
    check_batch(implementation(paged_attention, backend), batch)


@pytest.mark.parametrize("backend", [INTERPRET, BACKENDS[2]])
@pytest.mark.parametrize(
    "tiling",
    [Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 2, plain_tiles=False), Tiling(32, 32, 4, 3), Tiling(64, 16, 4, 2)],
    ids=str,
)
def test_tilings(backend, tiling, monkeypatch):
    monkeypatch.setattr("mrv2lab.ops.paged_attention.tiling", lambda *shape: tiling)
    apply = implementation(paged_attention, backend)
    check_batch(apply, Batch([(40, 70), (1, 50), (9, 9)], (4, 2), 16, dtype=torch.float16))


HALF = Batch([(1, 9), (40, 70), (1, 33), (2, 9), (1, 0)], heads=(4, 1), head_dim=32, dtype=torch.float16, padding=2)
"""Queries of several programs."""
SPLIT = [
    pytest.param(Batch(MIXED, (2, 1)), id="mixed"),
    pytest.param(HALF, id="half"),
    pytest.param(Batch([(1, 70), (3, 33), (1, 3)], (6, 2), window=9), id="window"),
    pytest.param(Batch([(1, 9), (1, 3)], padding=3), id="decodes"),
    pytest.param(Batch([(4, 9), (1, 0), (1, 30)], (2, 1), padding=1), id="padding", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", SPLIT)
def test_single_queries_are_skipped(backend, batch):
    check_batch(implementation(paged_attention, backend), batch, True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", SPLIT)
def test_with_decode_attention_it_makes_what_it_makes_alone(backend, batch):
    b = inputs(batch)
    alone, together = (poisoned(*b.q.shape, dtype=batch.dtype) for _ in range(2))
    meta, how = (b.block_table, b.seq_lens, b.query_start_loc), (SCALE, batch.window)
    implementation(paged_attention, backend)(alone, b.q, *b.caches, *meta, b.max_query_len, *how)
    partial, lse, counters = scratch_shapes(*batch.heads, batch.head_dim)
    scratch = (torch.empty(partial), torch.empty(lse), torch.zeros(counters).int())
    implementation(decode_attention, backend)(together, b.q, *b.caches, *meta, *how, *scratch)
    implementation(paged_attention, backend)(together, b.q, *b.caches, *meta, b.max_query_len, *how, True)
    live = ~b.want[:, 0, 0].isnan()
    assert_near(together[: len(live)][live], alone[: len(live)][live].double(), times=4)
    assert torch.equal(together.isnan(), alone.isnan())


BEHIND_THE_RETURN, AT_A_TILE = "    context = length - query_len\n", "    for tile in range(begin, end, TILE):\n"


def came_by(line: str, dtype: torch.dtype, folder: Path, mistake: tuple[str, str] = ("", "")) -> list[str]:
    """Which batches have a program that comes by ``line`` of the kernel, where a probe writes behind the batch."""
    indent = "        " if line == AT_A_TILE else "    "
    probed = mutant(paged_attention, line, f"{line}{indent}tl.store(out + 9 * out_stride_t, 1.0)\n", folder)
    if mistake[0]:
        probed = mutant(probed, *mistake, folder)
    found = []
    for name, requests, skip_single in (
        ("served", [(1, 9), (1, 20)], False),
        ("decodes", [(1, 9), (1, 20)], True),
        ("empty", [(0, 9), (1, 0)], False),
    ):
        b = inputs(Batch(requests, dtype=dtype))
        out, longest = torch.zeros_like(b.q), 40
        meta = (b.block_table, b.seq_lens, b.query_start_loc, longest)
        implementation(probed, "interpret")(out, b.q, *b.caches, *meta, SCALE, 0, skip_single)
        if out[9, 0, 0]:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("line", "dtype"), [(BEHIND_THE_RETURN, torch.float16), (AT_A_TILE, torch.float32)], ids=["large", "small"]
)
def test_programs_with_nothing_to_do_end_before_they_read_a_key(line, dtype, tmp_path):
    """At once under the large tilings, at the first tile under those without plain tiles."""
    pytest.importorskip("triton")
    assert came_by(line, dtype, tmp_path) == ["served"]
    mistake = ("PLAIN_TILES and first >= query_len", "PLAIN_TILES and first > query_len")
    if line == BEHIND_THE_RETURN:
        assert "decodes" in came_by(line, dtype, tmp_path, mistake)


@pytest.mark.parametrize("backend", [BACKENDS[2]])
@pytest.mark.parametrize("window", [0, 100])
def test_a_newcomer_among_256_decodes(backend, window):
    """The batch of a full server; bfloat16, 16/8 heads of 128, blocks of 16."""
    requests = [(1, 150 + (37 * i) % 250) for i in range(256)] + [(128, 128)]
    batch = Batch(requests, (16, 8), 128, 16, torch.bfloat16, padding=3, window=window)
    check_batch(implementation(paged_attention, backend), batch, True)
    test_with_decode_attention_it_makes_what_it_makes_alone(backend, batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_composition_does_not_matter(backend):
    """A decode alone, among decodes, and beside a prompt: the same row up to rounding."""
    apply = implementation(paged_attention, backend)
    cache = randn(4, 8, 1, 16)
    q = randn(8, 2, 16, seed=1)
    rows = []
    for counts, lengths in (([1], [11]), ([1, 1], [11, 24]), ([1, 7], [11, 20])):
        out = poisoned(sum(counts), 2, 16, dtype=torch.float32)
        table = torch.tensor([[2, 1, 0], [3, 1, 2]], dtype=torch.int32)[: len(counts)]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        apply(out, q[: sum(counts)], cache, cache, table, lens, starts, max(counts), SCALE, 0)
        rows.append(out[0])
    assert_near(rows[1], rows[0].double())
    assert_near(rows[2], rows[0].double())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(lens - m + torch.arange", "(lens + torch.arange"),
        ("        scale=scale,\n", ""),
        ("row[length:] = 0 ", "pass "),
        ("row[:first] = 0", "pass"),
        ("masked_fill(unused, 0)", "masked_fill(begin < 0, 0)"),
        (
            "q.float().transpose(1, 2),",
            "q.float().view(b, m, -1, key_cache.shape[2], q.shape[3]).transpose(2, 3).flatten(2, 3).transpose(1, 2),",
        ),
        ("out[rows] =", "out[rows.start + 1 : rows.stop + 1] ="),
        ("key > position - window", "key >= position - window"),
        ("2 if skip_single else 1", "1"),
        ("2 if skip_single else 1", "3 if skip_single else 1"),
    ],
    ids=[
        "not causal",
        "no scale",
        "NaN read",
        "NaN read before the window",
        "table past the end",
        "head mapping",
        "row offset",
        "window one too long",
        "single queries not skipped",
        "two queries skipped",
    ],
)
def test_mutants_of_the_spec(old, new, tmp_path):
    apply = implementation(mutant(paged_attention, old, new, tmp_path), "spec")
    assert caught(check_mixed, apply) or caught(check_windows, apply) or caught(check_skips, apply)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<= position[:, None])", "< position[:, None])"),
        ("position = context + query", "position = query"),
        ("score_scale = scale *", "score_scale ="),
        ("kv_mask = inside[:, None] & (d < D)[None, :]", "kv_mask = (n[:, None] >= 0) & (d < D)[None, :]"),
        ("head = kv_head * GROUP + m % GROUP", "head = kv_head + (m % GROUP) * 2"),
        ("& (query < query_len)", ""),
        ("acc * shrink[:, None]", "acc"),
        ("first + BLOCK_Q, query_len), 0)", "first + 1, query_len), 0)"),
        ("(context + first + 1) // TILE * TILE", "end // TILE * TILE"),
        ("> (position - window)[:, None]", ">= (position - window)[:, None]"),
        ("context + first - window + 1, 0)", "context + first - window + 1 + TILE, 0)"),
        ("inside & (n > tl.min(position, axis=0) - window)", "inside"),
        ("if WINDOWED else new_best", "if MASKED and not WINDOWED else new_best"),
        ("query_len <= skip_single", "query_len < skip_single"),
        ("query_len <= skip_single", "query_len <= 2 * skip_single"),
        ("query_len <= skip_single", "query_len <= 1"),
    ],
    ids=[
        "own key unseen",
        "context forgotten",
        "no scale",
        "NaN read",
        "head mapping",
        "rows past the end",
        "no rescaling",
        "keys cut",
        "plain tile not whole",
        "window one too long",
        "window begins late",
        "NaN read before the window",
        "nothing seen yet",
        "single queries not skipped",
        "two queries skipped",
        "always skipped",
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_mutants_of_the_kernel(old, new, tmp_path):
    pytest.importorskip("triton")
    apply = implementation(mutant(paged_attention, old, new, tmp_path), "interpret")
    long = Batch([(3, 70), (40, 100)], dtype=torch.float16)
    checks = (check_skips, check_mixed, lambda f: check_batch(f, long), check_windows)
    assert any(caught(check, apply) for check in checks)
