"""The residual addition and the RMS norm behind it, fused. Rounding as in rms_norm.py."""

from __future__ import annotations

from mrv2lab.ops._op import jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous
from mrv2lab.ops.rms_norm import normalise, num_warps, rms_norm_spec

tl = None


def add_rms_norm_spec(out, x, residual, weight, eps):
    """residual += x, rounded to its dtype; then out = rms_norm(residual). ``out`` may be ``x``. All [t, H]."""
    residual.add_(x)
    rms_norm_spec(out, residual, weight, eps)


@jit
def add_rms_norm_kernel(
    out, out_stride, x, x_stride, residual, residual_stride, weight, eps, H, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < H
    dtype = out.dtype.element_ty
    w = tl.load(weight + col, mask=mask, other=0.0)
    wait_for_previous(PDL)
    total = tl.load(x + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(dtype)
    tl.store(residual + row * residual_stride + col, rounded, mask=mask)
    tl.store(out + row * out_stride + col, normalise(rounded.to(tl.float32), w, eps, H, dtype), mask=mask)


@op(spec=add_rms_norm_spec, kernel=add_rms_norm_kernel, writes=("out", "residual"), numpy=False)
def add_rms_norm(kernel, out, x, residual, weight, eps):
    """Add ``x`` to ``residual`` in place and normalise the sum into ``out``, which may be ``x``. All [t, H]."""
    t, hidden = x.shape
    if t:
        block = next_power_of_2(hidden)
        kernel[(t,)](
            out, out.stride(0), x, x.stride(0), residual, residual.stride(0), weight, eps, hidden,
            BLOCK=block, num_warps=num_warps(block), **early_start(x),
        )  # fmt: skip
