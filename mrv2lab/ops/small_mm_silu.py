"""The gate and up products with SwiGLU's gate behind them, for steps of tens to hundreds of tokens. See small_mm.py."""

from __future__ import annotations

from mrv2lab.ops._op import cdiv, jit, op
from mrv2lab.ops._pdl import let_next_start, wait_for_previous
from mrv2lab.ops.silu_mul import silu_times
from mrv2lab.ops.small_mm import load_columns, prefetch_rows, tiling

tl = None


def small_mm_silu_spec(out, x, weight, tile):
    """out = silu(g) * u, where (g | u) = x W^T is rounded to the dtype. out: [t, I]; x: [t, K]; weight: [2I, K]."""
    from mrv2lab.ops.silu_mul import silu_mul_spec

    silu_mul_spec(out, (x.float() @ weight.float().t()).to(x.dtype))


@jit(do_not_specialize=["t"])
def small_mm_silu_kernel(
    out, out_stride, x, x_stride, weight, t, I,  # noqa: E741
    K: tl.constexpr, LENGTH: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PER_LINE: tl.constexpr, LINES_P2: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        let_next_start(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = tl.minimum(n, I - 1).to(tl.int64)  # past the end: the last row again, not stored
    up_row = gate_row + I
    if PDL:
        prefetch_rows(weight, gate_row, 0, K, LENGTH, PER_LINE, LINES_P2)
        prefetch_rows(weight, up_row, 0, K, LENGTH, PER_LINE, LINES_P2)
    wait_for_previous(PDL)
    x_rows = x + tl.minimum(m, t - 1).to(tl.int64)[:, None] * x_stride
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, LENGTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = load_columns(x_rows, k, K, EVEN)
        gate_part = load_columns(weight + gate_row[:, None] * K, k, K, EVEN)
        up_part = load_columns(weight + up_row[:, None] * K, k, K, EVEN)
        gate = tl.dot(a, tl.trans(gate_part), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(up_part), up, input_precision="ieee")
    if LATE:
        let_next_start(PDL)
    dtype = out.dtype.element_ty
    act = silu_times(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, act, mask=(m < t)[:, None] & (n < I)[None, :])


@op(spec=small_mm_silu_spec, kernel=small_mm_silu_kernel, writes=("out",), numpy=False)
def small_mm_silu(kernel, out, x, weight, tile):
    """out [t, I] = silu(gate) * up; gate, up: x [t, K] times the halves of ``weight`` [2I, K].

    ``tile``: as for ``small_mm``, with BLOCK_N gate rows and as many up rows.
    """
    t, width = out.shape
    if t:
        kernel[(cdiv(t, tile[0]), cdiv(width, tile[1]))](
            out, out.stride(0), x, x.stride(0), weight, t, width, **tiling(x, 1, tile)
        )
