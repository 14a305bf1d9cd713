"""What the matrix-vector kernels share: a tile of weights held in registers, and its product with one row.

A step of few tokens reads each weight once and computes next to nothing, so it lasts as long as the reading. A program
owns ROWS rows of the weight and loads all of them at once, before it waits for its predecessor. Programs are best one
warp wide: then no sum crosses warps, and nothing in them goes through shared memory. The tile has the shape [CHUNKS,
ROWS, LANES], k = chunk * LANES + lane, LANES being what a warp loads in one instruction.

The tokens' loop is unrolled (M, a power of two, of which the last ones may repeat a token and are not stored): in a
loop the compiler would widen the tile to float32 once for all turns and double its registers.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, next_power_of_2

tl: Any = None


def columns(K: int, element_size: int) -> dict[str, int]:
    """K and how it is cut into CHUNKS x LANES."""
    lanes = min(512 // element_size, next_power_of_2(K))
    return {"K": K, "LANES": lanes, "CHUNKS": next_power_of_2(-(-K // lanes))}


@jit
def load_tile(weight, start, first, N, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Rows first .. first + ROWS - 1 of the N rows from row ``start`` of ``weight`` [.., K], as [CHUNKS, ROWS, LANES].

    Rows past N repeat the last.
    """
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    row = (start + tl.minimum(first + tl.arange(0, ROWS), N - 1)).to(tl.int64)[None, :, None]
    k = chunk * LANES + tl.arange(0, LANES)[None, None, :]
    at = weight + row * K + k
    if K == CHUNKS * LANES:
        return tl.load(at)
    else:
        return tl.load(at, mask=k < K, other=0.0)


@jit
def load_row(x, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """The K numbers at ``x`` as [CHUNKS, LANES], zeros behind them."""
    k = tl.arange(0, CHUNKS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return tl.load(x + k, mask=k < K, other=0.0)


@jit
def normalise_row(x, norm, eps, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """``normalise`` of rms_norm.py for the row at ``x``, as [CHUNKS, LANES]."""
    row = load_row(x, K, CHUNKS, LANES)
    weight = load_row(norm, K, CHUNKS, LANES)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, axis=1), axis=0) / K + eps)
    return ((wide * scale).to(row.dtype).to(tl.float32) * weight.to(tl.float32)).to(row.dtype)


@jit
def times_row(tile, row):
    """float32[ROWS]: ``tile`` [CHUNKS, ROWS, LANES] times ``row`` [CHUNKS, LANES]."""
    products = tile.to(tl.float32) * row.to(tl.float32)[:, None, :]
    return tl.sum(tl.sum(products, axis=0), axis=1)
