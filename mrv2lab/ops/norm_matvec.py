"""RMS norm and a product with a weight, fused for steps of few tokens: each weight is read once. See _matvec.py."""

from __future__ import annotations

from mrv2lab.ops._matvec import columns, load_tile, normalise_row, times_row
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous

tl = None


def norm_matvec_spec(out, x, norm, weight, eps, tile):
    """out = rms_norm(x) W^T, summed in float32. out: [t, N]; x: [t, K]; norm: [K]; weight: [N, K]."""
    import torch

    from mrv2lab.ops.rms_norm import rms_norm_spec

    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_spec(normed, x, norm, eps)
    out.copy_(normed.float() @ weight.float().t())


@jit(do_not_specialize=["t"])
def norm_matvec_kernel(
    out, out_stride, x, x_stride, norm, weight, t, N, eps,
    M: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    first = tl.program_id(0) * ROWS
    tile = load_tile(weight, 0, first, N, K, CHUNKS, LANES, ROWS)
    wait_for_previous(PDL)
    n = first + tl.arange(0, ROWS)
    for m in tl.static_range(M):
        row = normalise_row(x + tl.minimum(m, t - 1) * x_stride, norm, eps, K, CHUNKS, LANES)
        product = times_row(tile, row).to(out.dtype.element_ty)
        tl.store(out + m * out_stride + n, product, mask=n < tl.where(m < t, N, 0))


@op(spec=norm_matvec_spec, kernel=norm_matvec_kernel, writes=("out",), numpy=False)
def norm_matvec(kernel, out, x, norm, weight, eps, tile):
    """out [t, N] = rms_norm(x [t, K]; norm [K], eps) times ``weight`` [N, K]. ``x`` stays; ``out`` may not be ``x``.

    ``tile``: (weight rows, warps) of a program. For few rows t: the kernel goes through them one by one.
    """
    (t, k), n = x.shape, weight.shape[0]
    rows, warps = tile
    if t:
        kernel[(cdiv(n, rows),)](
            out, out.stride(0), x, x.stride(0), norm, weight, t, n, eps,
            M=next_power_of_2(t), **columns(k, weight.element_size()), ROWS=rows,
            num_warps=warps, num_stages=1, **early_start(x),
        )  # fmt: skip
