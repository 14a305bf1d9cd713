"""RMS norm, the gate and up products and SwiGLU's gate, fused for steps of few tokens. See _matvec.py."""

from __future__ import annotations

from mrv2lab.ops._matvec import columns, load_tile, normalise_row, times_row
from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous
from mrv2lab.ops.silu_mul import silu_times

tl = None


def norm_matvec_silu_spec(out, x, norm, weight, eps, tile):
    """out = silu(g) * u, (g | u) = rms_norm(x) W^T rounded to the dtype. out: [t, I]; x: [t, K]; weight: [2I, K]."""
    import torch

    from mrv2lab.ops.norm_matvec import norm_matvec_spec
    from mrv2lab.ops.silu_mul import silu_mul_spec

    gate_up = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    norm_matvec_spec(gate_up, x, norm, weight, eps, tile)
    silu_mul_spec(out, gate_up)


@jit(do_not_specialize=["t"])
def norm_matvec_silu_kernel(
    out, out_stride, x, x_stride, norm, weight, t, I, eps,  # noqa: E741
    M: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    first = tl.program_id(0) * ROWS
    gate_tile = load_tile(weight, 0, first, I, K, CHUNKS, LANES, ROWS)
    up_tile = load_tile(weight, I, first, I, K, CHUNKS, LANES, ROWS)
    wait_for_previous(PDL)
    n = first + tl.arange(0, ROWS)
    dtype = out.dtype.element_ty
    for m in tl.static_range(M):
        row = normalise_row(x + tl.minimum(m, t - 1) * x_stride, norm, eps, K, CHUNKS, LANES)
        # rounded to the dtype, as a product that is stored
        gate = times_row(gate_tile, row).to(dtype).to(tl.float32)
        up = times_row(up_tile, row).to(dtype).to(tl.float32)
        tl.store(out + m * out_stride + n, silu_times(gate, up, dtype), mask=n < tl.where(m < t, I, 0))


@op(spec=norm_matvec_silu_spec, kernel=norm_matvec_silu_kernel, writes=("out",), numpy=False)
def norm_matvec_silu(kernel, out, x, norm, weight, eps, tile):
    """out [t, I] = silu(gate) * up; gate, up: rms_norm(x [t, K]) times the halves of ``weight`` [2I, K].

    ``tile``: (gate rows, warps) of a program, which owns as many up rows.
    """
    (t, k), width = x.shape, out.shape[1]
    rows, warps = tile
    if t:
        kernel[(cdiv(width, rows),)](
            out, out.stride(0), x, x.stride(0), norm, weight, t, width, eps,
            M=next_power_of_2(t), **columns(k, weight.element_size()), ROWS=rows,
            num_warps=warps, num_stages=1, **early_start(x),
        )  # fmt: skip
