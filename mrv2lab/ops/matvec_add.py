"""A product with a weight, added to the residual stream, fused for steps of few tokens. See _matvec.py."""

from __future__ import annotations

from mrv2lab.ops._matvec import columns, load_row, load_tile, times_row
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous

tl = None


def matvec_add_spec(residual, x, weight, tile):
    """residual += x W^T; the product, summed in float32, is rounded to the dtype first. residual: [t, N]; x: [t, K]."""
    residual.add_((x.float() @ weight.float().t()).to(residual.dtype))


@jit(do_not_specialize=["t"])
def matvec_add_kernel(
    residual, residual_stride, x, x_stride, weight, t, N,
    M: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    first = tl.program_id(0) * ROWS
    tile = load_tile(weight, 0, first, N, K, CHUNKS, LANES, ROWS)
    wait_for_previous(PDL)
    n = first + tl.arange(0, ROWS)
    dtype = residual.dtype.element_ty
    for m in tl.static_range(M):
        mask = n < tl.where(m < t, N, 0)
        at = residual + m * residual_stride + n
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        product = times_row(tile, load_row(x + tl.minimum(m, t - 1) * x_stride, K, CHUNKS, LANES))
        tl.store(at, (before + product.to(dtype).to(tl.float32)).to(dtype), mask=mask)


@op(spec=matvec_add_spec, kernel=matvec_add_kernel, writes=("residual",), numpy=False)
def matvec_add(kernel, residual, x, weight, tile):
    """residual [t, N] += x [t, K] times ``weight`` [N, K], in place. ``tile``: (weight rows, warps) of a program."""
    (t, k), n = x.shape, weight.shape[0]
    rows, warps = tile
    if t:
        kernel[(cdiv(n, rows),)](
            residual, residual.stride(0), x, x.stride(0), weight, t, n,
            M=next_power_of_2(t), **columns(k, weight.element_size()), ROWS=rows,
            num_warps=warps, num_stages=1, **early_start(x),
        )  # fmt: skip
