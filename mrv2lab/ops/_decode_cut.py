"""How decode attention cuts a batch, from host values that hold for every replay of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """How the kernel goes about a batch."""

    # tokens a turn
    tile: int
    num_warps: int
    # runs of keys a request is cut into, at most
    splits: int
    # tiles that are loaded ahead of the one at work
    depth: int
    # a thread's registers at most; None = as the compiler likes
    maxnreg: int | None = None
    # tiles that a run has at least, where there are as many
    least: int = 1


PROGRAMS = 8192
"""Pairs of request and kv head times splits, at most: bounds the scratch."""

ENOUGH = 1024
"""Programs of one warp that keep an H200's memory busy; more of them only add runs to combine."""


def scratch_shapes(heads: int, kv_heads: int, d: int) -> tuple[tuple[int, int], tuple[int], tuple[int]]:
    """Shapes of ``partial`` float32, ``partial_lse`` float32 and ``counters`` int32 (zeros). They serve any batch."""
    rows = PROGRAMS * (heads // kv_heads)
    return (rows, d), (rows,), (PROGRAMS,)


def cut(num_reqs: int, kv_heads: int, max_len: int, element_size: int) -> Cut:
    """What the launcher picks. Runs have 64 tokens or more at the longest length.

    Measured on an H200 (bfloat16, 16/8 heads of 128), us a layer: 41.9 at 256 requests of 152 tokens, 65.7 at 256 and
    95.9 at 384, which is 4.2 TB/s. Many programs want registers that let 16 of them share a multiprocessor (47.0, 72.1,
    105.0 without the limit); few want more bytes in flight each.
    """
    pairs, least = max(1, num_reqs * kv_heads), 1
    splits = max(1, min(ENOUGH // pairs, 32, max_len // 64))
    several = min(4, max_len // 4096, PROGRAMS // pairs)
    if several > splits:  # only so that one very long request does not keep everybody waiting
        splits, least = several, 128
    if element_size == 4:
        return Cut(16, 4, splits, depth=1, least=least)  # one warp spills registers in float32
    if pairs * splits > 3 * ENOUGH // 2:
        return Cut(16, 1, splits, depth=1, maxnreg=128, least=least)
    return Cut(16, 1, splits, depth=2, least=least)
