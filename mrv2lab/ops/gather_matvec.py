"""Logits of few rows: the rows that get any are looked up inside the product with the vocabulary. See _matvec.py."""

from __future__ import annotations

from mrv2lab.ops._matvec import columns, load_row, load_tile, times_row
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous

tl = None


def gather_matvec_spec(out, x, indices, weight, tile):
    """out[i] = x[indices[i]] W^T, summed in float32. out: [n, V]; x: [t, K]; indices: int64[n]; weight: [V, K]."""
    out.copy_(x[indices].float() @ weight.float().t())


@jit(do_not_specialize=["num_rows"])
def gather_matvec_kernel(
    out, out_stride, x, x_stride, indices, weight, num_rows, N,
    M: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    first = tl.program_id(0) * ROWS
    tile = load_tile(weight, 0, first, N, K, CHUNKS, LANES, ROWS)
    wait_for_previous(PDL)
    n = first + tl.arange(0, ROWS)
    for i in tl.static_range(M):
        index = tl.load(indices + tl.minimum(i, num_rows - 1))
        product = times_row(tile, load_row(x + index * x_stride, K, CHUNKS, LANES)).to(out.dtype.element_ty)
        tl.store(out + i * out_stride + n, product, mask=n < tl.where(i < num_rows, N, 0))


@op(spec=gather_matvec_spec, kernel=gather_matvec_kernel, writes=("out",), numpy=False)
def gather_matvec(kernel, out, x, indices, weight, tile):
    """out [n, V] = rows ``indices`` (int64[n]) of x [t, K], times ``weight`` [V, K].

    ``tile``: (weight rows, warps) of a program.
    """
    (num_rows, vocab), k = out.shape, x.shape[1]
    rows, warps = tile
    if num_rows:
        kernel[(cdiv(vocab, rows),)](
            out, out.stride(0), x, x.stride(0), indices, weight, num_rows, vocab,
            M=next_power_of_2(num_rows), **columns(k, weight.element_size()), ROWS=rows,
            num_warps=warps, num_stages=1, **early_start(x),
        )  # fmt: skip
